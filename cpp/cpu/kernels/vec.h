// V: sixteen fp32 lanes, as one AVX-512 register, two AVX2 registers or a plain array. Included
// only by the per-instruction-set files, which define exactly one of IMP_VEC_AVX512, IMP_VEC_AVX2,
// IMP_VEC_GENERIC.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

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
inline V load_bf16(const std::byte* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline V load_f16(const std::byte* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline V load_i8(const std::byte* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// 16 bytes, each an index 0..15 into the E2M1 table
inline V lookup_e2m1(__m128i codes) {
  const __m512 table = _mm512_loadu_ps(nvfp4::e2m1);
  return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), table)};
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
inline __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V load_bf16(const std::byte* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
inline V load_f16(const std::byte* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline V load_i8(const std::byte* p) {
  const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(q, 8)))};
}
// Codes 0..15 -> twice the E2M1 value by a byte shuffle, widened and halved (all exact). Loses the
// sign of -0, which no sum can see.
inline V lookup_e2m1(__m128i codes) {
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i v = _mm_shuffle_epi8(doubled, codes);
  const __m256 half = _mm256_set1_ps(0.5f);
  return {_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), half),
          _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))), half)};
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
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float* p, V a) { std::memcpy(p, a.v, sizeof a.v); }
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
    std::memcpy(&f, &bits, sizeof f);
    return a.v[i] * f;
  });
}
inline std::uint16_t u16(const std::byte* p) {
  std::uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return h;
}
inline V load_bf16(const std::byte* p) {
  return each([&](int i) { return bf16_to_float(u16(p + 2 * i)); });
}
inline V load_f16(const std::byte* p) {
  return each([&](int i) { return half_to_float(u16(p + 2 * i)); });
}
inline V load_i8(const std::byte* p) {
  return each([&](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
}

#endif

// Four 16-element groups of one NVFP4 block, codes looked up but not scaled.
struct Nvfp4Codes {
  V group[4];
};
inline Nvfp4Codes load_nvfp4_codes(const std::byte* block) {
  Nvfp4Codes r;
#if defined(IMP_VEC_AVX512) || defined(IMP_VEC_AVX2)
  const __m128i mask = _mm_set1_epi8(15);
  for (int h = 0; h < 2; ++h) {
    const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 4 + 16 * h));
    const __m128i lo = _mm_and_si128(q, mask);
    const __m128i hi = _mm_and_si128(_mm_srli_epi16(q, 4), mask);
    r.group[2 * h] = lookup_e2m1(_mm_unpacklo_epi64(lo, hi));
    r.group[2 * h + 1] = lookup_e2m1(_mm_unpackhi_epi64(lo, hi));
  }
#else
  for (int s = 0; s < 4; ++s)
    r.group[s] = each([&](int i) {
      const auto q = static_cast<std::uint8_t>(block[4 + 8 * s + (i & 7)]);
      return nvfp4::e2m1[i < 8 ? (q & 15) : (q >> 4)];
    });
#endif
  return r;
}

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
