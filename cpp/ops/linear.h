// y = act(alpha * scale * x W^T); x [T, cols], W [rows, cols], y [T, rows]. C++20-clean.
#pragma once

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
