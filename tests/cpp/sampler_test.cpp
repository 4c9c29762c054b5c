// Tests of the sampler: exact kept sets, ties, penalties, the random stream and the limits.
#include "cpp/runtime/sampler.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpp/core/error.h"

using imp::runtime::log_probs;
using imp::runtime::Rng;
using imp::runtime::Sampler;
using imp::runtime::SamplingParams;

namespace {

SamplingParams plain() {  // every filter off, temperature 1
  SamplingParams p;
  p.temperature = 1.0f;
  p.top_k = 0;
  p.top_p = 1.0f;
  p.min_p = 0.0f;
  return p;
}

std::vector<std::int32_t> kept(const SamplingParams& p, const std::vector<float>& logits,
                               const std::vector<std::int32_t>& recent = {}) {
  Sampler sampler(p);
  sampler.sample(logits, recent);
  std::vector<std::int32_t> ids;
  for (const auto& c : sampler.candidates()) ids.push_back(c.id);
  return ids;
}

std::string error_of(const SamplingParams& p, const std::vector<float>& logits,
                     const std::vector<std::int32_t>& recent = {}) {
  try {
    Sampler(p).sample(logits, recent);
  } catch (const imp::Error& e) {
    return e.what();
  }
  return "";
}

using Ids = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("the random stream is splitmix64") {
  Rng rng(0);  // published values for seed 0
  CHECK(rng.next() == 0xe220a8397b1dcdafu);
  CHECK(rng.next() == 0x6e789e6aa1b965f4u);
  CHECK(rng.next() == 0x06c45d188009454fu);
  Rng unit(42);
  for (int i = 0; i < 1000; ++i) {
    const double u = unit.uniform();
    CHECK((u >= 0.0 && u < 1.0));
  }
}

TEST_CASE("greedy takes the lowest id of equal maxima and draws nothing") {
  SamplingParams p = plain();
  p.temperature = 0.0f;
  p.seed = 7;
  Sampler sampler(p);
  CHECK(sampler.sample(std::vector<float>{1, 3, 3, 2}, {}) == 1);
  CHECK(sampler.rng().state() == 7);
}

TEST_CASE("top_k keeps exactly k, ties by id") {
  const std::vector<float> logits{1, 5, 3, 5, 3, 0};
  SamplingParams p = plain();
  p.top_k = 3;
  CHECK(kept(p, logits) == Ids{1, 3, 2});
  p.top_k = 1;
  CHECK(kept(p, logits) == Ids{1});
  p.top_k = 6;
  CHECK(kept(p, logits) == Ids{1, 3, 2, 4, 0, 5});
  p.top_k = 7;  // more than the vocabulary
  CHECK(kept(p, logits).size() == 6);
}

TEST_CASE("top_p keeps the token that crosses the sum") {
  // probabilities 0.5, 0.25, 0.125, 0.125
  const std::vector<float> logits{0.0f, std::log(0.5f), std::log(0.25f), std::log(0.25f)};
  SamplingParams p = plain();
  p.top_p = 0.49f;
  CHECK(kept(p, logits) == Ids{0});
  p.top_p = 0.51f;
  CHECK(kept(p, logits) == Ids{0, 1});
  p.top_p = 0.76f;
  CHECK(kept(p, logits) == Ids{0, 1, 2});
  p.top_p = 0.99f;
  CHECK(kept(p, logits).size() == 4);
  p.top_p = 0.0f;
  CHECK(kept(p, logits) == Ids{0});
  p.top_p = 0.6f;
  p.top_k = 2;  // of the two kept, the first has 2/3
  CHECK(kept(p, logits) == Ids{0});
}

TEST_CASE("top_p of a flat distribution needs more than the first prefix") {
  const std::vector<float> logits(5000, 0.25f);
  SamplingParams p = plain();
  p.top_p = 0.5f;
  const auto ids = kept(p, logits);
  CHECK(ids.size() == 2500);
  CHECK(ids.front() == 0);
  CHECK(ids.back() == 2499);
}

TEST_CASE("min_p is relative to the largest probability, before temperature") {
  const std::vector<float> logits{0.0f, std::log(0.5f), std::log(0.2f), std::log(0.01f)};
  SamplingParams p = plain();
  p.min_p = 0.19f;
  CHECK(kept(p, logits) == Ids{0, 1, 2});
  p.min_p = 0.21f;
  p.temperature = 100.0f;
  CHECK(kept(p, logits) == Ids{0, 1});
  p.min_p = 1.0f;
  CHECK(kept(p, logits) == Ids{0});
}

TEST_CASE("penalties change the winner, within the window only") {
  SamplingParams p = plain();
  p.temperature = 0.0f;
  const std::vector<float> logits{2.0f, 1.5f, -1.0f, -1.2f};
  CHECK(Sampler(p).sample(logits, Ids{0}) == 0);
  p.repetition_penalty = 2.0f;  // 2.0 / 2 < 1.5
  CHECK(Sampler(p).sample(logits, Ids{0}) == 1);
  p.penalty_last_n = 1;
  CHECK(Sampler(p).sample(logits, Ids{0, 3}) == 0);
  p.penalty_last_n = 2;
  CHECK(Sampler(p).sample(logits, Ids{0, 3}) == 1);
  p.penalty_last_n = -1;
  CHECK(Sampler(p).sample(logits, Ids{0, 3, 3, 3}) == 1);
  p.penalty_last_n = 0;
  CHECK(Sampler(p).sample(logits, Ids{0}) == 0);
  // a negative logit is multiplied: -1 * 2 < -1.2
  p.penalty_last_n = -1;
  CHECK(Sampler(p).sample(std::vector<float>{-1.0f, -1.2f}, Ids{0}) == 1);

  p.repetition_penalty = 1.0f;
  p.presence_penalty = 0.4f;  // once, however often it occurred
  CHECK(Sampler(p).sample(logits, Ids{0, 0, 0}) == 0);
  p.presence_penalty = 0.0f;
  p.frequency_penalty = 0.2f;  // three times
  CHECK(Sampler(p).sample(logits, Ids{0, 0, 0}) == 1);
}

TEST_CASE("suppressed tokens are never chosen") {
  SamplingParams p = plain();
  p.suppress = {0, 2};
  const std::vector<float> logits{9.0f, 1.0f, 9.0f, 0.0f};
  CHECK(kept(p, logits) == Ids{1, 3});
  p.top_k = 4;
  CHECK(kept(p, logits) == Ids{1, 3});
  p.temperature = 0.0f;
  CHECK(Sampler(p).sample(logits, {}) == 1);
  p.suppress = {0, 1, 2, 3};
  CHECK(error_of(p, logits) == "all 4 tokens are suppressed");
}

TEST_CASE("the same seed repeats, a fork continues alike and apart") {
  std::vector<float> logits(1000);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = std::sin(static_cast<float>(i));
  SamplingParams p = plain();
  p.seed = 11;
  Sampler a(p), b(p);
  for (int i = 0; i < 20; ++i) CHECK(a.sample(logits, {}) == b.sample(logits, {}));
  Sampler c = a.fork();
  const std::uint64_t state = a.rng().state();
  std::vector<std::int32_t> first, second;
  for (int i = 0; i < 20; ++i) first.push_back(c.sample(logits, {}));
  CHECK(a.rng().state() == state);
  for (int i = 0; i < 20; ++i) second.push_back(a.sample(logits, {}));
  CHECK(first == second);
  p.seed = 12;
  Sampler d(p);
  std::vector<std::int32_t> other;
  for (int i = 0; i < 20; ++i) other.push_back(d.sample(logits, {}));
  CHECK(other != first);
}

TEST_CASE("a logit that is not finite is an error that names it") {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, -inf, std::nanf("")}) {
    std::vector<float> logits(100, 0.0f);
    logits[77] = bad;
    CHECK(error_of(plain(), logits).find("token 77 of 100") != std::string::npos);
  }
  CHECK(error_of(plain(), {std::numeric_limits<float>::max(), 0.0f}) == "");
  SamplingParams p = plain();
  p.repetition_penalty = 10.0f;
  CHECK(error_of(p, {-std::numeric_limits<float>::max(), 0.0f}, {0}).find("penalties") !=
        std::string::npos);
  CHECK(error_of(plain(), {}) != "");
}

