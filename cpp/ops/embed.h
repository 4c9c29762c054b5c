// Token rows into residual streams; n-gram rows into one feature vector. C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"

namespace imp {

// y = values given from outside, [rows, cols] fp32 or int32 in host memory that outlives the graph
struct Feed {
  const void* values;
  Tensor y;
  template <class R, class W>
  void visit(R, W writes) const {
    writes(y);
  }
};

// y[t] = [e, e, ...] with e = table[token_t]; y [T, streams * hidden]
struct EmbedStreams {
  const Weight* table;  // [vocab, hidden]
  std::int64_t streams;
  Tensor y;
  template <class R, class W>
  void visit(R, W writes) const {
    writes(y);
  }
};

// y[t] = concat_h scale * table[row_h(t)]; rows come with the step. y [T, heads * row_dim]
struct NgramRows {
  const Weight* table;  // [table rows, row_dim], mapped from the file
  std::int64_t heads;
  std::int64_t index;  // which n-gram layer's rows
  Tensor y;
  template <class R, class W>
  void visit(R, W writes) const {
    writes(y);
  }
};

// y[i] = x[outputs_i]; y [outputs, cols]
struct GatherOutputs {
  Tensor x, y;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(x);
    writes(y);
  }
};

}  // namespace imp
