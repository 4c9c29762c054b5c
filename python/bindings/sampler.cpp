// Binds cpp/runtime/sampler.h.
#include "cpp/runtime/sampler.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "python/bindings/bindings.h"

namespace {

using imp::runtime::LogProbs;
using imp::runtime::Sampler;
using imp::runtime::SamplingParams;
using Logits = nb::ndarray<const float, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const std::int32_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

std::span<const float> view(const Logits& a) { return {a.data(), a.size()}; }
std::span<const std::int32_t> view(const Tokens& a) { return {a.data(), a.size()}; }

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<imp::Draw>(m, "Draw", "How a step chooses a token by itself.");
  nb::class_<Sampler>(m, "Sampler", "Logits of one sequence in, one token out.")
      .def(
          "__init__",
          [](Sampler* self, float temperature, std::int32_t top_k, float top_p, float min_p,
             float repetition_penalty, float presence_penalty, float frequency_penalty,
             std::int32_t penalty_last_n, std::uint64_t seed, std::vector<std::int32_t> suppress) {
            new (self) Sampler(SamplingParams{temperature, top_k, top_p, min_p, repetition_penalty,
                                              presence_penalty, frequency_penalty, penalty_last_n,
                                              seed, std::move(suppress)});
          },
          nb::kw_only(), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
          nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("presence_penalty"),
          nb::arg("frequency_penalty"), nb::arg("penalty_last_n"), nb::arg("seed"),
          nb::arg("suppress"))
      .def(
          "sample",
          [](Sampler& self, const Logits& logits, const Tokens& recent) {
            return self.sample(view(logits), view(recent));
          },
          nb::arg("logits").noconvert(), nb::arg("recent").noconvert(),
          "logits: float32 [vocab]; recent: int32 [n], the sequence so far, oldest first.")
      .def(
          "candidates",
          [](const Sampler& self) {
            std::vector<std::int32_t> ids;
            for (const auto& c : self.candidates()) ids.push_back(c.id);
            return ids;
          },
          "Ids that the last call of sample() could have chosen.")
      .def("next", &Sampler::next,
           "For Session.choose(): what sample() would do; None if that takes more than the logits.")
      .def("chosen", &Sampler::chosen, "A step chose a token by next().")
      .def("fork", &Sampler::fork,
           "The same parameters and random state, independent from here on.")
      .def_prop_ro("rng_state", [](Sampler& self) { return self.rng().state(); });

  m.def(
      "log_probs",
      [](const Logits& logits, std::int32_t token, std::int32_t top) {
        const LogProbs result = imp::runtime::log_probs(view(logits), token, top);
        std::vector<std::pair<std::int32_t, float>> pairs;
        for (const auto& c : result.top) pairs.emplace_back(c.id, c.logit);
        return std::pair(result.token, std::move(pairs));
      },
      nb::arg("logits").noconvert(), nb::arg("token"), nb::arg("top"),
      "Natural log-probability of `token` and the `top` likeliest (id, log-probability) pairs.");
}
