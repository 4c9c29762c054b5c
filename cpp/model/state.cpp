// Layout of a state row. Parts are padded to 64 bytes.
#include "cpp/model/state.h"

namespace imp {

StateLayout state_layout(const HParams& h) {
  StateLayout s;
  const auto take = [&s](std::int64_t floats) {
    const std::int64_t at = s.floats;
    s.floats += (floats + 15) / 16 * 16;
    return at;
  };
  const DeltaNet& d = h.delta;
  for (std::int64_t l = 0; l < h.layers; ++l) {
    const bool recurrent = h.recurrent[static_cast<std::size_t>(l)];
    s.delta.push_back(recurrent ? take(d.value_heads * d.key_dim * d.value_dim) : -1);
    s.conv.push_back(recurrent ? take((d.conv_kernel - 1) * d.channels()) : -1);
    const auto& indexer = h.attention.indexer;
    s.index.push_back(!recurrent && indexer ? take(indexer->ratio * indexer->key_dim) : -1);
    s.cache.push_back(recurrent ? -1 : s.attention_layers++);
  }
  if (h.ngram)
    for (std::size_t i = 0; i < h.ngram->layers.size(); ++i)
      s.ngram.push_back(take(h.ngram->conv_history() * h.wide()));
  if (s.floats == 0) take(1);
  return s;
}

std::int64_t page_tokens(const HParams& h) {
  const std::int64_t ratio = h.attention.indexer ? h.attention.indexer->ratio : 1;
  return (min_page_tokens + ratio - 1) / ratio * ratio;
}

}  // namespace imp
