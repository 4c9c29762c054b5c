// Matrix product of decoded weight rows with fp32 activations, in register tiles. Included by
// table.h.
#pragma once

#include "cpp/cpu/kernels/kernels.h"
#include "cpp/cpu/kernels/vec.h"
#include "cpp/quant/q8_0.h"

namespace imp::cpu {
namespace {

#if defined(IMP_VEC_AVX512)
inline constexpr int tile_n = 4,
                     tile_t = 6;  // 24 accumulators + 4 weights + 1 activation of 32 registers
#else
inline constexpr int tile_n = 2, tile_t = 3;  // 6 accumulators of two registers each, of 16
#endif

// Decodes n elements times scale; n need not be a multiple of 16 for unblocked types.
template <class Load>
inline void decode_plain(const std::byte* src, std::size_t elem_bytes, std::int64_t n, V scale,
                         float* dst, Load load_lanes, float (*one)(const std::byte*)) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    store(dst + i, load_lanes(src + static_cast<std::size_t>(i) * elem_bytes) * scale);
  float s[lanes];
  store(s, scale);
  for (; i < n; ++i) dst[i] = one(src + static_cast<std::size_t>(i) * elem_bytes) * s[0];
}

inline void decode(DType type, const std::byte* src, std::int64_t n, float scale, float* dst) {
  const V s = set1(scale);
  switch (type) {
    case DType::f32:
      decode_plain(
          src, 4, n, s, dst,
          [](const std::byte* p) { return load(reinterpret_cast<const float*>(p)); },
          [](const std::byte* p) {
            float f;
            std::memcpy(&f, p, 4);
            return f;
          });
      return;
    case DType::f16:
      decode_plain(
          src, 2, n, s, dst, [](const std::byte* p) { return load_f16(p); },
          [](const std::byte* p) {
            std::uint16_t h;
            std::memcpy(&h, p, 2);
            return half_to_float(h);
          });
      return;
    case DType::bf16:
      decode_plain(
          src, 2, n, s, dst, [](const std::byte* p) { return load_bf16(p); },
          [](const std::byte* p) {
            std::uint16_t h;
            std::memcpy(&h, p, 2);
            return bf16_to_float(h);
          });
      return;
    case DType::f8_e4m3:
      for (std::int64_t i = 0; i < n; ++i)
        dst[i] = e4m3_to_float(static_cast<std::uint8_t>(src[i])) * scale;
      return;
    case DType::q8_0:
      for (std::int64_t b = 0; b < n / q8_0::block_elems; ++b) {
        const std::byte* p = src + b * q8_0::block_bytes;
        std::uint16_t h;
        std::memcpy(&h, p, 2);
        const V d = set1(half_to_float(h) * scale);
        store(dst + 32 * b, load_i8(p + 2) * d);
        store(dst + 32 * b + 16, load_i8(p + 18) * d);
      }
      return;
    case DType::nvfp4:
      for (std::int64_t b = 0; b < n / nvfp4::block_elems; ++b) {
        const std::byte* p = src + b * nvfp4::block_bytes;
        const Nvfp4Codes c = load_nvfp4_codes(p);
        for (int g = 0; g < 4; ++g)
          store(dst + 64 * b + 16 * g,
                c.group[g] * set1(nvfp4::scale(static_cast<std::uint8_t>(p[g])) * scale));
      }
      return;
    default:
      __builtin_trap();  // the loader refuses other types
  }
}

// y[t][n] for TN decoded rows and TT activation rows.
template <int TN, int TT>
inline void tile(const float* w, std::int64_t ldw, const float* const* x, float* const* y,
                 std::int64_t n, std::int64_t k, float alpha) {
  V acc[TN][TT];
  for (int a = 0; a < TN; ++a)
    for (int b = 0; b < TT; ++b) acc[a][b] = zero();
  std::int64_t i = 0;
  for (; i + lanes <= k; i += lanes) {
    V wv[TN];
    for (int a = 0; a < TN; ++a) wv[a] = load(w + a * ldw + i);
    for (int b = 0; b < TT; ++b) {
      const V xv = load(x[b] + i);
      for (int a = 0; a < TN; ++a) acc[a][b] = fma(wv[a], xv, acc[a][b]);
    }
  }
  if (i < k) {
    for (int b = 0; b < TT; ++b) {
      const V xv = load_n(x[b] + i, k - i);
      for (int a = 0; a < TN; ++a) acc[a][b] = fma(load_n(w + a * ldw + i, k - i), xv, acc[a][b]);
    }
  }
  for (int b = 0; b < TT; ++b)
    for (int a = 0; a < TN; ++a) y[b][n + a] = alpha * sum(acc[a][b]);
}

template <int TN, int TT>
inline void tile_rows(const float* w, std::int64_t ldw, const Gemm& g, std::int64_t n,
                      std::int64_t t) {
  const std::int64_t left = g.rows - t;
  if constexpr (TT > 1) {
    if (left < TT) return tile_rows<TN, TT - 1>(w, ldw, g, n, t);
  }
  if (left > 0) tile<TN, TT>(w, ldw, g.x + t, g.y + t, n, g.k, g.alpha);
}

inline void gemm(const Gemm& g, std::int64_t n0, std::int64_t n1, float* scratch) {
  const std::int64_t ldw = (g.k + lanes - 1) / lanes * lanes;
  for (std::int64_t n = n0; n < n1; n += gemm_panel_rows) {
    const std::int64_t rows = n1 - n < gemm_panel_rows ? n1 - n : gemm_panel_rows;
    for (std::int64_t r = 0; r < rows; ++r)
      decode(g.type, g.w + static_cast<std::size_t>(n + r) * g.w_row_bytes, g.k, 1.0f,
             scratch + r * ldw);
    for (std::int64_t r = 0; r < rows; r += tile_n) {
      for (std::int64_t t = 0; t < g.rows; t += tile_t) {
        if (rows - r >= tile_n) {
          tile_rows<tile_n, tile_t>(scratch + r * ldw, ldw, g, n + r, t);
        } else {
          for (std::int64_t a = r; a < rows; ++a)
            tile_rows<1, tile_t>(scratch + a * ldw, ldw, g, n + a, t);
        }
      }
    }
  }
}

}  // namespace
}  // namespace imp::cpu
