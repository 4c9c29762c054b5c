// The sampler: penalties and suppressed ids, then what the Sample op does.
#include "cpp/runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "cpp/core/error.h"

namespace imp::runtime {
namespace {

constexpr float suppressed = -std::numeric_limits<float>::infinity();

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

void check_finite(std::span<const float> logits) {
  const std::int64_t i = cpu::first_not_finite(logits);
  if (i >= 0)
    fail(ErrorCode::numeric,
         str("the logit of token ", i, " of ", logits.size(), " is ",
             logits[static_cast<std::size_t>(i)], "; a sampler needs finite logits"));
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

bool Sampler::penalises() const {
  const SamplingParams& p = params_;
  return p.penalty_last_n != 0 && (p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f ||
                                   p.frequency_penalty != 0.0f);
}

std::span<const float> Sampler::adjust(std::span<const float> logits,
                                       std::span<const std::int32_t> recent) {
  const SamplingParams& p = params_;
  const bool penalise = penalises() && !recent.empty();
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

Draw Sampler::draw() const {
  Draw d;
  d.temperature = params_.temperature;
  d.top_k = params_.top_k;
  d.top_p = params_.top_p;
  d.log_min_p = std::log(params_.min_p);
  d.uniform = Rng(rng_).uniform();
  return d;
}

void Sampler::chosen() {
  if (params_.temperature > 0.0f) rng_.next();
}

std::optional<Draw> Sampler::next() const {
  if (penalises() || params_.suppress.size() > Draw::max_suppressed) return std::nullopt;
  Draw d = draw();
  std::ranges::copy(params_.suppress, d.suppressed);
  return d;
}

std::int32_t Sampler::sample(std::span<const float> logits, std::span<const std::int32_t> recent) {
  if (logits.empty()) fail(ErrorCode::invalid_argument, "there are no logits to sample from");
  check_finite(logits);
  const std::int32_t id = cpu::choose(adjust(logits, recent), draw(), kept_);
  if (id < 0)
    fail(ErrorCode::invalid_argument, str("all ", logits.size(), " tokens are suppressed"));
  chosen();
  return id;
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
  cpu::select_top(logits, static_cast<std::size_t>(top), out.top);
  for (Candidate& c : out.top) c.logit = static_cast<float>(c.logit - log_total);
  return out;
}

}  // namespace imp::runtime
