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
MemoryCost memory_cost(const HParams&);

class SequenceMemory {
 public:
  // `poison` fills freed and fresh memory with NaN, so that a read of what nobody wrote shows.
  SequenceMemory(Backend& backend, const HParams& h, std::int64_t pages, std::int64_t rows,
                 bool poison);

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
  void close(SequenceState&);

 private:
  void fill_page(std::int32_t page, float value);
  void copy_page(std::int32_t to, std::int32_t from);

  Backend& backend_;
  StateLayout layout_;
  bool poison_;
  std::int64_t kv_floats_ = 0;     // of one page of k (or v) of one layer
  std::int64_t index_floats_ = 0;  // of one page of block keys
  std::vector<Block> blocks_;
  StepMemory step_;
  PagePool pages_;
  PagePool rows_;
};

}  // namespace imp
