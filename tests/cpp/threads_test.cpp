// The thread pool: every task once, exceptions, many small loops, limits.
#include "cpp/core/threads.h"

#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/error.h"
#include "tests/cpp/errors.h"

namespace imp {
namespace {
constexpr int team_sizes[] = {1, 2, 3, 8, 33};
}

TEST_CASE("every task runs once, on a thread of the team") {
  for (const int threads : team_sizes) {
    ThreadPool pool(threads);
    CHECK(pool.size() == threads);
    for (const std::int64_t tasks : {0, 1, 2, 3, 7, 64, 1000, 10007}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::atomic<int> strangers{0};
      pool.parallel_for(tasks, [&](std::int64_t t, int thread) {
        ++runs[static_cast<std::size_t>(t)];
        if (thread < 0 || thread >= threads) ++strangers;
      });
      int wrong = 0;
      for (const auto& n : runs) wrong += n != 1;
      CHECK(wrong == 0);
      CHECK(strangers == 0);
    }
    pool.parallel_for(-1, [](std::int64_t, int) { FAIL("a task of no tasks"); });
  }
}

TEST_CASE("a thread runs one task at a time") {  // so it may use workspace of its own
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> overlaps{0};
  pool.parallel_for(2000, [&](std::int64_t, int thread) {
    if (++inside[static_cast<std::size_t>(thread)] != 1) ++overlaps;
    --inside[static_cast<std::size_t>(thread)];
  });
  CHECK(overlaps == 0);
}

TEST_CASE("results are there when the loop returns") {
  ThreadPool pool(3);
  std::vector<std::int64_t> x(1 << 16);
  for (int round = 1; round <= 20; ++round) {
    pool.parallel_for(std::ssize(x),
                      [&](std::int64_t t, int) { x[static_cast<std::size_t>(t)] += t; });
    const std::int64_t n = std::ssize(x);
    CHECK(std::accumulate(x.begin(), x.end(), std::int64_t{0}) == round * n * (n - 1) / 2);
  }
}

TEST_CASE("many small loops") {
  for (const int threads : {2, 5}) {
    ThreadPool pool(threads);
    std::int64_t total = 0;
    for (int i = 0; i < 3000; ++i) {
      std::atomic<std::int64_t> sum{0};
      pool.parallel_for(i % 7, [&](std::int64_t t, int) { sum += t + 1; });
      total += sum;
    }
    std::int64_t want = 0;
    for (int i = 0; i < 3000; ++i) want += (i % 7) * (i % 7 + 1) / 2;
    CHECK(total == want);
  }
}

TEST_CASE("a pool inside a task of another") {
  ThreadPool outer(3);
  std::atomic<int> runs{0};
  outer.parallel_for(6, [&](std::int64_t, int) {
    ThreadPool inner(2);
    inner.parallel_for(10, [&](std::int64_t, int) { ++runs; });
  });
  CHECK(runs == 60);
}

TEST_CASE("the first exception comes out, the pool goes on") {
  for (const int threads : team_sizes) {
    ThreadPool pool(threads);
    for (int round = 0; round < 20; ++round) {
      std::string message;
      try {
        pool.parallel_for(500, [&](std::int64_t t, int) {
          if (t % 100 == 37) throw std::runtime_error("task " + std::to_string(t));
        });
      } catch (const std::runtime_error& e) {
        message = e.what();
      }
      CHECK(message.starts_with("task "));
      std::atomic<int> runs{0};
      pool.parallel_for(100, [&](std::int64_t, int) { ++runs; });
      CHECK(runs == 100);
    }
    CHECK_THROWS_AS(pool.parallel_for(1, [](std::int64_t, int) { throw 1; }), int);
  }
}

TEST_CASE("threads at the limits") {
  for (const int threads : {0, -1, max_threads + 1})
    test::refused([&] { ThreadPool pool(threads); }, ErrorCode::invalid_argument,
                  {std::to_string(threads), std::to_string(max_threads)});
  ThreadPool pool(max_threads);
  std::atomic<int> runs{0};
  pool.parallel_for(5000, [&](std::int64_t, int) { ++runs; });
  CHECK(runs == 5000);
}

}  // namespace imp
