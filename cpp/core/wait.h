// Waiting with an end. C++20-clean.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace imp {

// Asks `done` until it says yes or `seconds` have passed; whether it said yes. What takes less than
// 10 ms is noticed at once, the rest after sleeps of at most 1 ms.
template <class F>
bool wait_for(F&& done, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds spin(10), longest(1);
  const Clock::time_point begin = Clock::now();
  while (!done()) {
    const Clock::duration waited = Clock::now() - begin;
    if (std::chrono::duration<double>(waited).count() >= seconds) return false;
    if (waited > spin) std::this_thread::sleep_for(std::min<Clock::duration>(waited / 64, longest));
  }
  return true;
}

}  // namespace imp
