// Waits for the device, none of them without an end. C++20-clean.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cpp/core/wait.h"
#include "cpp/runtime/backend.h"
#include "cuda/check.h"

namespace imp::cuda {

inline constexpr double load_wait_seconds = 60;  // of a copy or a packing while weights are loaded

// Waits for a stream; `what` it does is for the error, a timeout.
inline void finish(cudaStream_t stream, const char* what) {
  cudaError_t status = cudaErrorNotReady;
  const auto done = [&] { return (status = cudaStreamQuery(stream)) != cudaErrorNotReady; };
  if (!wait_for(done, load_wait_seconds))
    fail(ErrorCode::timeout,
         str(what, ": the device was not done after ", load_wait_seconds, " s"));
  check(status, what);
}

// Bounds the waits for steps. After one that did not end, nothing is asked of the device any more.
class Watchdog {
 public:
  // `seconds`: of a step of up to step_timeout_rows.
  explicit Watchdog(double seconds) : seconds_(seconds) {}

  // The device works on a step of so many rows from now on.
  void begin(std::int64_t rows) {
    rows_ = rows;
    limit_ = step_limit(seconds_, rows);
  }
  // Fails (timeout) naming the step.
  void wait(cudaStream_t stream) {
    wait([stream] { return cudaStreamQuery(stream); });
  }
  void wait(cudaEvent_t event) {
    wait([event] { return cudaEventQuery(event); });
  }
  // Fails (timeout) if a step has not ended.
  void check_alive() const {
    if (lost_) fail(ErrorCode::timeout, str("this session cannot go on: ", reason_));
  }
  bool lost() const { return lost_; }

 private:
  template <class Query>
  void wait(Query query) {
    check_alive();
    cudaError_t status = cudaErrorNotReady;
    if (!wait_for([&] { return (status = query()) != cudaErrorNotReady; }, limit_)) {
      lost_ = true;
      reason_ = str("a step of ", rows_, " rows was not done after ", limit_, " s");
      fail(ErrorCode::timeout, reason_);
    }
    check(status, "a step");
  }

  double seconds_, limit_ = load_wait_seconds;
  std::int64_t rows_ = 0;
  bool lost_ = false;
  std::string reason_;
};

}  // namespace imp::cuda
