// What one sequence owns besides its cache pages: one row of floats, and where each layer's part
// starts in it.
#pragma once

#include <cstdint>
#include <vector>

#include "cpp/model/hparams.h"

namespace imp {

struct StateLayout {
  std::int64_t floats = 0;
  std::vector<std::int64_t>
      delta;  // [layers] S [value_heads, key_dim, value_dim] of delta-net layers, else -1
  std::vector<std::int64_t> conv;   // [layers] last inputs of the convolution, else -1
  std::vector<std::int64_t> index;  // [layers] raw index keys of the incomplete block, else -1
  std::vector<std::int64_t> ngram;  // [n-gram layers] last inputs of the dilated convolution
  std::vector<std::int64_t> cache;  // [layers] index among the attention layers' caches, else -1
  std::int64_t attention_layers = 0;
};

StateLayout state_layout(const HParams&);

// Tokens of a cache page: the smallest multiple of the index block that is at least this.
inline constexpr std::int64_t min_page_tokens = 16;
std::int64_t page_tokens(const HParams&);

}  // namespace imp
