// The hashed n-gram block: gate against the residual streams, then a dilated causal convolution.
// C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"

namespace imp {

// Per stream i: u = (norm(key_i; w_key) . norm(r_i; w_query)) / sqrt(hidden), a = sigmoid(sign(u)
// sqrt(max(|u|, 1e-6))),
//   value_i = a * v, n_i = norm(value_i; w_conv).
// r, key, value, n [T, streams * hidden]; v [T, hidden]
struct NgramGate {
  Tensor r, key, v;
  Vector w_key, w_query, w_conv;  // [streams * hidden]
  std::int64_t streams;
  float eps;
  Tensor value, n;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(r);
    reads(key);
    reads(v);
    writes(value);
    writes(n);
  }
};
inline constexpr float ngram_gate_floor = 1e-6f;

// r += value + silu(sum_j w[j] * n_{t - dilation (kernel-1-j)}), in place. State: the last dilation
// * (kernel-1) rows of n.
struct NgramConv {
  Tensor r, value, n;
  Vector w;  // [kernel, cols]
  std::int64_t kernel, dilation;
  std::int64_t state;
  Tensor out;  // aliases r
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(r);
    reads(value);
    reads(n);
    writes(out);
  }
};

}  // namespace imp
