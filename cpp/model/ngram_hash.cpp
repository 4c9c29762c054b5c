// The hash of the n-gram block.
#include "cpp/model/ngram_hash.h"

#include <array>

namespace imp {

void ngram_rows(const Ngram& n, const NgramLayer& layer, std::span<const std::int32_t> history,
                std::size_t first, std::int32_t* rows) {
  std::array<std::uint64_t, max_ngram_size> mix{};  // mix[s]: over the token and the s before it
  for (std::size_t t = first; t < history.size(); ++t) {
    bool cut = false;
    for (std::int64_t s = 0; s < n.size; ++s) {
      std::int64_t token = history[t];
      if (s > 0) {  // a boundary token at t itself does not cut its own window
        const bool exists = t >= static_cast<std::size_t>(s);
        cut = cut || !exists || history[t - static_cast<std::size_t>(s)] == n.boundary_token;
        token = cut ? n.boundary_token : history[t - static_cast<std::size_t>(s)];
      }
      const auto i = static_cast<std::size_t>(s);
      mix[i] =
          (s > 0 ? mix[i - 1] : 0) ^ (static_cast<std::uint64_t>(token) * layer.multipliers[i]);
    }
    for (std::int64_t h = 0; h < n.heads(); ++h, ++rows) {
      const auto i = static_cast<std::size_t>(h);
      *rows = static_cast<std::int32_t>(mix[static_cast<std::size_t>(1 + h / n.heads_per_ngram)] %
                                            layer.vocab_sizes[i] +
                                        layer.offsets[i]);
    }
  }
}

}  // namespace imp
