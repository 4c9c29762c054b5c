// Waiting with an end. C++20-clean.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace imp {

// Asks `done` until it says yes or `seconds` have passed; whether it said yes. Within 0.1 s it is
// noticed at once (decode steps end there), later after sleeps of less than 0.4 % of the wait.
template <class F>
bool wait_for(F&& done, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds spin(100), longest(1);
  const Clock::time_point begin = Clock::now();
  while (!done()) {
    const Clock::duration waited = Clock::now() - begin;
    if (std::chrono::duration<double>(waited).count() >= seconds) return false;
    if (waited > spin)
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 256, longest));
  }
  return true;
}

}  // namespace imp
