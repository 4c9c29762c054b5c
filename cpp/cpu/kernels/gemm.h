// y = alpha * w x^T straight from the stored weights: every register tile decodes its weights as it
// multiplies (decoding runs beside the multiply-adds, on other ports). Included by table.h.
#pragma once

#include "cpp/cpu/kernels/formats.h"
#include "cpp/cpu/kernels/kernels.h"

namespace imp::cpu {
namespace {

// Register tile: n weight rows times at most t activation rows; one activation row takes more
// weight rows. Sums of 4 x 6 + 4 weights + 1 activation fill AVX-512's 32 registers. AVX2 has 16,
// and parts of 8 lanes: 4 x 3 + 3 activations + 1 weight; formats that decode at length do it for
// more rows.
template <class F>
struct TileOf {
#if defined(IMP_VEC_AVX512)
  static constexpr int n = 4, t = 6;
#elif defined(IMP_VEC_AVX2)
  static constexpr int n = F::vectors > 2 ? 2 : 4, t = F::vectors > 2 ? 6 : 3;
#else
  static constexpr int n = 4, t = 2;
#endif
  // Decode one row at a time, and read the activations again for each: saves registers.
  static constexpr bool by_row = parts > 1 && F::vectors > 1;
};

// Part H of the sums of TN weight rows w and TT activation rows x. Ahead: fetch the bytes that lie
// ahead_bytes further, a later tile's.
template <class F, int H, int TN, int TT, bool Ahead>
IMP_INLINE void tile_part(const std::byte* const* w, const float* const* x, std::int64_t k,
                          std::size_t ahead_bytes, Part (&sums)[TT][TN][parts]) {
  Part acc[TT][TN];
  for (int b = 0; b < TT; ++b)
    for (int a = 0; a < TN; ++a) acc[b][a] = part<H>(zero());
  constexpr std::int64_t elems = F::vectors * lanes;
  std::int64_t i = 0;
  std::size_t at = 0;
  for (; i + elems <= k; i += elems, at += F::bytes) {
    if constexpr (TileOf<F>::by_row) {
      for (int a = 0; a < TN; ++a) {
        const auto block = F::template open<H>(w[a] + at);
        if (Ahead && a % parts == H) __builtin_prefetch(w[a] + at + ahead_bytes);
        auto step = [&]<int I>() {
          const Part wv = F::template get<I>(block);
          for (int b = 0; b < TT; ++b)
            acc[b][a] = fma(wv, load_part<H>(x[b] + i + I * lanes), acc[b][a]);
        };
        unrolled<F::vectors>(step);
      }
    } else {
      typename F::template Block<H> block[TN];
      for (int a = 0; a < TN; ++a) {
        block[a] = F::template open<H>(w[a] + at);
        if (Ahead && a % parts == H) __builtin_prefetch(w[a] + at + ahead_bytes);
      }
      auto step = [&]<int I>() {
        if constexpr (TT < TN) {
          Part xv[TT];
          for (int b = 0; b < TT; ++b) xv[b] = load_part<H>(x[b] + i + I * lanes);
          for (int a = 0; a < TN; ++a) {
            const Part wv = F::template get<I>(block[a]);
            for (int b = 0; b < TT; ++b) acc[b][a] = fma(wv, xv[b], acc[b][a]);
          }
        } else {
          Part wv[TN];
          for (int a = 0; a < TN; ++a) wv[a] = F::template get<I>(block[a]);
          for (int b = 0; b < TT; ++b) {
            const Part xv = load_part<H>(x[b] + i + I * lanes);
            for (int a = 0; a < TN; ++a) acc[b][a] = fma(wv[a], xv, acc[b][a]);
          }
        }
      };
      unrolled<F::vectors>(step);
    }
  }
  if (i < k)
    for (int b = 0; b < TT; ++b) {
      const Part xv = part<H>(load_n(x[b] + i, k - i));
      for (int a = 0; a < TN; ++a)
        acc[b][a] = fma(part<H>(F::tail(w[a] + at, k - i)), xv, acc[b][a]);
    }
  for (int b = 0; b < TT; ++b)
    for (int a = 0; a < TN; ++a) sums[b][a][H] = acc[b][a];
}

// Columns n..n+count of TT activation rows; weight rows past count repeat the first one.
template <class F, int TN, int TT, bool Ahead>
inline void tile(const Gemm& g, std::int64_t n, std::int64_t count, std::int64_t t) {
  const std::byte* w[TN];
  const float* x[TT];
  for (int a = 0; a < TN; ++a)
    w[a] = g.w + static_cast<std::size_t>(n + (a < count ? a : 0)) * g.w_row_bytes;
  for (int b = 0; b < TT; ++b) x[b] = g.x[t + b];
  Part sums[TT][TN][parts];
  auto half = [&]<int H>() { tile_part<F, H, TN, TT, Ahead>(w, x, g.k, TN * g.w_row_bytes, sums); };
  unrolled<parts>(half);
  for (int b = 0; b < TT; ++b)
    for (int a = 0; a < TN; a += 4) {
      V four[4];
      for (int c = 0; c < 4; ++c) four[c] = a + c < TN ? join(sums[b][a + c]) : zero();
      if (a < count) store_sums(four, g.alpha, g.y[t + b] + n + a, count - a < 4 ? count - a : 4);
    }
}

template <class F, int TN, bool Ahead, int TT>
inline void tile_of(std::int64_t rows, const Gemm& g, std::int64_t n, std::int64_t count,
                    std::int64_t t) {
  if constexpr (TT > 1) {
    if (rows < TT) return tile_of<F, TN, Ahead, TT - 1>(rows, g, n, count, t);
  }
  tile<F, TN, TT, Ahead>(g, n, count, t);
}

// Rows t0..t1 in tiles of nearly equal height; the last one fetches the next weights (past n1
// too: the next call often continues there, and a prefetch cannot fault).
template <class F, int TN, int Most>
inline void columns(const Gemm& g, std::int64_t n0, std::int64_t n1, std::int64_t t0,
                    std::int64_t t1) {
  for (std::int64_t n = n0; n < n1; n += TN) {
    const std::int64_t count = n1 - n < TN ? n1 - n : TN;
    std::int64_t t = t0;
    for (std::int64_t tiles = (t1 - t0 + Most - 1) / Most; tiles > 1; --tiles) {
      const std::int64_t rows = (t1 - t + tiles - 1) / tiles;
      tile_of<F, TN, false, Most>(rows, g, n, count, t);
      t += rows;
    }
    tile_of<F, TN, true, Most>(t1 - t, g, n, count, t);
  }
}

inline std::int64_t at_least(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

template <class F>
inline void gemm_of(const Gemm& g, std::int64_t n0, std::int64_t n1) {
  using Tile = TileOf<F>;
  if (g.rows == 0) return;
  if (g.rows == 1) return columns<F, 8, 1>(g, n0, n1, 0, 1);
  if constexpr (Tile::n * Tile::t == 24) {  // few rows leave registers for more weights in flight
    if (g.rows <= 3) return columns<F, 8, 3>(g, n0, n1, 0, g.rows);
    if (F::vectors == 1 && g.rows == 4) return columns<F, 6, 4>(g, n0, n1, 0, 4);
  }
  // Activations of a block of rows stay in the second cache while a panel of weights passes by; the
  // panel stays in the third one for the next block of rows.
  const std::int64_t block = at_least(gemm_block_bytes / (4 * g.k), 2 * Tile::t);
  const std::int64_t t_block = block / Tile::t * Tile::t;
  const std::int64_t n_block =
      at_least(gemm_panel_bytes / static_cast<std::int64_t>(g.w_row_bytes), Tile::n) / Tile::n *
      Tile::n;
  for (std::int64_t n = n0; n < n1; n += n_block)
    for (std::int64_t t = 0; t < g.rows; t += t_block)
      columns<F, Tile::n, Tile::t>(g, n, n1 - n < n_block ? n1 : n + n_block, t,
                                   g.rows - t < t_block ? g.rows : t + t_block);
}

inline void gemm(const Gemm& g, std::int64_t n0, std::int64_t n1, float*) {
  with_format(g.type, [&]<class F>(F) { gemm_of<F>(g, n0, n1); });
}

}  // namespace
}  // namespace imp::cpu
