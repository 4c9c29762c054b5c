// Q8_0: blocks of 32 = one fp16 scale + 32 signed bytes; value = scale * q. C++20-clean.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpp/core/half.h"

namespace imp::q8_0 {

inline constexpr int block_elems = 32;
inline constexpr int block_bytes = 34;

IMP_INLINE void decode(const std::byte* block, float* dst) {
  std::uint16_t h;
  std::memcpy(&h, block, sizeof h);
  const float d = half_to_float(h);
  const auto* q = reinterpret_cast<const std::int8_t*>(block + 2);
  for (int j = 0; j < block_elems; ++j) dst[j] = d * static_cast<float>(q[j]);
}

// As ggml: the scale is the largest magnitude / 127, codes are rounded half away from zero. A block
// that holds anything but numbers becomes NaN, so that it shows.
IMP_INLINE void encode(const float* src, std::byte* block) {
  constexpr float most = 127;
  float largest = 0;
  bool finite = true;
  for (int j = 0; j < block_elems; ++j) {
    largest = std::max(largest, std::fabs(src[j]));
    finite = finite && std::isfinite(src[j]);
  }
  const float d = largest / most, inverse = 1 / d;
  const std::uint16_t h = finite ? float_to_half(d) : 0x7e00;
  std::memcpy(block, &h, sizeof h);
  std::memset(block + 2, 0, block_elems);
  if (!finite || !std::isfinite(inverse)) return;
  for (int j = 0; j < block_elems; ++j) {
    const float x = std::clamp(src[j] * inverse, -most, most);
    const int whole = static_cast<int>(x);
    const float rest = x - static_cast<float>(whole);
    block[2 + j] = static_cast<std::byte>(whole + (rest >= 0.5f) - (rest <= -0.5f));
  }
}

}  // namespace imp::q8_0
