// The sampler: logits of one sequence in, one token out. Deterministic for a seed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpp/cpu/sample.h"

namespace imp::runtime {

// Order of application: suppress, penalties, top_k, top_p, min_p, temperature, draw. top_p and
// min_p look at the probabilities before temperature.
struct SamplingParams {
  float temperature = 0.8f;         // 0 = greedy
  std::int32_t top_k = 40;          // 0 = off
  float top_p = 0.95f;              // 1 = off
  float min_p = 0.05f;              // 0 = off; relative to the most probable token
  float repetition_penalty = 1.0f;  // 1 = off; positive logits are divided by it, others multiplied
  float presence_penalty = 0.0f;    // subtracted once from a token that occurred
  float frequency_penalty = 0.0f;   // subtracted for each occurrence
  std::int32_t penalty_last_n = 64;  // tokens that the penalties look back; -1 = all, 0 = none
  std::uint64_t seed = 0;
  std::vector<std::int32_t> suppress;  // ids that are never chosen
};

// Fails (invalid_argument) naming the parameter, its value and the range.
void validate(const SamplingParams& params);

// splitmix64: 64 bits of state, the same stream on every platform, copied by value.
class Rng {
 public:
  explicit Rng(std::uint64_t state) : state_(state) {}
  std::uint64_t next();
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }  // [0, 1)
  std::uint64_t state() const { return state_; }

 private:
  std::uint64_t state_;
};

using cpu::Candidate;

class Sampler {
 public:
  explicit Sampler(SamplingParams params);

  // logits: [vocab], finite; recent: the sequence so far, oldest first. Draws once per call unless
  // greedy. Ties go to the lower id. Fails (numeric) on a NaN or infinite logit, naming its id.
  std::int32_t sample(std::span<const float> logits, std::span<const std::int32_t> recent);

  // For a step that chooses the next token itself, as sample() would; absent if that takes more
  // than the logits: penalties, or more than Draw::max_suppressed ids.
  std::optional<Draw> next() const;
  // It did: the random number is used up.
  void chosen();

  // The tokens the last sample() could have chosen; in order of falling logit (then rising id) if
  // any of top_k, top_p, min_p was on.
  std::span<const Candidate> candidates() const { return kept_; }

  // The same parameters and random state, independent from here on.
  Sampler fork() const;

  const SamplingParams& params() const { return params_; }
  Rng& rng() { return rng_; }

 private:
  std::span<const float> adjust(std::span<const float> logits,
                                std::span<const std::int32_t> recent);
  bool penalises() const;
  Draw draw() const;

  SamplingParams params_;
  Rng rng_;
  std::vector<float> adjusted_;     // scratch: [vocab]
  std::vector<std::int32_t> seen_;  // scratch: [penalty_last_n]
  std::vector<Candidate> kept_;     // scratch: what survives the filters
};

// Log-probabilities (natural, of the unmodified logits) of one token and of the `top` likeliest.
struct LogProbs {
  double token;
  std::vector<Candidate> top;  // logit holds the log-probability; falling
};
LogProbs log_probs(std::span<const float> logits, std::int32_t token, std::int32_t top);

}  // namespace imp::runtime
