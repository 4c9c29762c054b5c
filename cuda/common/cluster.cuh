// Blocks of a cluster: they run at the same time and see each other's shared memory.
#pragma once

#include "cuda/common/shared_memory.cuh"

namespace imp::cuda {

// A barrier of all threads of a cluster in two halves: what was written before a thread arrives is
// seen by those that have waited. Before the first remote write, one barrier makes sure that all
// blocks have started (nothing needs to be seen: cluster_started); after the last one, another that
// none has ended.
__device__ __forceinline__ void cluster_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// *p = v in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void store_remote(float* p, unsigned rank, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " st.shared::cluster.f32 [there], %2; }" ::"r"(shared_address(p)),
      "r"(rank), "f"(v)
      : "memory");
#endif
}

// *p in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float load_remote(const float* p, int rank) {
  float v = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2;"
      " ld.shared::cluster.f32 %0, [there]; }"
      : "=f"(v)
      : "r"(shared_address(p)), "r"(rank)
      : "memory");
#endif
  return v;
}

}  // namespace imp::cuda
