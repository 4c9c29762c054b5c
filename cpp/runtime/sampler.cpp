// The sampler: penalties, top-k, top-p, min-p, temperature and the draw, for vocabularies of 250k.
#include "cpp/runtime/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "cpp/core/error.h"

namespace imp::runtime {
namespace {

constexpr std::size_t first_top_p_prefix = 256;  // grows by prefix_growth until it holds top_p
constexpr std::size_t prefix_growth = 8;
constexpr float suppressed = -std::numeric_limits<float>::infinity();

bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

void check_range(std::string_view name, double value, double low, double high) {
  if (!(value >= low && value <= high)) {
    fail(ErrorCode::invalid_argument,
         str(name, " is ", value, ", outside [", low, ", ", high, "]"));
  }
}

void check_token(std::int32_t id, std::size_t vocab) {
  if (id < 0 || static_cast<std::size_t>(id) >= vocab) {
    fail(ErrorCode::invalid_argument,
         str("token id ", id, " is outside the vocabulary of ", vocab, " tokens"));
  }
}

// An exponent of all ones is what NaN and infinity share; the first loop vectorises.
void check_finite(std::span<const float> logits) {
  constexpr std::uint32_t exponent = 0x7f800000u;
  bool bad = false;
  for (const float x : logits) bad |= (std::bit_cast<std::uint32_t>(x) & exponent) == exponent;
  if (!bad) return;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      fail(ErrorCode::numeric, str("the logit of token ", i, " of ", logits.size(), " is ",
                                   logits[i], "; a sampler needs finite logits"));
    }
  }
}

// The first k of `logits` in the order of before(), sorted. One pass that keeps at most 2k.
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

}  // namespace

void validate(const SamplingParams& p) {
  constexpr double most = std::numeric_limits<float>::max();
  check_range("temperature", p.temperature, 0.0, most);
  check_range("top_k", p.top_k, 0, std::numeric_limits<std::int32_t>::max());
  check_range("top_p", p.top_p, 0.0, 1.0);
  check_range("min_p", p.min_p, 0.0, 1.0);
  check_range("repetition_penalty", p.repetition_penalty, std::numeric_limits<float>::min(), most);
  check_range("presence_penalty", p.presence_penalty, -most, most);
  check_range("frequency_penalty", p.frequency_penalty, -most, most);
  check_range("penalty_last_n", p.penalty_last_n, -1, std::numeric_limits<std::int32_t>::max());
}

std::uint64_t Rng::next() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Sampler::Sampler(SamplingParams params) : params_(std::move(params)), rng_(params_.seed) {
  validate(params_);
}

Sampler Sampler::fork() const {
  Sampler copy(params_);
  copy.rng_ = rng_;
  return copy;
}

std::span<const float> Sampler::adjust(std::span<const float> logits,
                                       std::span<const std::int32_t> recent) {
  const SamplingParams& p = params_;
  const bool penalise =
      p.penalty_last_n != 0 && !recent.empty() &&
      (p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f);
  if (!penalise && p.suppress.empty()) return logits;
  adjusted_.assign(logits.begin(), logits.end());
  if (penalise) {
    if (p.penalty_last_n > 0) {
      recent = recent.last(std::min(recent.size(), static_cast<std::size_t>(p.penalty_last_n)));
    }
    seen_.assign(recent.begin(), recent.end());
    std::sort(seen_.begin(), seen_.end());
    for (std::size_t i = 0, next = 0; i < seen_.size(); i = next) {
      while (next < seen_.size() && seen_[next] == seen_[i]) ++next;
      check_token(seen_[i], logits.size());
      float& x = adjusted_[static_cast<std::size_t>(seen_[i])];
      x = x > 0.0f ? x / p.repetition_penalty : x * p.repetition_penalty;
      x -= static_cast<float>(next - i) * p.frequency_penalty + p.presence_penalty;
      if (!std::isfinite(x)) {
        fail(ErrorCode::numeric, str("the penalties make the logit of token ", seen_[i], " ", x,
                                     " (from ", logits[static_cast<std::size_t>(seen_[i])], ")"));
      }
    }
  }
  for (const std::int32_t id : p.suppress) {
    check_token(id, logits.size());
    adjusted_[static_cast<std::size_t>(id)] = suppressed;
  }
  return adjusted_;
}

