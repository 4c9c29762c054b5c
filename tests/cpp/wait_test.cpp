// Waits end, one way or the other.
#include "cpp/core/wait.h"

#include <doctest/doctest.h>

#include "cpp/runtime/backend.h"

namespace imp {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

TEST_CASE("what is done is not waited for, what never is ends at the limit") {
  int asked = 0;
  CHECK(wait_for([&] { return ++asked == 1; }, 0));
  CHECK(asked == 1);
  CHECK_FALSE(wait_for([] { return false; }, 0));
  const Clock::time_point begin = Clock::now();
  asked = 0;
  CHECK_FALSE(wait_for([&] { return ++asked < 0; }, 0.15));
  const double waited = seconds_since(begin);
  CHECK(waited >= 0.15);
  CHECK(waited < 5);
  CHECK(asked > 10);
}

TEST_CASE("after the first tenth of a second it sleeps") {
  const Clock::time_point begin = Clock::now();
  int late = 0;  // questions after the spinning
  CHECK(wait_for(
      [&] {
        late += seconds_since(begin) > 0.11;
        return seconds_since(begin) > 0.2;
      },
      60));
  CHECK(late < 1000);
}

TEST_CASE("longer steps may take longer") {
  CHECK(step_limit(60, 0) == 60);
  CHECK(step_limit(60, step_timeout_rows) == 60);
  CHECK(step_limit(60, step_timeout_rows + 1) > 60);
  CHECK(step_limit(2, 8 * step_timeout_rows) == 16);
}

}  // namespace
}  // namespace imp
