// The token after each output. C++20-clean.
#pragma once

#include "cpp/graph/tensor.h"

namespace imp {

// ids[i] = the token that StepInputs::draws[i] chooses from logits[i]. Suppressed ids are left out;
// of equal logits the lower id is the better one. Greedy: the best token. Otherwise, in this order,
//   top_k: the best top_k tokens stay;
//   top_p: of those the best, up to the one at which their share of softmax(logits) reaches top_p;
//   min_p: of those, logit >= best logit + log_min_p;
//   draw: the first token, best first (by id if no filter is on), at which the sum of the weights
//   exp((logit - best logit) / temperature) exceeds uniform times the sum of all.
// -1 = the host has to choose: there is no draw, a logit is not finite, nothing is left, or more
// tokens are left than the device keeps candidates. logits [outputs, vocab]; ids [outputs, 1] int32
struct Sample {
  Tensor logits, ids;
  template <class R, class W>
  void visit(R reads, W writes) const {
    reads(logits);
    writes(ids);
  }
};

}  // namespace imp
