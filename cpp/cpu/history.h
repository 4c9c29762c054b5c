// Causal convolutions look back past the start of a chunk, into the sequence's stored tail.
#pragma once

#include <cstdint>
#include <cstring>

namespace imp::cpu {

// Row `i` of a chunk, or for i < 0 the tail's row (the tail holds the `history` rows before the
// chunk, oldest first).
inline const float* chunk_row(const float* rows, const float* tail, std::int64_t history,
                              std::int64_t cols, std::int64_t i) {
  return i >= 0 ? rows + i * cols : tail + (history + i) * cols;
}

// Moves the tail forward over `n` rows. A chunk shorter than the history shifts, it does not
// overwrite.
inline void advance_tail(const float* rows, float* tail, std::int64_t history, std::int64_t cols,
                         std::int64_t n) {
  const auto row_bytes = static_cast<std::size_t>(cols) * sizeof(float);
  const std::int64_t fresh = n < history ? n : history;
  const std::int64_t kept = history - fresh;
  std::memmove(tail, tail + fresh * cols, static_cast<std::size_t>(kept) * row_bytes);
  std::memcpy(tail + kept * cols, rows + (n - fresh) * cols,
              static_cast<std::size_t>(fresh) * row_bytes);
}

}  // namespace imp::cpu
