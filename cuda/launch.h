// Kernel launches that overlap: a kernel may start while the one before it still runs, and waits
// inside, in begin(), for its end. Whatever no kernel of the step writes (weights, the step's
// inputs, state that only this op touches) may be read before.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "cuda/check.h"

namespace imp::cuda {

// Whether the current device knows programmatic dependent launches and clusters of blocks.
bool overlaps_launches();

#ifdef __CUDACC__

// The next kernel may start once all blocks have called it (or are done).
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the kernel before.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Every kernel that is started by launch() calls it, in every thread, before it touches anything
// that an earlier kernel wrote or reads. Where a kernel calls its parts in another order, it says
// what the next one gains.
__device__ __forceinline__ void begin() {
  allow_next();
  await_previous();
}

// Into the second cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// `cluster` blocks that adjoin run at the same time and see each other's shared memory.
template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster,
                     std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned n = 0;
  if (overlaps_launches()) {
    attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[n++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[n].id = cudaLaunchAttributeClusterDimension;
    attributes[n++].val.clusterDim = {cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = n;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "cudaLaunchKernelEx");
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
  launch_clusters(kernel, grid, block, 1, shared_bytes, stream,
                  std::forward<Arguments>(arguments)...);
}

#endif

}  // namespace imp::cuda
