// What changes from step to step: which tokens of which sequences run, and where their state lives.
// C++20-clean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpp/quant/quant.h"

namespace imp {

// Consecutive tokens of one sequence inside a step.
struct Chunk {
  std::int64_t row = 0;  // first row of the step
  std::int64_t rows = 0;
  std::int64_t position = 0;   // of the first token in its sequence
  std::int64_t state_row = 0;  // of the state cache
  const std::int32_t* pages =
      nullptr;  // page ids of the sequence, enough for position + rows tokens
};

// How the token after an output is chosen; see Sample.
struct Draw {
  static constexpr float by_host = -1;
  static constexpr std::size_t max_suppressed = 4;

  float temperature = by_host;                                 // 0 = greedy; by_host = not at all
  std::int32_t top_k = 0;                                      // 0 = off
  float top_p = 1;                                             // 1 = off
  float log_min_p = -std::numeric_limits<float>::infinity();   // -inf = off
  double uniform = 0;                                          // [0, 1)
  std::int32_t suppressed[max_suppressed] = {-1, -1, -1, -1};  // ids; -1 = none
};

// Rows behind the last chunk are padding, for backends that ask for it (BackendInfo::buckets): they
// repeat the first row's inputs, belong to no sequence, and nobody looks at their results.
struct StepInputs {
  std::vector<std::int32_t> tokens;                   // [rows]
  std::vector<std::int32_t> positions;                // [rows]
  std::vector<std::int32_t> outputs;                  // rows that want logits, ascending
  std::vector<Chunk> chunks;                          // cover all rows but padding, in order
  std::vector<Draw> draws;                            // [outputs], where the step has a Sample
  std::vector<std::vector<std::int32_t>> ngram_rows;  // per n-gram layer: [rows, heads] table rows
  std::vector<std::vector<std::int32_t>>
      expert_ids;  // per layer: [rows, k], where Route is planted

  const Chunk& chunk_of(std::int64_t row) const {
    std::size_t i = 0;
    while (row >= chunks[i].row + chunks[i].rows) ++i;
    return chunks[i];
  }
};

// How the cache stores keys and values. Block keys are fp32 whatever these are.
struct CacheTypes {
  DType k = DType::f32, v = DType::f32;
  friend bool operator==(CacheTypes, CacheTypes) = default;
};

// One attention layer's paged cache. Page p holds tokens p * page_tokens .. of its sequence.
struct KvLayer {
  std::byte* k = nullptr;  // [pages, page_tokens, kv_heads, head_dim], normed and rotated
  std::byte* v = nullptr;  // [pages, page_tokens, kv_heads, head_dim]
  float* index =
      nullptr;  // [pages, page_tokens / ratio, key_dim] finished block keys; absent without indexer
};

struct StepMemory {
  float* state = nullptr;         // [state rows, state_stride]
  std::int64_t state_stride = 0;  // floats
  std::int64_t page_tokens = 0;
  CacheTypes types;
  std::vector<KvLayer> kv;  // one per attention layer

  float* state_at(const Chunk& c, std::int64_t offset) const {
    return state + c.state_row * state_stride + offset;
  }
};

}  // namespace imp
