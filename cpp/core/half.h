// Scalar conversions between fp32 and the storage formats fp16, bf16 and fp8 e4m3. C++20-clean.
#pragma once

#include <bit>
#include <cstdint>

// Always inlined: an out-of-line copy could be linked from a file compiled for a newer processor.
#define IMP_INLINE __attribute__((always_inline)) inline

namespace imp {

IMP_INLINE float bf16_to_float(std::uint16_t b) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

// Round to nearest even; NaN stays NaN.
IMP_INLINE std::uint16_t float_to_bf16(float f) {
  const auto u = std::bit_cast<std::uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

IMP_INLINE float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1fu;
  const std::uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest even, overflow to infinity.
IMP_INLINE std::uint16_t float_to_half(float f) {
  const auto u = std::bit_cast<std::uint32_t>(f);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;            // rounds to 65536 or more
  if (magnitude < 0x38800000u) {                                  // below 2^-14: subnormal
    const float scaled = std::bit_cast<float>(magnitude) + 0.5f;  // 0.5 has an ulp of 2^-24
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(scaled) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// E4M3FN: 1-4-3 bits, bias 7, no infinity, 0x7f and 0xff are NaN.
IMP_INLINE constexpr float e4m3_to_float(std::uint8_t b) {
  const std::uint32_t exponent = (b >> 3) & 15u;
  const std::uint32_t mantissa = b & 7u;
  float value;
  if ((b & 0x7fu) == 0x7fu) {
    value = std::bit_cast<float>(0x7fc00000u);
  } else if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    value = std::bit_cast<float>(((exponent + 120) << 23) | (mantissa << 20));
  }
  return (b & 0x80u) ? -value : value;
}

}  // namespace imp
