// Everything that sequences own, in pools: cache pages of the attention layers and state rows of
// all the rest. A sequence's pages and row are created, forked and freed together.
#pragma once

#include <cstdint>
#include <expected>
#include <vector>

#include "cpp/memory/page_pool.h"
#include "cpp/model/state.h"
#include "cpp/ops/step.h"
#include "cpp/runtime/backend.h"

namespace imp {

struct SequenceState {
  std::vector<std::int32_t> pages;
  std::int32_t row = -1;
};

// Bytes of `sequences` sequences of `context` tokens each.
struct MemoryCost {
  std::int64_t page_bytes = 0;
  std::int64_t row_bytes = 0;
  std::int64_t pages(std::int64_t context, std::int64_t page_tokens) const {
    return (context + page_tokens - 1) / page_tokens;
  }
};
// Fails (unsupported) if the model's heads cannot be stored as `types`.
MemoryCost memory_cost(const HParams&, CacheTypes types);

class SequenceMemory {
 public:
  // Room for `rows` sequences, with `kept` more state rows each for the owner's checkpoints.
  // `poison` fills freed and fresh memory with NaN, so that a read of what nobody wrote shows.
  SequenceMemory(Backend& backend, const HParams& h, CacheTypes types, std::int64_t pages,
                 std::int64_t rows, bool poison, std::int64_t kept = 0);

  const StepMemory& step() const { return step_; }
  const StateLayout& layout() const { return layout_; }
  std::int64_t page_tokens() const { return step_.page_tokens; }
  const PagePool& page_pool() const { return pages_; }
  const PagePool& row_pool() const { return rows_; }

  // A sequence of no tokens: zero state.
  std::expected<SequenceState, Shortage> open();
  // Shares full pages, copies the row. The copies diverge when either grows (see reserve).
  std::expected<SequenceState, Shortage> fork(const SequenceState&);
  // Makes room for tokens [length, end): new pages, and own copies of shared pages that will be
  // written.
  std::expected<void, Shortage> reserve(SequenceState&, std::int64_t length, std::int64_t end);
  // Gives back the pages behind the first `length` tokens.
  void drop_pages(SequenceState&, std::int64_t length);
  void close(SequenceState&);

  // State rows: a sequence's own, and checkpoint `i` of it.
  std::int64_t kept_row(const SequenceState& s, int i) const {
    return rows_.size() + s.row * kept_ + i;
  }
  void copy_row(std::int64_t to, std::int64_t from);
  void clear_row(std::int64_t row);

  // A sequence of `length` tokens as bytes on the host: its row, then its pages whole, each page
  // layer by layer (keys, values, block keys).
  std::size_t saved_bytes(std::int64_t length) const;
  void save(const SequenceState&, std::int64_t length, std::byte* out);
  std::expected<SequenceState, Shortage> load(std::int64_t length, const std::byte* saved);

 private:
  void poison_page(std::int32_t page);
  void copy_page(std::int32_t to, std::int32_t from);
  std::int64_t pages_for(std::int64_t tokens) const {
    return (tokens + page_tokens() - 1) / page_tokens();
  }
  // Calls f(pointer, bytes) for each part of a page.
  template <class F>
  void each_part(std::int32_t page, F f) const;

  Backend& backend_;
  StateLayout layout_;
  bool poison_;
  std::int64_t kept_;                            // checkpoint rows of a sequence
  std::size_t k_bytes_, v_bytes_, index_bytes_;  // of one page of one layer
  std::vector<Block> blocks_;
  StepMemory step_;
  PagePool pages_;
  PagePool rows_;
};

}  // namespace imp
