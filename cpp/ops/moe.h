// Routed experts with a gated shared expert. C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"
#include "cpp/ops/linear.h"

namespace imp {

// p = softmax(logits); ids = the k largest (lower id wins ties), weights = p[ids], summing to 1 if
// renormalise. logits [T, experts]; ids [T, k] int32, weights [T, k], both in rank order.
// planted: the layer whose ids come from StepInputs::expert_ids instead (with the weights of their
// ranks), for benchmarks; -1 = none.
struct Route {
  Tensor logits;
  std::int64_t k;
  bool renormalise;
  Tensor ids, weights;
  std::int64_t planted = -1;
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

// The chosen experts, the shared one and their sum: Route, if there are logits (else ids and
// weights are given), ExpertFfn, SwiGlu of shared_gate and shared_up, a linear map of that,
// Combine.
struct MoeFfn {
  Tensor x, logits, ids, weights;
  Tensor shared_gate, shared_up;  // [T, shared ff]
  Tensor share;                   // [T, 1] of the shared expert
  const ExpertBank *gate, *up, *down;
  const Weight* shared_down;
  Tensor hidden, up_out, slots, shared_hidden, shared;  // workspaces
  Tensor y;
  std::int64_t k = 0;  // these three: of Route
  bool renormalise = true;
  std::int64_t planted = -1;
  template <class R, class W>
  void visit(R reads, W writes) const {
    for (const Tensor t : {x, shared_gate, shared_up, share}) reads(t);
    if (logits) reads(logits);
    for (const Tensor t : {ids, weights}) logits ? writes(t) : reads(t);
    for (const Tensor t : {hidden, up_out, slots, shared_hidden, shared, y}) writes(t);
  }
  Route route() const { return {logits, k, renormalise, ids, weights, planted}; }
  ExpertFfn experts() const { return {x, ids, gate, up, down, hidden, up_out, slots}; }
  SwiGlu swiglu() const { return {shared_gate, shared_up, shared_hidden}; }
  Linear down_linear() const { return {shared_hidden, shared_down, shared, 1, Act::none}; }
  Combine combine() const { return {slots, weights, shared, share, y}; }
};

}  // namespace imp
