// Plain and exact; the device does the same in parallel.
#include "cpp/memory/expert_cache.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>

#include "cpp/core/error.h"

namespace imp {

const ScoreTable& score_table() {
  static const ScoreTable table = [] {
    ScoreTable t{};
    for (std::size_t i = 0; i < t.add.size(); ++i)
      t.add[i] = static_cast<std::uint8_t>(
          std::lround(score_unit * std::log2(1 + std::exp2(-static_cast<double>(i) / score_unit))));
    return t;
  }();
  return table;
}

ExpertPolicy read_policy(std::string_view name) {
  constexpr std::uint32_t usual_half_life = 8;
  ExpertPolicy p;
  std::string_view kind = name.substr(0, name.find(':'));
  const bool decays = kind == "lrfu" || kind == "pool-lrfu";
  if (!decays && kind != "lru" && kind != "pool")
    fail(ErrorCode::invalid_argument,
         str("expert policy '", name, "': lru, pool, lrfu[:half_life] or pool-lrfu[:half_life]"));
  p.per_layer = !kind.starts_with("pool");
  p.admission = decays;
  if (decays) p.half_life = usual_half_life;
  if (kind.size() == name.size()) return p;
  const std::string_view number = name.substr(kind.size() + 1);
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), p.half_life);
  if (!decays || error != std::errc{} || end != number.data() + number.size() || p.half_life < 1 ||
      p.half_life > max_half_life)
    fail(ErrorCode::invalid_argument, str("expert policy '", name, "': half-life '", number,
                                          "'; lrfu takes 1 to ", max_half_life, " steps"));
  return p;
}

std::int64_t step_experts(const ExpertCacheShape& shape, const ExpertPolicy& policy) {
  return std::min(policy.per_layer ? shape.slots / shape.layers : shape.slots, shape.experts);
}

std::int64_t staging_slots(const ExpertCacheShape& shape, const ExpertPolicy& policy) {
  return policy.admission ? step_experts(shape, policy) : 0;
}

ExpertCache::ExpertCache(const ExpertCacheShape& shape, const ExpertPolicy& policy)
    : shape_(shape), policy_(policy) {
  if (shape.layers < 1 || shape.experts < 1 ||
      shape.slots < (policy.per_layer ? shape.layers : std::int64_t{1}) ||
      shape.slots > shape.layers * shape.experts)
    fail(ErrorCode::invalid_argument,
         str(shape.slots, " slots for ", shape.layers, " layers of ", shape.experts, " experts"));
  const auto pairs = static_cast<std::size_t>(shape.layers * shape.experts);
  slot_of_.assign(pairs, -1);
  score_.assign(pairs, 0);
  pair_of_.assign(static_cast<std::size_t>(shape.slots), -1);
}

ExpertCache::Range ExpertCache::slots_of(std::int64_t layer) const {
  if (!policy_.per_layer) return {0, shape_.slots};
  return {first_slot_of(layer, shape_.layers, shape_.slots),
          first_slot_of(layer + 1, shape_.layers, shape_.slots)};
}

const ExpertCache::Resolved& ExpertCache::resolve(std::int64_t layer,
                                                  std::span<const std::int32_t> ids,
                                                  std::uint64_t step) {
  distinct_.assign(ids.begin(), ids.end());
  std::ranges::sort(distinct_);
  distinct_.erase(std::ranges::unique(distinct_).begin(), distinct_.end());
  if (!distinct_.empty() && (distinct_.front() < 0 || distinct_.back() >= shape_.experts))
    fail(ErrorCode::invalid_argument,
         str("experts ", distinct_.front(), " to ", distinct_.back(), " of ", shape_.experts));
  const auto [first, last] = slots_of(layer);
  if (std::ssize(distinct_) > last - first)
    fail(ErrorCode::invalid_argument, str("layer ", layer, " wants ", distinct_.size(),
                                          " experts at once, it has ", last - first, " slots"));
  resolved_.hits.clear();
  resolved_.misses.clear();
  for (const std::int32_t e : distinct_) {
    const std::size_t i = index(layer, e);
    score_[i] = used_score(policy_, score_table().add.data(), score_[i], step);
    if (slot_of_[i] >= 0)
      resolved_.hits.push_back(e);
    else
      resolved_.misses.push_back({e, -1, -1});
  }
  wanted_ += std::ssize(distinct_);
  hits_ += std::ssize(resolved_.hits);
  const auto n = static_cast<std::int64_t>(resolved_.misses.size());
  if (n == 0) return resolved_;

  // Slots by (score, slot), without those that this step uses.
  victims_.clear();
  for (auto s = static_cast<std::int32_t>(first); s < last; ++s) {
    const std::int32_t pair = pair_of_[static_cast<std::size_t>(s)];
    const bool routed = pair >= 0 && pair / shape_.experts == layer &&
                        std::ranges::binary_search(distinct_, pair % shape_.experts);
    if (!routed) victims_.push_back(s);
  }
  const auto slot_score = [this](std::int32_t s) {
    const std::int32_t pair = pair_of_[static_cast<std::size_t>(s)];
    return pair < 0 ? 0 : score_[static_cast<std::size_t>(pair)];
  };
  std::ranges::partial_sort(victims_, victims_.begin() + n, {},
                            [&](std::int32_t s) { return std::tuple(slot_score(s), s); });

  // The best misses meet the worst slots.
  order_.resize(static_cast<std::size_t>(n));
  for (std::int32_t i = 0; i < n; ++i) order_[static_cast<std::size_t>(i)] = i;
  if (policy_.admission)
    std::ranges::stable_sort(order_, std::greater<>{}, [&](std::int32_t i) {
      return score_[index(layer, resolved_.misses[static_cast<std::size_t>(i)].expert)];
    });
  for (std::size_t i = 0; i < order_.size(); ++i) {
    Miss& miss = resolved_.misses[static_cast<std::size_t>(order_[i])];
    const std::size_t pair = index(layer, miss.expert);
    const std::int32_t slot = victims_[i];
    if (policy_.admission && score_[pair] <= slot_score(slot)) continue;
    miss.slot = slot;
    miss.victim = pair_of_[static_cast<std::size_t>(slot)];
    if (miss.victim >= 0) slot_of_[static_cast<std::size_t>(miss.victim)] = -1;
    pair_of_[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(pair);
    slot_of_[pair] = slot;
  }
  return resolved_;
}

}  // namespace imp
