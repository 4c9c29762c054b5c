// Scalar functions of the activations, and launch arithmetic.
#pragma once

#include <cstdint>

#include "cpp/ops/act.h"

namespace imp::cuda {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float activate(Act act, float x) {
  return act == Act::silu ? silu(x) : act == Act::sigmoid ? sigmoid(x) : x;
}

template <class A, class B>
__host__ __device__ constexpr std::int64_t div_up(A a, B b) {
  return (static_cast<std::int64_t>(a) + b - 1) / b;
}

inline constexpr int block_threads = 256;  // of elementwise and row kernels

// Blocks for n independent elements.
inline unsigned blocks_for(std::int64_t n) {
  return static_cast<unsigned>(div_up(n, block_threads));
}
__device__ __forceinline__ std::int64_t global_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

}  // namespace imp::cuda
