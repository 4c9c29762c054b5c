// y = act(alpha * scale * x W^T); x [T, cols], W [rows, cols], y [T, rows]. C++20-clean.
#pragma once

#include <vector>

#include "cpp/graph/tensor.h"
#include "cpp/ops/act.h"

namespace imp {

struct Linear {
  Tensor x;
  const Weight* w;
  Tensor y;
  float alpha;
  Act act;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    writes(y);
  }
};

// Several maps of one x: y_i = act_i(alpha_i * scale_i * x W_i^T).
struct Linears {
  struct Part {
    const Weight* w;
    Tensor y;
    float alpha;
    Act act;
  };
  Tensor x;
  std::vector<Part> parts;  // up to max_linear_parts
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    for (const Part& p : parts) writes(p.y);
  }
};
inline constexpr std::size_t max_linear_parts = 8;

// y = silu(gate) * up, all [T, cols]
struct SwiGlu {
  Tensor gate, up, y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(gate);
    reads(up);
    writes(y);
  }
};

}  // namespace imp