TEST_CASE("ids outside the vocabulary are errors with both numbers") {
  SamplingParams p = plain();
  p.presence_penalty = 1.0f;
  CHECK(error_of(p, {0, 0, 0}, {2}) == "");
  CHECK(error_of(p, {0, 0, 0}, {3}).find("3 is outside the vocabulary of 3") != std::string::npos);
  CHECK(error_of(p, {0, 0, 0}, {-1}) != "");
  p.suppress = {3};
  CHECK(error_of(p, {0, 0, 0}) != "");
}

TEST_CASE("parameters are checked at their limits") {
  const auto bad = [](auto member, auto value) {
    SamplingParams p;
    p.*member = value;
    try {
      validate(p);
    } catch (const imp::Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  using P = SamplingParams;
  const float nan = std::nanf("");
  CHECK(bad(&P::temperature, 0.0f) == "");
  CHECK(bad(&P::temperature, -0.1f).find("temperature") == 0);
  CHECK(bad(&P::temperature, nan) != "");
  CHECK(bad(&P::temperature, std::numeric_limits<float>::infinity()) != "");
  CHECK(bad(&P::top_k, 0) == "");
  CHECK(bad(&P::top_k, -1) != "");
  CHECK(bad(&P::top_p, 1.0f) == "");
  CHECK(bad(&P::top_p, 1.01f) == "top_p is 1.01, outside [0, 1]");
  CHECK(bad(&P::min_p, 0.0f) == "");
  CHECK(bad(&P::min_p, -0.01f) != "");
  CHECK(bad(&P::repetition_penalty, 0.0f) != "");
  CHECK(bad(&P::presence_penalty, nan) != "");
  CHECK(bad(&P::frequency_penalty, nan) != "");
  CHECK(bad(&P::penalty_last_n, -1) == "");
  CHECK(bad(&P::penalty_last_n, -2) != "");
}

TEST_CASE("log-probabilities") {
  const std::vector<float> logits{std::log(2.0f), std::log(5.0f), std::log(3.0f)};
  const auto result = log_probs(logits, 2, 2);
  CHECK(result.token == doctest::Approx(std::log(0.3)).epsilon(1e-6));
  REQUIRE(result.top.size() == 2);
  CHECK(result.top[0].id == 1);
  CHECK(result.top[0].logit == doctest::Approx(std::log(0.5)).epsilon(1e-6));
  CHECK(result.top[1].id == 2);
  CHECK_THROWS_AS(log_probs(logits, 3, 0), imp::Error);
  CHECK_THROWS_AS(log_probs(logits, 0, 4), imp::Error);
}
