// Rotation by position: the table and single heads.
#pragma once

#include <cstdint>

#include "cuda/common/reduce.cuh"

namespace imp::cuda {

// Angle of pair j; rounded to fp32 where the models' own code rounds.
__device__ __forceinline__ float rope_angle(std::int64_t position, int j, int dim, double theta) {
  const float exponent = static_cast<float>(2 * j) / static_cast<float>(dim);
  const float frequency = 1.0f / static_cast<float>(pow(theta, static_cast<double>(exponent)));
  return static_cast<float>(position) * frequency;
}

struct Into {
  float* y;
  __device__ __forceinline__ void operator()(int i, float v) const { y[i] = v; }
};

// A warp: put(i, y[i]) for y[0..dim) = rope(x / rms(x) * w); table: cosines and sines of the
// position.
template <class Put>
__device__ __forceinline__ void norm_rope(const float* x, const float* w, const float* table,
                                          int dim, int rotary_dim, float eps, Put put) {
  const float r = rms_factor(x, dim, eps);
  const int half = rotary_dim / 2;
  for (int i = lane_id(); i < half; i += 32) {
    const float a = x[i] * r * w[i], b = x[half + i] * r * w[half + i];
    const float cos = table[i], sin = table[half + i];
    put(i, a * cos - b * sin);
    put(half + i, b * cos + a * sin);
  }
  for (int i = 2 * half + lane_id(); i < dim; i += 32) put(i, x[i] * r * w[i]);
}

}  // namespace imp::cuda
