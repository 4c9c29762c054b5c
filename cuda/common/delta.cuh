// Parts of the delta-net: norms of a head by a warp; the delta rule of one token and one column of
// a value head by 4 lanes.
#pragma once

#include "cpp/ops/recurrent.h"
#include "cuda/common/reduce.cuh"

namespace imp::cuda {

// to[0..padded) = x * scale / |x|, by a warp.
__device__ __forceinline__ void normed_head(const float* x, int dim, float scale, float* to,
                                            int padded) {
  float squares = 0;
  for (int i = lane_id(); i < dim; i += 32) squares = fmaf(x[i], x[i], squares);
  const float r = scale / sqrtf(warp_sum(squares) + l2_norm_eps);
  for (int i = lane_id(); i < padded; i += 32) to[i] = i < dim ? x[i] * r : 0.0f;
}

inline constexpr int delta_columns = 8;  // of a warp: lane l has column l % 8 and slice l / 8

// Key of element i of a lane's slice.
__device__ __forceinline__ int delta_key(int i) {
  return 16 * (i / 4) + 4 * (lane_id() / delta_columns) + i % 4;
}

__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// e^g of a value head.
__device__ __forceinline__ float delta_decay(float a, float alpha, float dt) {
  return expf(a * softplus(alpha + dt));
}

// s <- decay s + k change, where change = beta (value - decay s . k); returns s . q. `keys` and
// `queries` are normed, 16 * Quads floats of shared memory with zeros past the key dimension.
template <int Quads>
__device__ __forceinline__ float delta_step(float (&s)[4 * Quads], const float* keys,
                                            const float* queries, float value, float decay,
                                            float beta) {
  const int slice = lane_id() / delta_columns;
  const auto quad = [slice](const float* p, int m) {
    return reinterpret_cast<const float4*>(p)[4 * m + slice];
  };
  const auto over_slices = [](float v) {
    v += __shfl_xor_sync(all_lanes, v, 2 * delta_columns);
    return v + __shfl_xor_sync(all_lanes, v, delta_columns);
  };
  float predicted = 0;
#pragma unroll
  for (int m = 0; m < Quads; ++m) {
    const float4 k = quad(keys, m);
    predicted = fmaf(k.x, s[4 * m], predicted);
    predicted = fmaf(k.y, s[4 * m + 1], predicted);
    predicted = fmaf(k.z, s[4 * m + 2], predicted);
    predicted = fmaf(k.w, s[4 * m + 3], predicted);
  }
  const float change = beta * fmaf(-decay, over_slices(predicted), value);
  float out = 0;
#pragma unroll
  for (int m = 0; m < Quads; ++m) {
    const float4 k = quad(keys, m), q = quad(queries, m);
    out = fmaf(q.x, s[4 * m] = fmaf(k.x, change, decay * s[4 * m]), out);
    out = fmaf(q.y, s[4 * m + 1] = fmaf(k.y, change, decay * s[4 * m + 1]), out);
    out = fmaf(q.z, s[4 * m + 2] = fmaf(k.z, change, decay * s[4 * m + 2]), out);
    out = fmaf(q.w, s[4 * m + 3] = fmaf(k.w, change, decay * s[4 * m + 3]), out);
  }
  return over_slices(out);
}

}  // namespace imp::cuda
