// NVFP4 as tensor cores read it. A tile is 8 rows of 128 columns: 512 bytes of codes, 64 of scales;
// the tiles of 8 rows adjoin, and so do the groups of 8 rows. Lane (g, c) = (lane / 4, lane % 4) of
// a warp holds columns 32c .. 32c + 31 of row g: 16 bytes of codes, 2 of scales.
//
// A code's sign and magnitude, put on a bf16's (15, 8..6), make a number 2^126 too small; subnormal
// numbers come out right as well. Each half of a packed word holds 4 codes:
//   a: 15, 8..6     b: 9, 2..0     c: 3 (of the other half), 12..10     d: 13, then 14, 5, 4
// A scale is packed with 5 bits of exponent, so that it needs no subnormal numbers; 0 becomes codes
// of 0. Code times scale has 6 significant bits: exact in bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/common/formats.cuh"
#include "cuda/common/reduce.cuh"

namespace imp::cuda::nvfp4_tiles {

inline constexpr int rows = 8, cols = 128;
inline constexpr int code_bytes = rows * cols / 2, scale_bytes = rows * cols / 16;

// Factor that the decoded numbers leave out.
inline constexpr float missing = 0x1p8f;
inline constexpr std::uint32_t exponent_offset = 10;  // of a packed scale
inline constexpr std::uint32_t decoded_offset = 127 + 126 - 8 - exponent_offset;

// 8 codes to 4 pairs of bf16, times the scale: columns 0 1, 2 3, 4 5, 6 7 of the word.
__device__ __forceinline__ void decode(std::uint32_t q, __nv_bfloat162 scale,
                                       std::uint32_t (&pairs)[4]) {
  constexpr std::uint32_t code = 0x81c081c0u, most = 0x80c080c0u, rest = 0x01000100u;
  const std::uint32_t bits[4] = {q & code, q << 6 & code, __funnelshift_r(q, q, 4) & code,
                                 (q << 2 & most) | (q >> 6 & rest)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 v;
    __builtin_memcpy(&v, &bits[i], 4);
    v = __hmul2(v, scale);
    __builtin_memcpy(&pairs[i], &v, 4);
  }
}

// Scale `half` of a lane's two, in both halves.
__device__ __forceinline__ __nv_bfloat162 scale_of(std::uint32_t two, int half) {
  const std::uint32_t both = __byte_perm(two, 0, half == 0 ? 0x4040 : 0x4141);
  const std::uint32_t bits = both * 16 + decoded_offset * 0x00800080u;
  __nv_bfloat162 v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

// What a lane holds of two tiles, one above the other.
struct Pair {
  uint4 low, high;
  std::uint32_t low_scales, high_scales;
};

// f(a, w, j) for the 8 products of a pair: a as mma_bf16 takes it, columns 8w + 4j .. 8w + 4j + 3
// of a lane's 32.
template <class F>
__device__ __forceinline__ void each_product(const Pair& p, F f) {
  const std::uint32_t low[4] = {p.low.x, p.low.y, p.low.z, p.low.w},
                      high[4] = {p.high.x, p.high.y, p.high.z, p.high.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    std::uint32_t upper[4], lower[4];
    decode(low[w], scale_of(p.low_scales, w / 2), upper);
    decode(high[w], scale_of(p.high_scales, w / 2), lower);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      f({upper[2 * j], lower[2 * j], upper[2 * j + 1], lower[2 * j + 1]}, w, j);
  }
}

// ---------------------------------------------------------------- packing

// 8 codes of the file, columns 0..7 from the lowest nibble, to a packed word.
__device__ inline std::uint32_t pack_codes(std::uint32_t q) {
  std::uint32_t out = 0;
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t code = q >> (4 * i), half = 16 * (i % 2);
    const auto put = [&](int bit, std::uint32_t at) { out |= (code >> bit & 1) << at; };
    constexpr std::uint8_t places[4][4] = {
        {6, 7, 8, 15}, {0, 1, 2, 9}, {10, 11, 12, 3}, {4, 5, 14, 13}};
    for (int bit = 0; bit < 4; ++bit) {
      const bool other = i / 2 == 2 && bit == 3;
      put(bit, places[i / 2][bit] + (other ? 16 - half : half));
    }
  }
  return out;
}

// An E4M3 scale that is neither 0 nor 0x7f.
__device__ inline std::uint32_t pack_scale(std::uint32_t b) {
  std::uint32_t exponent = b >> 3 & 15, mantissa = b & 7;
  if (exponent == 0) {  // mantissa * 2^-9
    exponent = 1;
    while (mantissa < 8) mantissa <<= 1, --exponent;  // wraps below 0 and back
    mantissa &= 7;
  }
  return (exponent + exponent_offset - 7) << 3 | mantissa;
}

}  // namespace imp::cuda::nvfp4_tiles
