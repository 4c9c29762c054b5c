// One call's choice of experts, for the kernel of its own and for those that make it themselves.
#pragma once

#include <cstdint>

#include "cpp/ops/moe.h"
#include "cuda/context.h"

namespace imp::cuda {

struct RouteArgs {
  const std::int32_t* n_padding;
  const float* logits;  // [T, experts], or absent: the choice is made
  std::int64_t rows;
  int experts, k;
  bool renormalise;
  std::int32_t* ids;            // [T, k]
  float* weights;               // [T, k]
  const std::int32_t* planted;  // [T, k] that replace the ids, or absent
};

// Defined in route.cu.
RouteArgs route_args(const Route&, const Context&);

}  // namespace imp::cuda
