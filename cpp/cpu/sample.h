// Choosing a token from logits: what the Sample op and the sampler share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpp/ops/step.h"

namespace imp::cpu {

struct Candidate {
  float logit;
  std::int32_t id;
};

// The first logit that is not finite, or -1.
std::int64_t first_not_finite(std::span<const float> logits);

// The best k of `logits`, best first; of equals the lower id is better. Minus infinity never gets
// in. One pass that keeps at most 2k.
void select_top(std::span<const float> logits, std::size_t k, std::vector<Candidate>& kept);

// The token that `draw` chooses (see Sample), or -1 if all logits are minus infinity, which is how
// suppressed ones come here. `kept`: what it was drawn among, best first if a filter is on.
std::int32_t choose(std::span<const float> logits, const Draw& draw, std::vector<Candidate>& kept);

}  // namespace imp::cpu
