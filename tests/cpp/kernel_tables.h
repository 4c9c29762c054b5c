// The kernel tables that this processor runs, and values to feed them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpp/core/half.h"
#include "cpp/cpu/kernels/kernels.h"
#include "cpp/quant/quant.h"

namespace imp::cpu {

inline std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> all{&generic_kernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    all.push_back(&avx2_kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    all.push_back(&avx512_kernels);
#endif
  return all;
}

class Random {
 public:
  explicit Random(std::uint32_t seed) : rng_(seed) {}
  float uniform(float from, float to) {
    return std::uniform_real_distribution<float>(from, to)(rng_);
  }
  std::vector<float> floats(std::int64_t n, float from = -1, float to = 1) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& f : v) f = uniform(from, to);
    return v;
  }
  std::uint32_t bits() { return static_cast<std::uint32_t>(rng_()); }
  // `elems` stored weights of magnitude about 1.
  std::vector<std::byte> weights(DType type, std::int64_t elems) {
    std::vector<std::byte> w(row_bytes(type, elems));
    const auto& info = type_info(type);
    const auto unit = static_cast<std::size_t>(info.block_bytes);
    for (std::size_t b = 0; b < w.size(); b += unit) {
      for (std::size_t i = 0; i < unit; ++i) w[b + i] = static_cast<std::byte>(bits());
      const float f = uniform(-1, 1);
      const std::uint16_t bf16 = float_to_bf16(f), f16 = float_to_half(f),
                          d = float_to_half(f / 127);
      if (type == DType::f32) std::memcpy(&w[b], &f, 4);
      if (type == DType::bf16) std::memcpy(&w[b], &bf16, 2);
      if (type == DType::f16) std::memcpy(&w[b], &f16, 2);
      if (type == DType::f8_e4m3)
        w[b] = static_cast<std::byte>((bits() & 0x80) | (bits() % 0x38));  // |w| < 1
      if (type == DType::q8_0) std::memcpy(&w[b], &d, 2);
      if (type == DType::nvfp4)
        for (std::size_t s = 0; s < 4; ++s) w[b + s] = static_cast<std::byte>(bits() % 0x38);
    }
    return w;
  }

 private:
  std::mt19937 rng_;
};

inline constexpr float nan = std::numeric_limits<float>::quiet_NaN();
// Lengths around the vector width, and the model's own.
inline constexpr std::int64_t lengths[] = {1, 2, 15, 16, 17, 31, 32, 40, 64, 100, 640, 2560};
inline constexpr DType stored_types[] = {DType::f32,     DType::f16,  DType::bf16,
                                         DType::f8_e4m3, DType::q8_0, DType::nvfp4};

// |got - want| within `ulps` of fp32 relative to `scale`, or both NaN.
inline bool near(double got, double want, double scale, double ulps) {
  if (std::isnan(want)) return std::isnan(got);
  return std::abs(got - want) <= ulps * 0x1p-24 * std::abs(scale);
}

}  // namespace imp::cpu
