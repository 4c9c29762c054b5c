// One token of the gated delta rule for one value head. Included by table.h.
#pragma once

#include "cpp/cpu/kernels/elementwise.h"

namespace imp::cpu {
namespace {

// Columns j..j+W*16 of the state: one pass to predict, one to write and read; the block stays in
// the L1 cache.
template <int W>
inline void delta_columns(float* s, const float* q, const float* k, const float* v, float decay,
                          float beta, float* o, std::int64_t dk, std::int64_t dv, std::int64_t j) {
  V pred[W];
  for (int c = 0; c < W; ++c) pred[c] = zero();
  for (std::int64_t i = 0; i < dk; ++i) {
    const V ki = set1(k[i]);
    for (int c = 0; c < W; ++c) pred[c] = fma(ki, load(s + i * dv + j + c * lanes), pred[c]);
  }
  const V d = set1(decay), b = set1(beta);
  V u[W], out[W];
  for (int c = 0; c < W; ++c) {
    u[c] = b * (load(v + j + c * lanes) - d * pred[c]);
    out[c] = zero();
  }
  for (std::int64_t i = 0; i < dk; ++i) {
    const V ki = set1(k[i]), qi = set1(q[i]);
    for (int c = 0; c < W; ++c) {
      float* p = s + i * dv + j + c * lanes;
      const V next = fma(ki, u[c], d * load(p));
      store(p, next);
      out[c] = fma(qi, next, out[c]);
    }
  }
  for (int c = 0; c < W; ++c) store(o + j + c * lanes, out[c]);
}

inline void delta_step(float* s, const float* q, const float* k, const float* v, float decay,
                       float beta, float* o, std::int64_t dk, std::int64_t dv) {
  std::int64_t j = 0;
  for (; j + 4 * lanes <= dv; j += 4 * lanes)
    delta_columns<4>(s, q, k, v, decay, beta, o, dk, dv, j);
  for (; j + lanes <= dv; j += lanes) delta_columns<1>(s, q, k, v, decay, beta, o, dk, dv, j);
  for (; j < dv; ++j) {
    float pred = 0, out = 0;
    for (std::int64_t i = 0; i < dk; ++i) pred += k[i] * s[i * dv + j];
    const float u = beta * (v[j] - decay * pred);
    for (std::int64_t i = 0; i < dk; ++i) {
      const float next = decay * s[i * dv + j] + k[i] * u;
      s[i * dv + j] = next;
      out += q[i] * next;
    }
    o[j] = out;
  }
}

}  // namespace
}  // namespace imp::cpu
