// Top-k, top-p, min-p, temperature and the draw, for vocabularies of 250k.
#include "cpp/cpu/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpp/cpu/run.h"

namespace imp::cpu {
namespace {

constexpr std::size_t first_top_p_prefix = 256;  // grows by prefix_growth until it holds top_p
constexpr std::size_t prefix_growth = 8;
constexpr float suppressed = -std::numeric_limits<float>::infinity();

bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Cuts `kept` (sorted) after the token at which the cumulative probability reaches top_p of
// `total`. False if it never does.
bool cut_top_p(std::vector<Candidate>& kept, double top_p, double total, float max_logit) {
  double sum = 0.0;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    sum += std::exp(static_cast<double>(kept[i].logit - max_logit));
    if (sum >= top_p * total) {
      kept.resize(i + 1);
      return true;
    }
  }
  return false;
}

void keep_top_p(std::span<const float> logits, double top_p, float max_logit,
                std::vector<Candidate>& kept) {
  double total = 0.0;
  for (const float x : logits) total += std::exp(static_cast<double>(x - max_logit));
  for (std::size_t k = first_top_p_prefix;; k *= prefix_growth) {
    select_top(logits, k, kept);
    if (cut_top_p(kept, top_p, total, max_logit) || k >= logits.size()) return;
  }
}

std::int32_t draw_among(const std::vector<Candidate>& kept, const Draw& draw) {
  const double max_logit = std::max_element(kept.begin(), kept.end(), [](auto& a, auto& b) {
                             return a.logit < b.logit;
                           })->logit;
  const auto weight = [&](const Candidate& c) {
    return std::exp((c.logit - max_logit) / draw.temperature);
  };
  double total = 0.0;
  for (const Candidate& c : kept) total += weight(c);
  const double target = draw.uniform * total;
  double sum = 0.0;
  for (const Candidate& c : kept) {
    sum += weight(c);
    if (sum > target) return c.id;
  }
  return kept.front().id;  // target was rounded up to total
}

}  // namespace

// An exponent of all ones is what NaN and infinity share; the first loop vectorises.
std::int64_t first_not_finite(std::span<const float> logits) {
  constexpr std::uint32_t exponent = 0x7f800000u;
  bool bad = false;
  for (const float x : logits) bad |= (std::bit_cast<std::uint32_t>(x) & exponent) == exponent;
  if (!bad) return -1;
  return std::ranges::find_if_not(logits, [](float x) { return std::isfinite(x); }) -
         logits.begin();
}

void select_top(std::span<const float> logits, std::size_t k, std::vector<Candidate>& kept) {
  k = std::min(k, logits.size());
  kept.clear();
  if (k == 0) return;
  const std::size_t room = std::min(logits.size(), std::max<std::size_t>(2 * k, 64));
  float threshold = suppressed;  // ids rise, so a later tie with the k-th never gets in
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] > threshold)) continue;
    kept.push_back({logits[i], static_cast<std::int32_t>(i)});
    if (kept.size() == room && room > k) {
      std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(k - 1), kept.end(),
                       before);
      kept.resize(k);
      threshold = kept.back().logit;
    }
  }
  if (kept.size() > k) {
    std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(k - 1), kept.end(),
                     before);
    kept.resize(k);
  }
  std::sort(kept.begin(), kept.end(), before);
}

std::int32_t choose(std::span<const float> logits, const Draw& draw, std::vector<Candidate>& kept) {
  const auto best = std::max_element(logits.begin(), logits.end());
  const float max_logit = *best;
  kept.clear();
  if (max_logit == suppressed) return -1;
  if (draw.temperature == 0.0f) {
    kept.push_back({max_logit, static_cast<std::int32_t>(best - logits.begin())});
    return kept.front().id;
  }
  const float min_logit = max_logit + draw.log_min_p;
  const auto too_small = [&](const Candidate& c) { return c.logit < min_logit; };
  if (draw.top_k > 0) {
    select_top(logits, static_cast<std::size_t>(draw.top_k), kept);
    if (draw.top_p < 1.0f) {
      double total = 0.0;
      for (const Candidate& c : kept) total += std::exp(static_cast<double>(c.logit - max_logit));
      cut_top_p(kept, draw.top_p, total, max_logit);
    }
  } else if (draw.top_p < 1.0f) {
    keep_top_p(logits, draw.top_p, max_logit, kept);
  } else {
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const Candidate c{logits[i], static_cast<std::int32_t>(i)};
      if (c.logit != suppressed && !too_small(c)) kept.push_back(c);
    }
    if (min_logit != suppressed) std::sort(kept.begin(), kept.end(), before);
  }
  std::erase_if(kept, too_small);
  return draw_among(kept, draw);
}

void run(const Sample& op, const Context& c) {
  const auto vocab = static_cast<std::size_t>(c.cols(op.logits));
  c.pool.parallel_for(c.rows(op.logits), [&](std::int64_t i, int) {
    std::span<const float> logits(c.row(op.logits, i), vocab);
    const Draw& draw = c.step.draws[static_cast<std::size_t>(i)];
    std::int32_t& id = c.i32(op.ids)[i];
    id = -1;
    if (draw.temperature == Draw::by_host || first_not_finite(logits) >= 0) return;
    std::vector<float> changed;
    for (const std::int32_t s : draw.suppressed) {
      if (s < 0) continue;
      if (changed.empty()) changed.assign(logits.begin(), logits.end());
      changed[static_cast<std::size_t>(s)] = suppressed;
      logits = changed;
    }
    std::vector<Candidate> kept;
    id = choose(logits, draw, kept);
  });
}

}  // namespace imp::cpu
