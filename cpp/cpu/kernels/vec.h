// V: sixteen fp32 lanes, as one AVX-512 register, two AVX2 registers or a plain array, and what is
// built from them. Included only by the per-instruction-set files, which define exactly one of
// IMP_VEC_AVX512, IMP_VEC_AVX2, IMP_VEC_GENERIC.
//
// Each vec_*.h also has Part, the whole of V or half of it (`parts` of them make one), and loads of
// the stored formats part by part: load_bf16<H>(p) is part H of the 16 values at p.
#pragma once

#if defined(IMP_VEC_AVX512)
#include "cpp/cpu/kernels/vec_avx512.h"
#elif defined(IMP_VEC_AVX2)
#include "cpp/cpu/kernels/vec_avx2.h"
#else
#include "cpp/cpu/kernels/vec_generic.h"
#endif

namespace imp::cpu {
namespace {

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
