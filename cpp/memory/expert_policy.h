// Which cached experts make room for others: scores of (layer, expert) pairs, in whole numbers, so
// that host and device agree on every victim. C++20-clean; usable in device code.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "cpp/core/host_device.h"

namespace imp {

// A cached expert's score grows with each step that uses it; the slots with the lowest scores, and
// among equals the lowest slots, are the victims.
//   half_life 0:  score = the step's number: least recently used.
//   else:         score = log2(sum over uses of 2^(step / half_life)), the recency-and-frequency
//                 score of D. Lee et al., "LRFU" (IEEE ToC 2001), with decay by growing weights. A
//                 pair keeps its score while it is not cached.
struct ExpertPolicy {
  std::uint32_t half_life = 0;  // steps after which a use counts half
  bool per_layer = true;        // slots divided evenly among the layers, or one pool for all
  bool admission = false;       // a missed expert enters only if its score beats the victim's
};

inline constexpr std::uint32_t max_half_life = 1u << 20;

// Scores with decay count in units of a half-life / 64.
inline constexpr int score_unit = 64;

// round(64 log2(1 + 2^(-i/64))) for i < 512, where it first rounds to 0.
struct ScoreTable {
  std::array<std::uint8_t, 512> add;
};
const ScoreTable& score_table();

IMP_HOST_DEVICE inline std::uint64_t used_score(const ExpertPolicy& p, const std::uint8_t* add,
                                                std::uint64_t score, std::uint64_t step) {
  if (p.half_life == 0) return step;
  const std::uint64_t now = step * score_unit / p.half_life + score_unit;  // above the empty 0
  if (score == 0) return now;
  const std::uint64_t high = score > now ? score : now, low = score > now ? now : score;
  return high + (high - low < 512 ? add[high - low] : 0);
}

// Of sessions that name none: docs/expert-cache.md has the hit rates.
inline constexpr const char* usual_policy = "lrfu";

// "lru", "pool", "lrfu[:half_life]" or "pool-lrfu[:half_life]"; fails (invalid_argument) otherwise.
ExpertPolicy read_policy(std::string_view name);

}  // namespace imp
