// Attention of a group of query heads over gathered keys and values of one KV head. Included by
// table.h.
//
// Keys and values are taken key_block at a time, so that every head finds them in the second cache;
// the sums over values wait in `out` between blocks. Stored types are decoded as they are read,
// exactly; only this makes the types differ.
#pragma once

#include "cpp/cpu/kernels/elementwise.h"
#include "cpp/cpu/kernels/gemm.h"

namespace imp::cpu {
namespace {

inline constexpr std::int64_t key_block = 128;

// Register tile of the weighted sums: vectors (whole blocks) of a value times at most `heads`
// heads.
template <class F>
struct MixOf {
#if defined(IMP_VEC_AVX512)
  static constexpr int heads = 6, vectors = 4;  // 6 x 4 sums of 32 registers
#else
  static constexpr int heads = 6 / F::vectors, vectors = F::vectors;  // 6 x 2 halves of 16
#endif
};

// Calls f(F{}) for the format of a cache type.
template <class F>
IMP_INLINE void with_cache_format(DType type, F f) {
  switch (type) {
    case DType::f32:
      return f(F32{});
    case DType::f16:
      return f(F16{});
    case DType::bf16:
      return f(Bf16{});
    case DType::q8_0:
      return f(Q8{});
    default:
      __builtin_trap();
  }
}

// scores[h * ld + i] = scale * q[h] . keys[i] for H heads: a register tile of the matrix product
// with keys as weights.
template <class F, int H>
inline void score_heads(const float* q, std::int64_t q_stride, const std::byte* const* keys,
                        std::int64_t n, std::int64_t dim, float scale, float* scores,
                        std::int64_t ld) {
  constexpr int tile = 4;
  const float* heads[H];
  for (int h = 0; h < H; ++h) heads[h] = q + h * q_stride;
  for (std::int64_t i = 0; i < n; i += tile) {
    const std::int64_t count = n - i < tile ? n - i : tile;
    const std::byte* w[tile];
    for (int a = 0; a < tile; ++a) w[a] = keys[i + (a < count ? a : 0)];
    Part sums[H][tile][parts];
    auto half = [&]<int P>() { tile_part<F, P, tile, H, false>(w, heads, dim, 0, sums); };
    unrolled<parts>(half);
    for (int h = 0; h < H; ++h) {
      V four[tile];
      for (int a = 0; a < tile; ++a) four[a] = join(sums[h][a]);
      store_sums(four, scale, scores + h * ld + i, count);
    }
  }
}

// Blocks b.. of a stored row: W vectors.
template <class F, int W>
IMP_INLINE void load_blocks(const std::byte* row, std::int64_t b, V* v) {
  auto block = [&]<int B>() {
    const std::byte* p = row + (b + B) * F::bytes;
    auto one = [&]<int I>() {
      Part part[parts];
      auto half = [&]<int P>() { part[P] = F::template get<I>(F::template open<P>(p)); };
      unrolled<parts>(half);
      v[B * F::vectors + I] = join(part);
    };
    unrolled<F::vectors>(one);
  };
  unrolled<W / F::vectors>(block);
}

// out[h][d..] += sum_i p[h][i] values[i][d..] for H heads and W vectors, or the last m < 16 floats.
template <class F, int H, int W>
inline void add_values(const float* p, std::int64_t ld, const std::byte* const* values,
                       std::int64_t n, std::int64_t d, std::int64_t m, float* out,
                       std::int64_t out_stride) {
  const std::int64_t b = d / (F::vectors * lanes);
  V acc[H][W];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < W; ++c) acc[h][c] = load_m(out + h * out_stride + d + c * lanes, m);
  for (std::int64_t i = 0; i < n; ++i) {
    V v[W] = {};  // the tail fills one
    if (m == lanes)
      load_blocks<F, W>(values[i], b, v);
    else
      v[0] = F::tail(values[i] + b * F::bytes, m);
    for (int h = 0; h < H; ++h) {
      const V w = set1(p[h * ld + i]);
      for (int c = 0; c < W; ++c) acc[h][c] = fma(w, v[c], acc[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < W; ++c) store_m(out + h * out_stride + d + c * lanes, acc[h][c], m);
}

template <class F, int H>
inline void mix_heads(const float* p, std::int64_t ld, const std::byte* const* values,
                      std::int64_t n, std::int64_t dim, float* out, std::int64_t out_stride) {
  constexpr int most = MixOf<F>::vectors, least = F::vectors;
  std::int64_t d = 0;
  for (; d + most * lanes <= dim; d += most * lanes)
    add_values<F, H, most>(p, ld, values, n, d, lanes, out, out_stride);
  for (; d + least * lanes <= dim; d += least * lanes)
    add_values<F, H, least>(p, ld, values, n, d, lanes, out, out_stride);
  if (d < dim) add_values<F, H, least>(p, ld, values, n, d, dim - d, out, out_stride);
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

template <class F>
inline void score(const float* q, std::int64_t q_stride, const std::byte* const* keys,
                  std::int64_t n, std::int64_t heads, std::int64_t dim, float scale, float* scores,
                  std::int64_t ld) {
  for (std::int64_t i = 0; i < n; i += key_block) {
    const std::int64_t count = n - i < key_block ? n - i : key_block;
    auto group = [&]<int H>(std::int64_t h) {
      score_heads<F, H>(q + h * q_stride, q_stride, keys + i, count, dim, scale,
                        scores + h * ld + i, ld);
    };
    head_groups<TileOf<F>::t>(0, heads, group);
  }
}

template <class F>
inline void mix(const float* scores, std::int64_t ld, const std::byte* const* values,
                std::int64_t n, std::int64_t heads, std::int64_t dim, float* out,
                std::int64_t out_stride) {
  for (std::int64_t i = 0; i < n; i += key_block) {
    const std::int64_t count = n - i < key_block ? n - i : key_block;
    auto group = [&]<int H>(std::int64_t h) {
      mix_heads<F, H>(scores + h * ld + i, ld, values + i, count, dim, out + h * out_stride,
                      out_stride);
    };
    head_groups<MixOf<F>::heads>(0, heads, group);
  }
}

inline void attend(const KeysValues& kv, const float* q, std::int64_t q_stride, std::int64_t heads,
                   std::int64_t dim, float scale, float* scores, float* out,
                   std::int64_t out_stride) {
  const std::int64_t ld = (kv.n + lanes - 1) / lanes * lanes;
  with_cache_format(kv.k_type, [&]<class F>(F) {
    score<F>(q, q_stride, kv.keys, kv.n, heads, dim, scale, scores, ld);
  });
  for (std::int64_t h = 0; h < heads; ++h) {
    softmax(scores + h * ld, kv.n);
    for (std::int64_t d = 0; d < dim; ++d) out[h * out_stride + d] = 0.0f;
  }
  with_cache_format(kv.v_type, [&]<class F>(F) {
    mix<F>(scores, ld, kv.values, kv.n, heads, dim, out, out_stride);
  });
}

}  // namespace
}  // namespace imp::cpu
