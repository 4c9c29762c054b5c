// What a cache of experts would have done with recorded or planted routing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpp/memory/expert_cache.h"

namespace imp {

// Expert ids of a run: step by step, layer by layer, [rows of the step, k].
struct RoutingTrace {
  std::int64_t layers = 0, experts = 0, k = 0;
  std::vector<std::int32_t> step_rows;  // tokens of each step
  std::span<const std::uint16_t> ids;   // [sum of step_rows, layers, k]
};

struct SimResult {
  std::int64_t wanted = 0, hits = 0;  // distinct experts of steps and layers
  std::int64_t kept = 0;              // misses that entered the cache
  std::int64_t uncached = 0;          // steps of a layer with more experts than its slots: not
                                      // counted above, the cache is not used for them
  std::vector<std::int64_t> layer_wanted, layer_hits;  // [layers]
};

// Runs steps [first counted, end) through a cache that all steps before have warmed. Fails
// (invalid_argument) for ids outside the experts or a trace whose parts do not fit.
SimResult simulate(const RoutingTrace&, std::int64_t slots, const ExpertPolicy&,
                   std::int64_t first_counted);

}  // namespace imp
