// Rotation by position: the table and single heads.
#pragma once

#include <cstdint>

namespace imp::cuda {

// Angle of pair j; rounded to fp32 where the models' own code rounds.
__device__ __forceinline__ float rope_angle(std::int64_t position, int j, int dim, double theta) {
  const float exponent = static_cast<float>(2 * j) / static_cast<float>(dim);
  const float frequency = 1.0f / static_cast<float>(pow(theta, static_cast<double>(exponent)));
  return static_cast<float>(position) * frequency;
}

}  // namespace imp::cuda
