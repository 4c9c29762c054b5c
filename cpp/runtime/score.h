// How surprised a model is by the tokens that really came.
#pragma once

#include <cstdint>
#include <span>

namespace imp {

// -log softmax(logits)[target] for each row: fp32 differences, sums in double. The first row that
// is not finite fails with numeric, naming the row. threads = 0: as many as the process may use.
void token_nll(std::span<const float> logits, std::int64_t vocab,
               std::span<const std::int32_t> targets, double* nll, int threads);

}  // namespace imp
