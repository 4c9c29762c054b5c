// Rows of a stored matrix against a few rows of activations: the core of linear maps and experts.
#pragma once

#include "cuda/common/formats.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"

namespace imp::cuda {

inline constexpr int rows_at_once = 4;    // weight rows of a warp: they share the activations
inline constexpr int tokens_at_once = 8;  // activation rows of a warp: they share the weights
inline constexpr int matvec_warps = 8;    // of a block

// Starts the rows' way into the second cache: lanes `start` of `step` share their lines.
template <int R>
__device__ __forceinline__ void prefetch_rows(const Row (&w)[R], std::int64_t row_bytes, int start,
                                              int step) {
  constexpr int line = 128;
  for (std::int64_t at = static_cast<std::int64_t>(start) * line; at < row_bytes;
       at += static_cast<std::int64_t>(step) * line)
#pragma unroll
    for (int r = 0; r < R; ++r) prefetch(w[r].data + at);
}

// acc + the dot product of a unit, decoded to v, and its 8 activations.
template <class F>
__device__ __forceinline__ float add_unit(const typename F::Raw& raw, const float (&v)[unit_elems],
                                          const float4& a, const float4& b, float acc) {
  float sum = F::scaled ? 0.0f : acc;
  sum = fmaf(v[0], a.x, sum);
  sum = fmaf(v[1], a.y, sum);
  sum = fmaf(v[2], a.z, sum);
  sum = fmaf(v[3], a.w, sum);
  sum = fmaf(v[4], b.x, sum);
  sum = fmaf(v[5], b.y, sum);
  sum = fmaf(v[6], b.z, sum);
  sum = fmaf(v[7], b.w, sum);
  if constexpr (F::scaled) sum = fmaf(F::factor(raw), sum, acc);
  return sum;
}

// acc[t][r] += this lane's share of w[r] . x[t]: units start, start + step, ... The order of the
// additions depends on neither T nor the neighbours. Whole: rows are whole, aligned units.
template <class F, int T, int R, bool Whole>
__device__ __forceinline__ void dot_rows(const Row (&w)[R], const float* const (&x)[T], int cols,
                                         int start, int step, float (&acc)[T][R]) {
  const int units = (cols + unit_elems - 1) / unit_elems;
  if constexpr (Whole) {
    // Units whose loads are in flight together.
    constexpr int ahead = T >= 4 || sizeof(typename F::Raw) > 16   ? 1
                          : T == 1 && sizeof(typename F::Raw) <= 8 ? 3
                                                                   : 2;
    for (int u0 = start; u0 < units; u0 += ahead * step) {
      typename F::Raw raw[ahead][R];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (u0 + i * step >= units) break;
#pragma unroll
        for (int r = 0; r < R; ++r) raw[i][r] = F::load(w[r], u0 + i * step);
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int u = u0 + i * step;
        if (u >= units) break;
        const int first = F::first(u), second = F::second(u);
        float v[R][unit_elems];
#pragma unroll
        for (int r = 0; r < R; ++r) F::decode(raw[i][r], v[r]);
#pragma unroll
        for (int t = 0; t < T; ++t) {
          const float4 a = *reinterpret_cast<const float4*>(x[t] + first);
          const float4 b = *reinterpret_cast<const float4*>(x[t] + second);
#pragma unroll
          for (int r = 0; r < R; ++r) acc[t][r] = add_unit<F>(raw[i][r], v[r], a, b, acc[t][r]);
        }
      }
    }
  } else {
    for (int u = start; u < units; u += step)
      for (int i = u * unit_elems; i < min(cols, (u + 1) * unit_elems); ++i)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float v = F::one(w[r].data, i);
#pragma unroll
          for (int t = 0; t < T; ++t) acc[t][r] = fmaf(v, x[t][i], acc[t][r]);
        }
  }
}

// Lane l gets the warp's sum of acc[l / R % T][l % R].
template <int T, int R>
__device__ __forceinline__ float sum_rows(float (&acc)[T][R]) {
  float flat[T * R];
#pragma unroll
  for (int t = 0; t < T; ++t)
#pragma unroll
    for (int r = 0; r < R; ++r) flat[t * R + r] = acc[t][r];
  return warp_sums<T * R>(flat);
}

// Whether rows are whole units at whole addresses.
inline bool whole_units(const Matrix& m) { return m.cols % unit_elems == 0; }

// Calls f(F{}) for the format of a type; false if kernels know none.
#pragma nv_exec_check_disable
template <class Function>
__host__ __device__ bool with_format(DType type, Function f) {
  switch (type) {
    case DType::f32:
      f(F32{});
      return true;
    case DType::f16:
      f(F16{});
      return true;
    case DType::bf16:
      f(Bf16{});
      return true;
    case DType::f8_e4m3:
      f(F8E4m3{});
      return true;
    case DType::q8_0:
      f(Q8{});
      return true;
    case DType::nvfp4:
      f(Nvfp4{});
      return true;
    default:
      return false;
  }
}

}  // namespace imp::cuda
