// V as a plain array. Included by vec.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpp/core/half.h"

namespace imp::cpu {
namespace {

inline constexpr int lanes = 16;

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

}  // namespace
}  // namespace imp::cpu
