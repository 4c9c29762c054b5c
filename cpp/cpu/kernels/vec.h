// V: sixteen fp32 lanes, as one AVX-512 register, two AVX2 registers or a plain array. Included
// only by the per-instruction-set files, which define exactly one of IMP_VEC_AVX512, IMP_VEC_AVX2,
// IMP_VEC_GENERIC.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "cpp/core/half.h"
#include "cpp/quant/nvfp4.h"

namespace imp::cpu {
namespace {

inline constexpr int lanes = 16;

#if defined(IMP_VEC_AVX512)

struct V {
  __m512 v;
};
inline V zero() { return {_mm512_setzero_ps()}; }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V load_n(const float* p, std::int64_t n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
}
inline void store_n(float* p, V a, std::int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
inline V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V round(V a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n
inline V scale2(V a, V n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline __m256 low(V a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high(V a) { return _mm512_extractf32x8_ps(a.v, 1); }

// A part of V: the whole of it.
using Part = V;
inline constexpr int parts = 1;
inline V join(const Part* p) { return p[0]; }
template <int H>
inline Part part(V v) {
  return v;
}
template <int H>
inline Part load_part(const float* p) {
  return load(p);
}
template <int H>
inline Part load_bf16(const std::byte* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
template <int H>
inline Part load_f16(const std::byte* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
template <int H>
inline Part load_i8(const std::byte* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Part part_f16(const std::byte* p) {  // one value in every lane
  short h;
  __builtin_memcpy(&h, p, sizeof h);
  return {_mm512_cvtph_ps(_mm256_set1_epi16(h))};
}
inline Part part_f32(float f) { return set1(f); }
// The 32 code bytes of an NVFP4 block: byte g of lane j has the code of element 16g + j in its low
// four bits.
template <int H>
struct E2m1Block {
  __m512i v;
};
template <int H>
inline E2m1Block<H> load_e2m1_block(const std::byte* p) {
  const __m512i q = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  // Dwords 0, 2, 4, 6 hold bytes 0..3 of the four groups; a 4 x 4 byte transpose per 128 bits.
  const __m512i spread = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7), q);
  const __m512i turned = _mm512_shuffle_epi8(
      spread,
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  return {
      _mm512_srlv_epi32(turned, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4))};
}
// The lookup reads the low four bits of a lane and no others.
template <int G, int H>
inline Part e2m1_group(const E2m1Block<H>& b) {
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return {_mm512_permutexvar_ps(G == 0 ? b.v : _mm512_srli_epi32(b.v, 8 * G), table)};
}

#elif defined(IMP_VEC_AVX2)

struct V {
  __m256 a, b;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V load_n(const float* p, std::int64_t n) {
  float t[lanes] = {};
  for (std::int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
inline void store_n(float* p, V x, std::int64_t n) {
  float t[lanes];
  store(t, x);
  for (std::int64_t i = 0; i < n; ++i) p[i] = t[i];
}
inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V round(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 scale2(__m256 a, __m256 n) {
  const __m256i e =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
inline V scale2(V a, V n) { return {scale2(a.a, n.a), scale2(a.b, n.b)}; }
inline __m256 low(V x) { return x.a; }
inline __m256 high(V x) { return x.b; }

// A part of V: eight lanes, as a register tile has too few registers for whole ones.
struct Part {
  __m256 v;
};
inline constexpr int parts = 2;
inline Part operator*(Part x, Part y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline Part fma(Part x, Part y, Part z) { return {_mm256_fmadd_ps(x.v, y.v, z.v)}; }
inline V join(const Part* p) { return {p[0].v, p[1].v}; }
template <int H>
inline Part part(V v) {
  return {H == 0 ? v.a : v.b};
}
template <int H>
inline Part load_part(const float* p) {
  return {_mm256_loadu_ps(p + 8 * H)};
}
template <int H>
inline __m128i load_words(const std::byte* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + H);
}
template <int H>
inline Part load_bf16(const std::byte* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words<H>(p)), 16))};
}
template <int H>
inline Part load_f16(const std::byte* p) {
  return {_mm256_cvtph_ps(load_words<H>(p))};
}
template <int H>
inline Part load_i8(const std::byte* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * H))))};
}
inline Part part_f16(const std::byte* p) {  // one value in every lane
  short h;
  __builtin_memcpy(&h, p, sizeof h);
  return {_mm256_cvtph_ps(_mm_set1_epi16(h))};
}
inline Part part_f32(float f) { return {_mm256_set1_ps(f)}; }
// The low (H = 0) or high codes of an NVFP4 block, as upper bytes of fp16 values (the lower bytes
// are zero).
template <int H>
struct E2m1Block {
  __m256i v;
};
template <int H>
inline E2m1Block<H> load_e2m1_block(const std::byte* p) {
  const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80,
                                                -0x48, -0x44, -0x42, -0x40, -0x3e, -0x3c, -0x3a));
  return {_mm256_shuffle_epi8(
      table, _mm256_and_si256(H == 0 ? q : _mm256_srli_epi16(q, 4), _mm256_set1_epi8(15)))};
}
template <int G, int H>
inline Part e2m1_group(const E2m1Block<H>& b) {
  const __m128i q = G < 2 ? _mm256_castsi256_si128(b.v) : _mm256_extracti128_si256(b.v, 1);
  const __m128i zeros = _mm_setzero_si128();
  return {_mm256_cvtph_ps(G % 2 == 0 ? _mm_unpacklo_epi8(zeros, q) : _mm_unpackhi_epi8(zeros, q))};
}

#else

struct V {
  float v[lanes];
};
template <class F>
inline V each(F f) {
  V r;
  for (int i = 0; i < lanes; ++i) r.v[i] = f(i);
  return r;
}
inline V zero() { return V{}; }
inline V set1(float x) {
  return each([&](int) { return x; });
}
inline V load(const float* p) {
  V r;
  __builtin_memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float* p, V a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline V load_n(const float* p, std::int64_t n) {
  V r{};
  for (std::int64_t i = 0; i < n; ++i) r.v[i] = p[i];
  return r;
}
inline void store_n(float* p, V a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) p[i] = a.v[i];
}
inline V operator+(V a, V b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline V operator-(V a, V b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline V operator*(V a, V b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline V operator/(V a, V b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
// Not fused: a processor without FMA would take a library call per lane.
inline V fma(V a, V b, V c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline V max(V a, V b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline V min(V a, V b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline V round(V a) {
  return each([&](int i) { return __builtin_rintf(a.v[i]); });
}
inline V scale2(V a, V n) {
  return each([&](int i) {
    const auto bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n.v[i]) + 127) << 23;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return a.v[i] * f;
  });
}
inline std::uint16_t u16(const std::byte* p) {
  std::uint16_t h;
  __builtin_memcpy(&h, p, sizeof h);
  return h;
}

// A part of V: the whole of it.
using Part = V;
inline constexpr int parts = 1;
inline V join(const Part* p) { return p[0]; }
template <int H>
inline Part part(V v) {
  return v;
}
template <int H>
inline Part load_part(const float* p) {
  return load(p);
}
template <int H>
inline Part load_bf16(const std::byte* p) {
  return each([&](int i) { return bf16_to_float(u16(p + 2 * i)); });
}
template <int H>
inline Part load_f16(const std::byte* p) {
  return each([&](int i) { return half_to_float(u16(p + 2 * i)); });
}
template <int H>
inline Part load_i8(const std::byte* p) {
  return each([&](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
}
inline Part part_f16(const std::byte* p) { return set1(half_to_float(u16(p))); }
inline Part part_f32(float f) { return set1(f); }
template <int H>
struct E2m1Block {
  const std::byte* p;
};
template <int H>
inline E2m1Block<H> load_e2m1_block(const std::byte* p) {
  return {p};
}
template <int G, int H>
inline Part e2m1_group(const E2m1Block<H>& b) {
  constexpr float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return each([&](int i) {
    const auto q = static_cast<std::uint8_t>(b.p[8 * G + (i & 7)]);
    return table[i < 8 ? (q & 15) : (q >> 4)];
  });
}

#endif

// Folds by halves: 16 -> 8 -> 4 -> 2 -> 1, the same order everywhere.
inline float sum(V x) {
#if defined(IMP_VEC_AVX512) || defined(IMP_VEC_AVX2)
  const __m256 a = _mm256_add_ps(low(x), high(x));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
#else
  float t[8];
  for (int i = 0; i < 8; ++i) t[i] = x.v[i] + x.v[i + 8];
  for (int n = 4; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) t[i] += t[i + n];
  return t[0];
#endif
}

// y[i] = alpha * sum(x[i]), the first n of four: the same additions as sum(), four at a time.
inline void store_sums(const V* x, float alpha, float* y, std::int64_t n) {
#if defined(IMP_VEC_AVX512)
  const auto halves = [](__m512 a, __m512 b) {  // 8 lanes of a, 8 lanes of b
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 p = halves(x[0].v, x[1].v), q = halves(x[2].v, x[3].v);
  __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xee));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x55));
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128 r =
      _mm_mul_ps(_mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)), _mm_set1_ps(alpha));
  _mm_mask_storeu_ps(y, static_cast<__mmask8>((1u << n) - 1), r);
#elif defined(IMP_VEC_AVX2)
  const auto halves = [](V a, V b) {  // 4 lanes of a, 4 lanes of b
    const __m256 c = _mm256_add_ps(a.a, a.b), d = _mm256_add_ps(b.a, b.b);
    return _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
  };
  const __m256 p = halves(x[0], x[1]), q = halves(x[2], x[3]);
  const __m256 s = _mm256_add_ps(_mm256_shuffle_ps(p, q, 0x44), _mm256_shuffle_ps(p, q, 0xee));
  const __m256 t = _mm256_add_ps(_mm256_shuffle_ps(s, s, 0x88), _mm256_shuffle_ps(s, s, 0xdd));
  const __m128 r = _mm_mul_ps(
      _mm_unpacklo_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)), _mm_set1_ps(alpha));
  if (n == 4) {
    _mm_storeu_ps(y, r);
  } else {
    float f[4];
    _mm_storeu_ps(f, r);
    for (std::int64_t i = 0; i < n; ++i) y[i] = f[i];
  }
#else
  for (std::int64_t i = 0; i < n; ++i) y[i] = alpha * sum(x[i]);
#endif
}

inline float max_lane(V x) {
  float t[lanes];
  store(t, x);
  float m = t[0];
  for (int i = 1; i < lanes; ++i) m = t[i] > m ? t[i] : m;
  return m;
}

// e^x to about 1 ulp: 2^n * p(r), |r| <= ln(2)/2; the polynomial is the degree-6 minimax of Cephes'
// expf. NaN stays NaN: max/min return their second operand for unordered ones.
inline V exp(V x) {
  x = min(set1(88.3762626647950f), max(set1(-87.3365478515625f), x));
  const V n = round(x * set1(1.44269504088896341f));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return scale2(p, n);
}
inline V sigmoid(V x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
inline V silu(V x) { return x / (set1(1.0f) + exp(zero() - x)); }

}  // namespace
}  // namespace imp::cpu
