// Norms, activations and the small fused loops of the residual streams, convolution and expert sum.
// For table.h.
#pragma once

#include "cpp/cpu/kernels/kernels.h"
#include "cpp/cpu/kernels/vec.h"

namespace imp::cpu {
namespace {

// Calls f(i, lanes) for whole vectors and f(i, rest) once for the tail.
template <class F>
inline void blocks(std::int64_t n, F f) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(i, static_cast<std::int64_t>(lanes));
  if (i < n) f(i, n - i);
}
inline V load_m(const float* p, std::int64_t m) { return m == lanes ? load(p) : load_n(p, m); }
inline void store_m(float* p, V v, std::int64_t m) { m == lanes ? store(p, v) : store_n(p, v, m); }

inline void activate(Act act, const float* x, float* y, std::int64_t n) {
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    const V v = load_m(x + i, m);
    store_m(y + i, act == Act::silu ? silu(v) : act == Act::sigmoid ? sigmoid(v) : v, m);
  });
}

inline void silu_mul(const float* gate, const float* up, float* y, std::int64_t n) {
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    store_m(y + i, silu(load_m(gate + i, m)) * load_m(up + i, m), m);
  });
}

inline void axpy(float a, const float* x, float* y, std::int64_t n) {
  const V s = set1(a);
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    store_m(y + i, fma(s, load_m(x + i, m), load_m(y + i, m)), m);
  });
}

inline void sigmoid_mul(const float* gate, float* y, std::int64_t n) {
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    store_m(y + i, load_m(y + i, m) * sigmoid(load_m(gate + i, m)), m);
  });
}

inline float dot(const float* a, const float* b, std::int64_t n) {
  V acc = zero();
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    acc = fma(load_m(a + i, m), load_m(b + i, m), acc);
  });
  return sum(acc);
}

inline void rms_norm(const float* x, const float* w, float* y, std::int64_t n, float eps) {
  const V r = set1(1.0f / __builtin_sqrtf(dot(x, x, n) / static_cast<float>(n) + eps));
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    store_m(y + i, load_m(x + i, m) * r * load_m(w + i, m), m);
  });
}

inline void l2_norm(const float* x, float* y, std::int64_t n, float eps, float scale) {
  const V r = set1(scale / __builtin_sqrtf(dot(x, x, n) + eps));
  blocks(n, [&](std::int64_t i, std::int64_t m) { store_m(y + i, load_m(x + i, m) * r, m); });
}

inline void residual_mix(const float* n, const float* gate, float* x, std::int64_t streams,
                         std::int64_t hidden) {
  const V inv = set1(1.0f / static_cast<float>(streams));
  blocks(hidden, [&](std::int64_t i, std::int64_t m) {
    V acc = zero();
    for (std::int64_t s = 0; s < streams; ++s)
      acc = fma(sigmoid(load_m(gate + s * hidden + i, m)), load_m(n + s * hidden + i, m), acc);
    store_m(x + i, acc * inv, m);
  });
}

inline void combine(const float* const* slots, const float* w, std::int64_t n_slots,
                    const float* shared, float shared_weight, float* y, std::int64_t n) {
  blocks(n, [&](std::int64_t i, std::int64_t m) {
    V acc = zero();
    for (std::int64_t j = 0; j < n_slots; ++j) acc = fma(set1(w[j]), load_m(slots[j] + i, m), acc);
    store_m(y + i, fma(set1(shared_weight), load_m(shared + i, m), acc), m);
  });
}

inline void conv_silu(const float* const* taps, const float* w, std::int64_t n_taps, float* y,
                      std::int64_t channels) {
  blocks(channels, [&](std::int64_t i, std::int64_t m) {
    V acc = zero();
    for (std::int64_t j = 0; j < n_taps; ++j)
      acc = fma(load_m(w + j * channels + i, m), load_m(taps[j] + i, m), acc);
    store_m(y + i, silu(acc), m);
  });
}

inline void rope(float* x, const float* cos, const float* sin, std::int64_t half) {
  blocks(half, [&](std::int64_t i, std::int64_t m) {
    const V a = load_m(x + i, m), b = load_m(x + half + i, m), c = load_m(cos + i, m),
            s = load_m(sin + i, m);
    store_m(x + i, a * c - b * s, m);
    store_m(x + half + i, fma(b, c, a * s), m);
  });
}

inline float max_of(const float* x, std::int64_t n) {
  V acc = set1(-__builtin_inff());
  float tail = -__builtin_inff();
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) acc = max(acc, load(x + i));
  for (; i < n; ++i) tail = x[i] > tail ? x[i] : tail;
  const float body = max_lane(acc);
  return body > tail ? body : tail;
}

inline double sum_exp(const float* x, std::int64_t n, float max) {
  const V m = set1(max);
  double total = 0;
  constexpr std::int64_t run = 1024;  // fp32 partial sums of at most this many terms
  for (std::int64_t s = 0; s < n; s += run) {
    const std::int64_t e = s + run < n ? s + run : n;
    V acc = zero();
    std::int64_t i = s;
    for (; i + lanes <= e; i += lanes) acc = acc + exp(load(x + i) - m);
    float t[lanes];
    store(t, acc);
    for (float f : t) total += f;
    if (i < e) {
      store(t, exp(load_n(x + i, e - i) - m));
      for (std::int64_t j = 0; j < e - i; ++j) total += t[j];
    }
  }
  return total;
}

}  // namespace
}  // namespace imp::cpu
