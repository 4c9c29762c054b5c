// Kernel launches that overlap: a kernel may start while the one before it still runs, and waits
// inside, in begin(), for its end. Whatever no kernel of the step writes (weights, the step's
// inputs, state that only this op touches) may be read before.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace imp::cuda {

// Whether the current device knows programmatic dependent launches.
bool overlaps_launches();

#ifdef __CUDACC__

// Every kernel that is started by launch() calls it, in every thread, before it touches anything
// that an earlier kernel wrote or reads.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Into the second cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps_launches() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "cudaLaunchKernelEx");
}

#endif

}  // namespace imp::cuda
