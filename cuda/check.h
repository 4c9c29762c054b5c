// A failed CUDA call becomes an imp::Error that names the call and the place. C++20-clean.
#pragma once

#include <cuda_runtime_api.h>

#include "cpp/core/error.h"

namespace imp::cuda {

inline void check(cudaError_t status, const char* call,
                  std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a failed call must not be found again by the next check
  fail(status == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::internal,
       str(call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"), where);
}

// After a kernel launch; `op` names it.
inline void check_launch(const char* op,
                         std::source_location where = std::source_location::current()) {
  check(cudaGetLastError(), op, where);
}

}  // namespace imp::cuda
