#include "cpp/runtime/expert_sim.h"

#include <algorithm>
#include <numeric>

#include "cpp/core/error.h"

namespace imp {

SimResult simulate(const RoutingTrace& trace, std::int64_t slots, const ExpertPolicy& policy,
                   std::int64_t first_counted) {
  const std::int64_t tokens =
      std::accumulate(trace.step_rows.begin(), trace.step_rows.end(), std::int64_t{0});
  if (trace.layers < 1 || trace.k < 1 || trace.k > trace.experts ||
      std::ranges::any_of(trace.step_rows, [](std::int32_t r) { return r < 1; }) ||
      std::ssize(trace.ids) != tokens * trace.layers * trace.k)
    fail(ErrorCode::invalid_argument,
         str("a trace of ", trace.ids.size(), " ids for ", tokens, " tokens, ", trace.layers,
             " layers and ", trace.k, " experts of ", trace.experts));
  ExpertCache cache({trace.layers, trace.experts, slots}, policy);
  SimResult r;
  r.layer_wanted.assign(static_cast<std::size_t>(trace.layers), 0);
  r.layer_hits = r.layer_wanted;
  std::vector<std::int32_t> ids;
  const std::uint16_t* at = trace.ids.data();
  const std::int64_t stride = trace.layers * trace.k;
  for (std::size_t step = 0; step < trace.step_rows.size(); ++step) {
    const std::int64_t rows = trace.step_rows[step];
    const bool counted = static_cast<std::int64_t>(step) >= first_counted;
    for (std::int64_t l = 0; l < trace.layers; ++l) {
      ids.clear();
      for (std::int64_t t = 0; t < rows; ++t)
        ids.insert(ids.end(), at + t * stride + l * trace.k, at + t * stride + (l + 1) * trace.k);
      const auto [first, last] = cache.slots_of(l);
      if (std::min(std::ssize(ids), trace.experts) > last - first) {
        std::ranges::sort(ids);
        ids.erase(std::ranges::unique(ids).begin(), ids.end());
        if (std::ssize(ids) > last - first) {
          r.uncached += counted ? 1 : 0;
          continue;
        }
      }
      const ExpertCache::Resolved& now = cache.resolve(l, ids, step + 1);
      if (!counted) continue;
      const auto hits = std::ssize(now.hits), misses = std::ssize(now.misses);
      r.wanted += hits + misses;
      r.hits += hits;
      r.layer_wanted[static_cast<std::size_t>(l)] += hits + misses;
      r.layer_hits[static_cast<std::size_t>(l)] += hits;
      r.kept += std::ranges::count_if(now.misses, [](const auto& m) { return m.slot >= 0; });
    }
    at += rows * stride;
  }
  return r;
}

}  // namespace imp
