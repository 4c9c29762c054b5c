// Workers wait for a new epoch: first spinning, since the next loop usually follows within
// microseconds, then asleep.
#include "cpp/core/threads.h"

#include "cpp/core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace imp {
namespace {

constexpr int spins_before_sleep = 4000;  // about 50 us

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads < 1 || threads > max_threads)
    fail(ErrorCode::invalid_argument, str(threads, " threads; imp takes 1 to ", max_threads));
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& w : workers_) w.join();
}

void ThreadPool::take_tasks(int thread) noexcept {
  for (;;) {
    const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    try {
      call_(context_, task, thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
      next_.store(tasks_, std::memory_order_relaxed);
    }
  }
}

bool ThreadPool::join(std::uint32_t epoch) {
  std::uint64_t v = loop_.load(std::memory_order_acquire);
  while ((v >> 32) == epoch && (v & over) == 0)
    if (loop_.compare_exchange_weak(v, v + 1, std::memory_order_acq_rel, std::memory_order_acquire))
      return true;
  return false;
}

void ThreadPool::leave() {
  const std::uint64_t before = loop_.fetch_sub(1, std::memory_order_acq_rel);
  if ((before & over) != 0 && (before & inside) == 1) loop_.notify_one();
}

void ThreadPool::run(std::int64_t tasks, Call call, void* context) {
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  error_ = nullptr;
  failed_.store(false, std::memory_order_relaxed);
  next_.store(0, std::memory_order_relaxed);
  const std::uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  loop_.store(static_cast<std::uint64_t>(epoch) << 32, std::memory_order_release);
  epoch_.store(epoch, std::memory_order_release);
  epoch_.notify_all();
  take_tasks(0);
  std::uint64_t v = loop_.fetch_or(over, std::memory_order_acq_rel) | over;
  for (int spins = 0; (v & inside) != 0; ++spins) {
    if (spins < spins_before_sleep) {
      pause();
    } else {
      loop_.wait(v, std::memory_order_acquire);
    }
    v = loop_.load(std::memory_order_acquire);
  }
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    std::uint32_t epoch = epoch_.load(std::memory_order_acquire);
    for (int spins = 0; epoch == seen; ++spins) {
      if (spins < spins_before_sleep) {
        pause();
      } else {
        epoch_.wait(seen, std::memory_order_acquire);
      }
      epoch = epoch_.load(std::memory_order_acquire);
    }
    seen = epoch;
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!join(epoch)) continue;
    take_tasks(thread);
    leave();
  }
}

}  // namespace imp
