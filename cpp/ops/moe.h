// Routed experts with a gated shared expert. C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"

namespace imp {

// p = softmax(logits); ids = the k largest (lower id wins ties), weights = p[ids], summing to 1 if
// renormalise. logits [T, experts]; ids [T, k] int32, weights [T, k], both in rank order.
struct Route {
  Tensor logits;
  std::int64_t k;
  bool renormalise;
  Tensor ids, weights;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(logits);
    writes(ids);
    writes(weights);
  }
};

// y[t, j] = down_e (silu(gate_e x_t) * up_e x_t), e = ids[t, j]. x [T, hidden]; y [T * k, hidden]
struct ExpertFfn {
  Tensor x, ids;
  const ExpertBank *gate, *up, *down;
  Tensor hidden, up_out;  // workspaces [T * k, ff]
  Tensor y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    reads(ids);
    writes(hidden);
    writes(up_out);
    writes(y);
  }
};

// y = sum_j weights[j] * slots[j] in rank order + shared_gate * shared. slots [T * k, n], shared
// [T, n], gate [T, 1]
struct Combine {
  Tensor slots, weights, shared, shared_gate, y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(slots);
    reads(weights);
    reads(shared);
    reads(shared_gate);
    writes(y);
  }
};

}  // namespace imp
