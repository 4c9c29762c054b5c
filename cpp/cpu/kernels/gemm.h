// y = alpha * w x^T straight from the stored weights: every register tile decodes its weights as it
// multiplies (decoding runs beside the multiply-adds, on other ports). Included by table.h.
#pragma once

#include "cpp/cpu/kernels/formats.h"
#include "cpp/cpu/kernels/kernels.h"

namespace imp::cpu {
namespace {

// Register tile: tile_n weight rows times at most tile_t activation rows; one activation row takes
// twice as many weight rows.
#if defined(IMP_VEC_AVX512)
inline constexpr int tile_n = 4, tile_t = 6;  // 24 sums + 4 weights + 1 activation of 32 registers
#else
inline constexpr int tile_n = 4, tile_t = 2;
#endif

// Columns n..n+count of TT activation rows; weight rows past count repeat the first one.
// ahead_bytes: from a weight to one that a later tile needs.
template <class F, int TN, int TT, bool Ahead>
inline void tile(const Gemm& g, std::int64_t n, std::int64_t count, std::int64_t t) {
  const std::byte* w[TN];
  const float* x[TT];
  for (int a = 0; a < TN; ++a)
    w[a] = g.w + static_cast<std::size_t>(n + (a < count ? a : 0)) * g.w_row_bytes;
  for (int b = 0; b < TT; ++b) x[b] = g.x[t + b];
  const std::size_t ahead = TN * g.w_row_bytes;
  V acc[TT][TN];
  for (int b = 0; b < TT; ++b)
    for (int a = 0; a < TN; ++a) acc[b][a] = zero();

  constexpr std::int64_t elems = F::vectors * lanes;
  std::int64_t i = 0;
  std::size_t at = 0;
  for (; i + elems <= g.k; i += elems, at += F::bytes) {
    typename F::Block block[TN];
    for (int a = 0; a < TN; ++a) {
      block[a] = F::open(w[a] + at);
      if (Ahead) __builtin_prefetch(w[a] + at + ahead);
    }
    auto step = [&]<int I>() {
      V wv[TN];
      for (int a = 0; a < TN; ++a) wv[a] = F::template get<I>(block[a]);
      for (int b = 0; b < TT; ++b) {
        const V xv = load(x[b] + i + I * lanes);
        for (int a = 0; a < TN; ++a) acc[b][a] = fma(wv[a], xv, acc[b][a]);
      }
    };
    unrolled<F::vectors>(step);
  }
  if (i < g.k)
    for (int b = 0; b < TT; ++b) {
      const V xv = load_n(x[b] + i, g.k - i);
      for (int a = 0; a < TN; ++a) acc[b][a] = fma(F::tail(w[a] + at, g.k - i), xv, acc[b][a]);
    }
  for (int b = 0; b < TT; ++b)
    for (int a = 0; a < TN; a += 4)
      if (a < count)
        store_sums(acc[b] + a, g.alpha, g.y[t + b] + n + a, count - a < 4 ? count - a : 4);
}

template <class F, int TN, bool Ahead, int TT>
inline void tile_of(std::int64_t rows, const Gemm& g, std::int64_t n, std::int64_t count,
                    std::int64_t t) {
  if constexpr (TT > 1) {
    if (rows < TT) return tile_of<F, TN, Ahead, TT - 1>(rows, g, n, count, t);
  }
  tile<F, TN, TT, Ahead>(g, n, count, t);
}

// Rows t0..t1 in tiles of nearly equal height.
template <class F, int TN, int Most, bool Ahead>
inline void columns(const Gemm& g, std::int64_t n0, std::int64_t n1, std::int64_t t0,
                    std::int64_t t1) {
  for (std::int64_t n = n0; n < n1; n += TN) {
    std::int64_t tiles = (t1 - t0 + Most - 1) / Most;
    for (std::int64_t t = t0; t < t1; --tiles) {
      const std::int64_t rows = (t1 - t + tiles - 1) / tiles;
      tile_of<F, TN, Ahead, Most>(rows, g, n, n1 - n < TN ? n1 - n : TN, t);
      t += rows;
    }
  }
}

template <class F>
inline void gemm_of(const Gemm& g, std::int64_t n0, std::int64_t n1) {
  if (g.rows == 1) return columns<F, 2 * tile_n, 1, true>(g, n0, n1, 0, 1);
  if (g.rows <= tile_t) return columns<F, tile_n, tile_t, true>(g, n0, n1, 0, g.rows);
  // Activations of a block of rows stay in the second cache while the columns pass by.
  std::int64_t block = block_floats / g.k / tile_t * tile_t;
  if (block < 2 * tile_t) block = 2 * tile_t;
  for (std::int64_t t = 0; t < g.rows; t += block)
    columns<F, tile_n, tile_t, false>(g, n0, n1, t, g.rows - t < block ? g.rows : t + block);
}

inline void gemm(const Gemm& g, std::int64_t n0, std::int64_t n1, float*) {
  with_format(g.type, [&]<class F>(F) { gemm_of<F>(g, n0, n1); });
}

}  // namespace
}  // namespace imp::cpu
