// Attention of a group of query heads over gathered keys and values of one KV head. Included by
// table.h.
#pragma once

#include "cpp/cpu/kernels/elementwise.h"

namespace imp::cpu {
namespace {

// scores[h * ld + i] for H heads at once: each key row is read once per group of heads.
template <int H>
inline void score_heads(const float* q, std::int64_t q_stride, const float* const* keys,
                        std::int64_t n, std::int64_t dim, float scale, float* scores,
                        std::int64_t ld) {
  for (std::int64_t i = 0; i < n; ++i) {
    V acc[H];
    for (int h = 0; h < H; ++h) acc[h] = zero();
    const float* key = keys[i];
    blocks(dim, [&](std::int64_t d, std::int64_t m) {
      const V kv = load_m(key + d, m);
      for (int h = 0; h < H; ++h) acc[h] = fma(load_m(q + h * q_stride + d, m), kv, acc[h]);
    });
    for (int h = 0; h < H; ++h) scores[h * ld + i] = scale * sum(acc[h]);
  }
}

// out[h][d..d+16*W] for H heads at once.
template <int H, int W>
inline void mix_values(const float* p, std::int64_t ld, const float* const* values, std::int64_t n,
                       std::int64_t d, std::int64_t m, float* out, std::int64_t out_stride) {
  V acc[H][W];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < W; ++c) acc[h][c] = zero();
  for (std::int64_t i = 0; i < n; ++i) {
    V v[W];
    for (int c = 0; c < W; ++c)
      v[c] = W > 1 ? load(values[i] + d + c * lanes) : load_m(values[i] + d, m);
    for (int h = 0; h < H; ++h) {
      const V w = set1(p[h * ld + i]);
      for (int c = 0; c < W; ++c) acc[h][c] = fma(w, v[c], acc[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < W; ++c)
      W > 1 ? store(out + h * out_stride + d + c * lanes, acc[h][c])
            : store_m(out + h * out_stride + d, acc[h][c], m);
}

template <int H>
inline void attend_heads(const float* q, std::int64_t q_stride, const float* const* keys,
                         const float* const* values, std::int64_t n, std::int64_t dim, float scale,
                         float* scores, float* out, std::int64_t out_stride) {
  const std::int64_t ld = (n + lanes - 1) / lanes * lanes;
  score_heads<H>(q, q_stride, keys, n, dim, scale, scores, ld);
  for (int h = 0; h < H; ++h) {
    float* p = scores + h * ld;
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
#if defined(IMP_VEC_AVX512)
  constexpr int wide = H <= 6 ? 4 : 2;
#else
  constexpr int wide = H <= 3 ? 2 : 1;
#endif
  std::int64_t d = 0;
  for (; d + wide * lanes <= dim; d += wide * lanes)
    mix_values<H, wide>(scores, ld, values, n, d, lanes, out, out_stride);
  for (; d < dim; d += lanes)
    mix_values<H, 1>(scores, ld, values, n, d, dim - d < lanes ? dim - d : lanes, out, out_stride);
}

inline void attend(const float* q, std::int64_t q_stride, const float* const* keys,
                   const float* const* values, std::int64_t n, std::int64_t heads, std::int64_t dim,
                   float scale, float* scores, float* out, std::int64_t out_stride) {
#if defined(IMP_VEC_AVX512)
  constexpr int most = 6;
#else
  constexpr int most = 3;
#endif
  for (std::int64_t h = 0; h < heads;) {
    const float* qh = q + h * q_stride;
    float* oh = out + h * out_stride;
    if (heads - h >= most) {
      attend_heads<most>(qh, q_stride, keys, values, n, dim, scale, scores, oh, out_stride);
      h += most;
    } else {
      attend_heads<1>(qh, q_stride, keys, values, n, dim, scale, scores, oh, out_stride);
      ++h;
    }
  }
}

}  // namespace
}  // namespace imp::cpu
