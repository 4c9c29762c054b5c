// V as one AVX-512 register. Included by vec.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpp/core/half.h"

namespace imp::cpu {
namespace {

inline constexpr int lanes = 16;

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

}  // namespace
}  // namespace imp::cpu
