// Contents of synthetic weights: word i of a tensor is a function of its seed, so that every device
// makes the same bytes where it needs them. C++20-clean; also compiled for CUDA.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpp/core/host_device.h"
#include "cpp/quant/quant.h"

namespace imp {

// Of the plain floats of a weight with `cols` inputs: keeps its results near the size of its
// inputs.
inline float synthetic_amplitude(std::int64_t cols) {
  return std::sqrt(3.0f / static_cast<float>(cols));
}

// splitmix64 of (seed, i)
IMP_HOST_DEVICE inline std::uint64_t synthetic_hash(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = seed + (i + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The fp16 scale of a Q8_0 block, within a factor of two of what puts codes within +-amplitude.
IMP_HOST_DEVICE inline std::uint32_t synthetic_q8_scale(std::uint64_t seed, float amplitude,
                                                        std::uint64_t block) {
  constexpr std::uint32_t exponent_shift = 127 - 15;  // of an fp32 exponent to an fp16's
  const float scale = amplitude / 127;
  std::uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  const auto mantissa = static_cast<std::uint32_t>(synthetic_hash(~seed, block)) & 0x3ffu;
  return ((bits >> 23) - exponent_shift) << 10 | mantissa;
}

// 32 bits of a tensor of type f32, bf16, f8_e4m3, q8_0 (34 bytes a block, the scale first) or nvfp4
// (9 words a block, scales first). Plain floats are uniform within +-amplitude; codes are any.
IMP_HOST_DEVICE inline std::uint32_t synthetic_word(DType type, std::uint64_t seed, float amplitude,
                                                    std::uint64_t i) {
  const auto bits = static_cast<std::uint32_t>(synthetic_hash(seed, i));
  const auto as_bits = [](float v) {
    std::uint32_t b;
    std::memcpy(&b, &v, 4);
    return b;
  };
  switch (type) {
    case DType::f32:
      return as_bits(static_cast<float>(static_cast<std::int32_t>(bits) >> 8) *
                     (amplitude * 0x1p-23f));
    case DType::bf16: {
      const float step = amplitude * 0x1p-15f;
      const float low = static_cast<float>(static_cast<std::int16_t>(bits & 0xffffu)) * step;
      const float high = static_cast<float>(static_cast<std::int16_t>(bits >> 16)) * step;
      return as_bits(low) >> 16 | (as_bits(high) & 0xffff0000u);
    }
    case DType::q8_0: {
      constexpr std::uint64_t block_bytes = 34;
      std::uint32_t word = bits;
      for (std::uint32_t b = 0; b < 4; ++b) {
        const std::uint64_t block = (4 * i + b) / block_bytes, place = (4 * i + b) % block_bytes;
        if (place >= 2) continue;
        const std::uint32_t byte = synthetic_q8_scale(seed, amplitude, block) >> (8 * place) & 0xff;
        word = (word & ~(0xffu << (8 * b))) | byte << (8 * b);
      }
      return word;
    }
    case DType::nvfp4:  // scales of 0.5 to 1.875
      return i % 9 == 0 ? (bits & 0x0f0f0f0fu) | 0x30303030u : bits;
    default:
      return bits & 0xbfbfbfbfu;  // E4M3 up to 1.875
  }
}

// Words [first, first + n) of a tensor with `cols` inputs, on the host.
inline void synthetic_words(DType type, std::uint64_t seed, std::int64_t cols, std::size_t first,
                            std::size_t n, std::byte* to) {
  const float amplitude = synthetic_amplitude(cols);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t w = synthetic_word(type, seed, amplitude, first + i);
    std::memcpy(to + 4 * i, &w, 4);
  }
}

}  // namespace imp
