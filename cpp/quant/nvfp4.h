// NVFP4 as GGUF stores it: blocks of 64 = 4 unsigned E4M3 scales + 32 bytes of E2M1 codes.
// C++20-clean.
//
// Sub-block s covers elements 16s..16s+15 and bytes 8s..8s+7: low nibble -> element 16s+j, high ->
// 16s+8+j. value = e2m1(code) * e4m3(scale & 0x7f), with scale 0x7f read as 0. The per-tensor or
// per-expert fp32 factor lives in a `.scale` tensor and multiplies the product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpp/core/half.h"

namespace imp::nvfp4 {

inline constexpr int block_elems = 64;
inline constexpr int block_bytes = 36;
inline constexpr int group_elems = 16;  // elements that share one scale

inline constexpr float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

IMP_INLINE constexpr float scale(std::uint8_t b) {
  const std::uint8_t magnitude = b & 0x7f;
  return magnitude == 0x7f ? 0.0f : e4m3_to_float(magnitude);
}

IMP_INLINE void decode(const std::byte* block, float* dst) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(block);
  for (int s = 0; s < 4; ++s) {
    const float d = scale(bytes[s]);
    for (int j = 0; j < 8; ++j) {
      const std::uint8_t q = bytes[4 + 8 * s + j];
      dst[16 * s + j] = e2m1[q & 15] * d;
      dst[16 * s + 8 + j] = e2m1[q >> 4] * d;
    }
  }
}

}  // namespace imp::nvfp4
