// Gated delta-net: causal convolution, delta rule, gated norm. C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"
#include "cpp/ops/act.h"

namespace imp {

// y_t[c] = silu(sum_j w[j][c] * x_{t - (kernel-1-j)}[c]); x, y [T, channels].
// State: the last kernel-1 rows of x, [kernel-1, channels]; zero before the first token.
struct ConvSilu {
  Tensor x;
  Vector w;  // [kernel, channels], tap kernel-1 = the current token
  std::int64_t kernel;
  std::int64_t state;  // offset in a state row
  Tensor y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    writes(y);
  }
};

// Per value head u, with key head h = u % key_heads and state S [key_dim, value_dim]:
//   q = l2norm(q_h) / sqrt(key_dim), k = l2norm(k_h), beta = sigmoid(b_u), g = a_u *
//   softplus(alpha_u + dt_u) S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
// qkv [T, 2 * key_heads * key_dim + value_heads * value_dim] (normalised in place), alpha, b [T,
// value_heads].
struct DeltaRule {
  Tensor qkv, alpha, b;
  Vector a, dt;
  std::int64_t key_heads, value_heads, key_dim, value_dim;
  std::int64_t state;  // offset of [value_heads, key_dim, value_dim] in a state row
  Tensor gates;        // workspace [T, 2 * value_heads]: e^g, beta
  Tensor o;            // [T, value_heads * value_dim]
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(qkv);
    reads(alpha);
    reads(b);
    writes(gates);
    writes(o);
  }
};
inline constexpr std::int64_t max_conv_kernel = 32;  // taps
inline constexpr float l2_norm_eps = 1e-6f;
inline constexpr std::int64_t delta_chunk =
    64;  // tokens of a chunk of the parallel form, on the absolute grid

// y = o / rms(o) * w * act(z) per head of `dim`; o, z, y [T, heads * dim], w [dim]
struct GatedNorm {
  Tensor o, z;
  Vector w;
  std::int64_t dim;
  float eps;
  Act act;
  Tensor y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(o);
    reads(z);
    writes(y);
  }
};

// ConvSilu, DeltaRule and GatedNorm in one op: all of a delta-net between its linear maps.
struct GatedDeltaNet {
  Tensor x, z, alpha, b;  // [T, channels] (queries, keys, values), [T, value_heads * value_dim],
                          // [T, value_heads] twice
  Vector conv, a, dt, norm;
  std::int64_t kernel, key_heads, value_heads, key_dim, value_dim;
  std::int64_t conv_state, delta_state;  // offsets in a state row
  float eps;
  Act act;
  Tensor qkv, gates, o;  // workspaces: like x, [T, 2 * value_heads], like z
  Tensor y;              // like z
  template <class R, class W>
  void visit(R reads, W writes) const {
    for (const Tensor t : {x, z, alpha, b}) reads(t);
    for (const Tensor t : {qkv, gates, o, y}) writes(t);
  }
  ConvSilu conv_op() const { return {x, conv, kernel, conv_state, qkv}; }
  DeltaRule delta_op() const {
    return {qkv,         alpha,   b,         a,           dt,    key_heads,
            value_heads, key_dim, value_dim, delta_state, gates, o};
  }
  GatedNorm norm_op() const { return {o, z, norm, value_dim, eps, act, y}; }
};

}  // namespace imp
