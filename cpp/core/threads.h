// A fixed team of threads that shares loops. Tasks are taken from one counter, so which thread runs
// a task is open, but a task's result must not depend on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace imp {

inline constexpr int max_threads = 1024;

class ThreadPool {
 public:
  // `threads` includes the caller; 1 to max_threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls f(task, thread) for every task in [0, tasks); thread is in [0, size()). Returns when all
  // are done and rethrows the first exception. Not reentrant.
  template <class F>
  void parallel_for(std::int64_t tasks, F&& f) {
    using Function = std::remove_reference_t<F>;
    if (tasks <= 0) return;
    if (tasks == 1 || workers_.empty()) {
      for (std::int64_t t = 0; t < tasks; ++t) f(t, 0);
      return;
    }
    run(
        tasks,
        [](void* context, std::int64_t task, int thread) {
          (*static_cast<Function*>(context))(task, thread);
        },
        const_cast<std::remove_const_t<Function>*>(std::addressof(f)));
  }

 private:
  using Call = void (*)(void*, std::int64_t, int);
  void run(std::int64_t tasks, Call call, void* context);
  void work(int thread);
  void take_tasks(int thread) noexcept;
  bool join(std::uint32_t epoch);
  void leave();

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  std::int64_t tasks_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<std::int64_t> next_{0};
  // One loop at a time: its number, whether it is over, and the workers inside. A worker that wakes
  // late finds the loop over and is not waited for.
  alignas(64) std::atomic<std::uint64_t> loop_{over};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};

  static constexpr std::uint64_t over = std::uint64_t{1} << 31;
  static constexpr std::uint64_t inside = over - 1;
};

}  // namespace imp