void Sampler::keep_top_p(std::span<const float> logits, float max_logit) {
  double total = 0.0;
  for (const float x : logits) total += std::exp(static_cast<double>(x - max_logit));
  for (std::size_t k = first_top_p_prefix;; k *= prefix_growth) {
    select_top(logits, k, kept_);
    if (cut_top_p(kept_, params_.top_p, total, max_logit) || k >= logits.size()) return;
  }
}

std::int32_t Sampler::draw() {
  const double max_logit = std::max_element(kept_.begin(), kept_.end(), [](auto& a, auto& b) {
                             return a.logit < b.logit;
                           })->logit;
  const auto weight = [&](const Candidate& c) {
    return std::exp((c.logit - max_logit) / params_.temperature);
  };
  double total = 0.0;
  for (const Candidate& c : kept_) total += weight(c);
  const double target = rng_.uniform() * total;
  double sum = 0.0;
  for (const Candidate& c : kept_) {
    sum += weight(c);
    if (sum > target) return c.id;
  }
  return kept_.front().id;  // target was rounded up to total
}

std::int32_t Sampler::sample(std::span<const float> logits, std::span<const std::int32_t> recent) {
  if (logits.empty()) fail(ErrorCode::invalid_argument, "there are no logits to sample from");
  check_finite(logits);
  logits = adjust(logits, recent);
  const auto best = std::max_element(logits.begin(), logits.end());
  const float max_logit = *best;
  if (max_logit == suppressed) {
    fail(ErrorCode::invalid_argument, str("all ", logits.size(), " tokens are suppressed"));
  }
  if (params_.temperature == 0.0f) {
    kept_.assign(1, {max_logit, static_cast<std::int32_t>(best - logits.begin())});
    return kept_.front().id;
  }

  const float min_logit = params_.min_p > 0.0f ? max_logit + std::log(params_.min_p) : suppressed;
  const auto too_small = [&](const Candidate& c) { return c.logit < min_logit; };
  if (params_.top_k > 0) {
    select_top(logits, static_cast<std::size_t>(params_.top_k), kept_);
    if (params_.top_p < 1.0f) {
      double total = 0.0;
      for (const Candidate& c : kept_) total += std::exp(static_cast<double>(c.logit - max_logit));
      cut_top_p(kept_, params_.top_p, total, max_logit);
    }
  } else if (params_.top_p < 1.0f) {
    keep_top_p(logits, max_logit);
  } else {
    kept_.clear();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const Candidate c{logits[i], static_cast<std::int32_t>(i)};
      if (c.logit != suppressed && !too_small(c)) kept_.push_back(c);
    }
    if (params_.min_p > 0.0f) std::sort(kept_.begin(), kept_.end(), before);
  }
  std::erase_if(kept_, too_small);
  return draw();
}

LogProbs log_probs(std::span<const float> logits, std::int32_t token, std::int32_t top) {
  check_token(token, logits.size());
  check_range("the number of log-probabilities", top, 0, static_cast<double>(logits.size()));
  check_finite(logits);
  const double max_logit = *std::max_element(logits.begin(), logits.end());
  double total = 0.0;
  for (const float x : logits) total += std::exp(x - max_logit);
  const double log_total = max_logit + std::log(total);
  LogProbs out{logits[static_cast<std::size_t>(token)] - log_total, {}};
  select_top(logits, static_cast<std::size_t>(top), out.top);
  for (Candidate& c : out.top) c.logit = static_cast<float>(c.logit - log_total);
  return out;
}

}  // namespace imp::runtime
