// Sums over a warp or a block in a fixed order, so that results repeat bit for bit.
#pragma once

#include <cstdint>

namespace imp::cuda {

inline constexpr unsigned all_lanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) & 31; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) >> 5; }

// Every lane gets the sum.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(all_lanes, v, d);
  return v;
}

// 1 / rms(x) over dim elements, by a warp.
__device__ __forceinline__ float rms_factor(const float* x, int dim, float eps) {
  float squares = 0;
  for (int i = lane_id(); i < dim; i += 32) squares = fmaf(x[i], x[i], squares);
  return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + eps);
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(all_lanes, v, d));
  return v;
}

// Sums N values (a power of two up to 32) at once: lane l gets the sum of v[l % N]. The pairs are
// those of warp_sum, so the bits are too.
template <int N, int Distance = 16>
__device__ __forceinline__ float warp_sums(float (&v)[N]) {
  if constexpr (Distance == 0) {
    return v[0];
  } else if constexpr (Distance >= N) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(all_lanes, v[i], Distance);
    return warp_sums<N, Distance / 2>(v);
  } else {  // each half of the lanes goes on with half of the values
    const bool upper = (lane_id() & Distance) != 0;
    float kept[Distance];
#pragma unroll
    for (int i = 0; i < Distance; ++i) {
      const float give = upper ? v[i] : v[i + Distance];
      kept[i] = (upper ? v[i + Distance] : v[i]) + __shfl_xor_sync(all_lanes, give, Distance);
    }
    return warp_sums<Distance, Distance / 2>(kept);
  }
}

// Every thread of a block of `Threads` gets the sum of all N values of each, with the bits of a
// block of N * Threads whose thread i + n * Threads has v[n] of thread i.
template <int Threads, int N>
__device__ __forceinline__ float block_sum(float (&v)[N]) {
  constexpr int warps = Threads / 32;
  __shared__ float part[N * warps];
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = warp_sum(v[n]);
  __syncthreads();  // an earlier call may still be reading
  if (lane_id() == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) part[n * warps + warp_id()] = v[n];
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < N * warps; ++i) total += part[i];
  return total;
}

template <int Threads>
__device__ __forceinline__ float block_sum(float v) {
  float one[] = {v};
  return block_sum<Threads>(one);
}

}  // namespace imp::cuda
