// V as two AVX2 registers. Included by vec.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpp/core/half.h"

namespace imp::cpu {
namespace {

inline constexpr int lanes = 16;

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

}  // namespace
}  // namespace imp::cpu
