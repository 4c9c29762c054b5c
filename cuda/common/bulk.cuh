// Bulk copies from global into shared memory, counted by barriers there, and back, which the thread
// that started them waits for: one instruction moves whole rows, and what is in flight needs no
// registers. Older code than 9.0 never calls them.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/common/shared_memory.cuh"

namespace imp::cuda {

using Barrier = std::uint64_t;  // in shared memory

// A phase of each ends with so many arrivals and the bytes they announced.
__device__ __forceinline__ void init_barriers(Barrier* b, int n, int arrivals = 1) {
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
  for (int i = 0; i < n; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b + i)),
                 "r"(arrivals)
                 : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // bulk copies see them
#endif
}

// The arrival of a phase: so many bytes will come.
__device__ __forceinline__ void expect_bytes(Barrier* b, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
#endif
}

// An arrival without bytes: what this thread did before is seen by those who wait.
__device__ __forceinline__ void arrive(Barrier* b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
#endif
}

// Waits for the end of a phase; phases are numbered 0, 1, 0, 1, ...
__device__ __forceinline__ void await_phase(Barrier* b, std::uint32_t phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(b)),
      "r"(phase)
      : "memory");
#endif
}

// Stages in shared memory that are filled and used in turn.
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(int size, int at = 0) : size_(size) { advance(at); }
  __device__ __forceinline__ int at() const { return at_; }
  __device__ __forceinline__ std::uint32_t phase() const { return phase_; }
  // Of the users' end before it is filled again; the first time there was none.
  __device__ __forceinline__ std::uint32_t free_phase() const { return phase_ ^ 1; }
  __device__ __forceinline__ void advance(int n = 1) {
    for (at_ += n; at_ >= size_; at_ -= size_) phase_ ^= 1;
  }

 private:
  int size_, at_ = 0;
  std::uint32_t phase_ = 0;
};

// Addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, std::uint32_t bytes,
                                          Barrier* b) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b))
      : "memory");
#endif
}

// Shared memory that this thread wrote is seen by the bulk copies after the next barrier.
__device__ __forceinline__ void show_bulk_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The way back; addresses and size as above.
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
#endif
}

// Until shared memory may be written again that all of this thread's stores but the latest N read.
template <int N>
__device__ __forceinline__ void await_stores_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
}

// Until all of this thread's stores are done.
__device__ __forceinline__ void await_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// The box of a tensor of up to three dimensions that begins at column c, row r, plane p; what is
// outside of the tensor arrives as zeros. `Once`: the second cache need not keep it.
template <bool Once>
__device__ __forceinline__ void tensor_copy(void* to, const CUtensorMap& from, int c, int r, int p,
                                            Barrier* b) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Once)
    asm volatile(
        "{\n"
        ".reg .b64 first;\n"
        "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], first;\n"
        "}" ::"r"(shared_address(to)),
        "l"(&from), "r"(c), "r"(r), "r"(p), "r"(shared_address(b))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
        "l"(&from), "r"(c), "r"(r), "r"(p), "r"(shared_address(b))
        : "memory");
#endif
}

// Into the second cache.
__device__ __forceinline__ void bulk_prefetch(const void* from, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

}  // namespace imp::cuda
