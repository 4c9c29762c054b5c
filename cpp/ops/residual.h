// Gated residual streams ("hyper-connections"). C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"
#include "cpp/ops/linear.h"

namespace imp {

// y_i = x_i / rms(x_i) * w_i for each of `groups` equal parts of a row; x, y [T, groups * n], w
// [groups * n]
struct GroupNorm {
  Tensor x;
  Vector w;
  std::int64_t groups;
  float eps;
  Tensor y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    writes(y);
  }
};

// x = 1/streams * sum_i sigmoid(gate_i) * n_i; n, gate [T, streams * hidden], x [T, hidden]
struct ResidualMix {
  Tensor n, gate;
  std::int64_t streams;
  Tensor x;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(n);
    reads(gate);
    writes(x);
  }
};

// The same with gate = scale * low W^T; low [T, W's inputs], gate is a workspace.
struct LinearMix {
  Tensor low, n;
  const Weight* w;  // [streams * hidden, low rank]
  std::int64_t streams;
  Tensor gate, x;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(low);
    reads(n);
    writes(gate);
    writes(x);
  }
};

// r_i += 2 * s_i * y, in place; r [T, streams * hidden], y [T, hidden], s [T, streams] in (0, 1)
struct ResidualInject {
  Tensor r, y, s, out;  // out aliases r
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(r);
    reads(y);
    reads(s);
    writes(out);
  }
};

// ResidualInject, then n_i = r_i / rms(r_i) * w_i; n [T, streams * hidden]
struct InjectNorm {
  Tensor r, y, s;
  Vector w;
  float eps;
  Tensor out, n;  // out aliases r
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(r);
    reads(y);
    reads(s);
    writes(out);
    writes(n);
  }
};

// The streams take the last block's result and are read by the next one: InjectNorm, Linears of n
// (silu of the low rank, sigmoid of the new gates, both of the mean over the streams), LinearMix.
struct ResidualRead {
  Tensor r, y, s;
  Vector w;
  const Weight *down, *inject, *up;  // [low rank, streams * hidden], [streams, streams * hidden],
                                     // [streams * hidden, low rank]
  std::int64_t streams;
  float eps;
  Tensor n, low, gate;    // workspaces: like r, [T, low rank], like r
  Tensor out, next_s, x;  // out aliases r; next_s [T, streams], x [T, hidden]
  template <class R, class W>
  void visit(R reads, W writes) const {
    for (const Tensor t : {r, y, s}) reads(t);
    for (const Tensor t : {n, low, gate, out, next_s, x}) writes(t);
  }
  InjectNorm inject_op() const { return {r, y, s, w, eps, out, n}; }
  Linears down_op() const {
    const float mean = 1.0f / static_cast<float>(streams);
    return {n, {{down, low, mean, Act::silu}, {inject, next_s, mean, Act::sigmoid}}};
  }
  LinearMix mix_op() const { return {low, n, up, streams, gate, x}; }
};

}  // namespace imp
