// Q8_0: blocks of 32 = one fp16 scale + 32 signed bytes; value = scale * q. C++20-clean.
#pragma once

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

}  // namespace imp::q8_0
