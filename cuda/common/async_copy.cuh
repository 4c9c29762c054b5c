// Copies from global to shared memory that a thread starts and later waits for, in groups.
#pragma once

#include "cuda/common/shared_memory.cuh"

namespace imp::cuda {

// 16 bytes; zeros if there is nothing to read, whatever `from` is.
__device__ __forceinline__ void copy_async(void* shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// What was started since the last group becomes one.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups but the latest N have arrived.
template <int N>
__device__ __forceinline__ void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace imp::cuda
