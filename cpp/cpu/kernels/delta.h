// The gated delta rule over consecutive tokens of one value head. Included by table.h.
#pragma once

#include "cpp/cpu/kernels/elementwise.h"

namespace imp::cpu {
namespace {

// Columns j..j+W*16 of the state for all tokens: a block stays in the L1 cache, and writing the
// state for one token already predicts with it for the next, so each token is one pass.
template <int W>
inline void delta_columns(const DeltaTokens& t, float* s, std::int64_t dk, std::int64_t dv,
                          std::int64_t j) {
  V pred[W];
  for (int c = 0; c < W; ++c) pred[c] = zero();
  for (std::int64_t i = 0; i < dk; ++i) {
    const V ki = set1(t.k[i]);
    for (int c = 0; c < W; ++c) pred[c] = fma(ki, load(s + i * dv + j + c * lanes), pred[c]);
  }
  for (std::int64_t n = 0; n < t.tokens; ++n) {
    const float *q = t.q + n * t.qkv_stride, *k = t.k + n * t.qkv_stride;
    const float* k_next = n + 1 < t.tokens ? k + t.qkv_stride : k;
    const V d = set1(t.decay[n * t.gate_stride]), b = set1(t.beta[n * t.gate_stride]);
    V u[W], out[W];
    for (int c = 0; c < W; ++c) {
      u[c] = b * (load(t.v + n * t.qkv_stride + j + c * lanes) - d * pred[c]);
      out[c] = zero();
      pred[c] = zero();
    }
    for (std::int64_t i = 0; i < dk; ++i) {
      const V ki = set1(k[i]), qi = set1(q[i]), kn = set1(k_next[i]);
      for (int c = 0; c < W; ++c) {
        float* p = s + i * dv + j + c * lanes;
        const V next = fma(ki, u[c], d * load(p));
        store(p, next);
        out[c] = fma(qi, next, out[c]);
        pred[c] = fma(kn, next, pred[c]);
      }
    }
    for (int c = 0; c < W; ++c) store(t.o + n * t.o_stride + j + c * lanes, out[c]);
  }
}

inline void delta_column(const DeltaTokens& t, float* s, std::int64_t dk, std::int64_t dv,
                         std::int64_t j) {
  for (std::int64_t n = 0; n < t.tokens; ++n) {
    const float *q = t.q + n * t.qkv_stride, *k = t.k + n * t.qkv_stride;
    const float decay = t.decay[n * t.gate_stride];
    float pred = 0, out = 0;
    for (std::int64_t i = 0; i < dk; ++i) pred += k[i] * s[i * dv + j];
    const float u = t.beta[n * t.gate_stride] * (t.v[n * t.qkv_stride + j] - decay * pred);
    for (std::int64_t i = 0; i < dk; ++i) {
      const float next = decay * s[i * dv + j] + k[i] * u;
      s[i * dv + j] = next;
      out += q[i] * next;
    }
    t.o[n * t.o_stride + j] = out;
  }
}

inline void delta_rule(const DeltaTokens& t, float* s, std::int64_t dk, std::int64_t dv) {
#if defined(IMP_VEC_AVX512)
  constexpr int wide = 4;
#else
  constexpr int wide = 1;
#endif
  std::int64_t j = 0;
  for (; j + wide * lanes <= dv; j += wide * lanes) delta_columns<wide>(t, s, dk, dv, j);
  for (; j + lanes <= dv; j += lanes) delta_columns<1>(t, s, dk, dv, j);
  for (; j < dv; ++j) delta_column(t, s, dk, dv, j);
}

}  // namespace
}  // namespace imp::cpu
