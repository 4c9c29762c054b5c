// Attention of a group of query heads over gathered keys and values of one KV head. Included by
// table.h.
//
// Keys and values are taken key_block at a time, so that every head finds them in the second cache;
// the sums over values wait in `out` between blocks.
#pragma once

#include "cpp/cpu/kernels/elementwise.h"
#include "cpp/cpu/kernels/gemm.h"

namespace imp::cpu {
namespace {

inline constexpr std::int64_t key_block = 128;
inline constexpr int most_heads = 6;
#if defined(IMP_VEC_AVX512)
inline constexpr int value_vectors = 4;  // 6 x 4 sums of 32 registers
#else
inline constexpr int value_vectors = 1;  // 6 x 2 sums of half a vector of 16 registers
#endif

// scores[h * ld + i] = scale * q[h] . keys[i] for H heads: a register tile of the matrix product
// with keys as weights.
template <int H>
inline void score_heads(const float* q, std::int64_t q_stride, const float* const* keys,
                        std::int64_t n, std::int64_t dim, float scale, float* scores,
                        std::int64_t ld) {
  constexpr int tile = 4;
  const float* heads[H];
  for (int h = 0; h < H; ++h) heads[h] = q + h * q_stride;
  for (std::int64_t i = 0; i < n; i += tile) {
    const std::int64_t count = n - i < tile ? n - i : tile;
    const std::byte* w[tile];
    for (int a = 0; a < tile; ++a)
      w[a] = reinterpret_cast<const std::byte*>(keys[i + (a < count ? a : 0)]);
    Part sums[H][tile][parts];
    auto half = [&]<int P>() { tile_part<F32, P, tile, H, false>(w, heads, dim, 0, sums); };
    unrolled<parts>(half);
    for (int h = 0; h < H; ++h) {
      V four[tile];
      for (int a = 0; a < tile; ++a) four[a] = join(sums[h][a]);
      store_sums(four, scale, scores + h * ld + i, count);
    }
  }
}

// out[h][d..] += sum_i p[h][i] values[i][d..] for H heads and W vectors, or m < 16 floats of one.
template <int H, int W>
inline void add_values(const float* p, std::int64_t ld, const float* const* values, std::int64_t n,
                       std::int64_t d, std::int64_t m, float* out, std::int64_t out_stride) {
  V acc[H][W];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < W; ++c) acc[h][c] = load_m(out + h * out_stride + d + c * lanes, m);
  for (std::int64_t i = 0; i < n; ++i) {
    V v[W];
    for (int c = 0; c < W; ++c) v[c] = load_m(values[i] + d + c * lanes, m);
    for (int h = 0; h < H; ++h) {
      const V w = set1(p[h * ld + i]);
      for (int c = 0; c < W; ++c) acc[h][c] = fma(w, v[c], acc[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < W; ++c) store_m(out + h * out_stride + d + c * lanes, acc[h][c], m);
}

template <int H>
inline void mix_heads(const float* p, std::int64_t ld, const float* const* values, std::int64_t n,
                      std::int64_t dim, float* out, std::int64_t out_stride) {
  constexpr std::int64_t wide = value_vectors * lanes;
  std::int64_t d = 0;
  for (; d + wide <= dim; d += wide)
    add_values<H, value_vectors>(p, ld, values, n, d, lanes, out, out_stride);
  for (; d + lanes <= dim; d += lanes)
    add_values<H, 1>(p, ld, values, n, d, lanes, out, out_stride);
  if (d < dim) add_values<H, 1>(p, ld, values, n, d, dim - d, out, out_stride);
}

// p = softmax(p)
inline void softmax(float* p, std::int64_t n) {
  const V m = set1(max_of(p, n));
  V total = zero();
  blocks(n, [&](std::int64_t i, std::int64_t b) {
    const V e = exp(load_m(p + i, b) - m);
    store_m(p + i, e, b);
    total = total + (b == lanes ? e : load_n(p + i, b));
  });
  const V inv = set1(1.0f / sum(total));
  blocks(n, [&](std::int64_t i, std::int64_t b) { store_m(p + i, load_m(p + i, b) * inv, b); });
}

// Calls f.operator()<H>(h) for groups of H heads, the largest first.
template <int H, class F>
inline void head_groups(std::int64_t h, std::int64_t heads, F& f) {
  for (; heads - h >= H; h += H) f.template operator()<H>(h);
  if constexpr (H > 1) head_groups<(H + 1) / 2>(h, heads, f);
}

inline void attend(const float* q, std::int64_t q_stride, const float* const* keys,
                   const float* const* values, std::int64_t n, std::int64_t heads, std::int64_t dim,
                   float scale, float* scores, float* out, std::int64_t out_stride) {
  const std::int64_t ld = (n + lanes - 1) / lanes * lanes;
  for (std::int64_t i = 0; i < n; i += key_block) {
    const std::int64_t count = n - i < key_block ? n - i : key_block;
    auto score = [&]<int H>(std::int64_t h) {
      score_heads<H>(q + h * q_stride, q_stride, keys + i, count, dim, scale, scores + h * ld + i,
                     ld);
    };
    head_groups<TileOf<F32>::t>(0, heads, score);
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    softmax(scores + h * ld, n);
    for (std::int64_t d = 0; d < dim; ++d) out[h * out_stride + d] = 0.0f;
  }
  for (std::int64_t i = 0; i < n; i += key_block) {
    const std::int64_t count = n - i < key_block ? n - i : key_block;
    auto mix = [&]<int H>(std::int64_t h) {
      mix_heads<H>(scores + h * ld + i, ld, values + i, count, dim, out + h * out_stride,
                   out_stride);
    };
    head_groups<most_heads>(0, heads, mix);
  }
}

}  // namespace
}  // namespace imp::cpu
