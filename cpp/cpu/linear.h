// Splits a matrix product into tasks: blocks of weight rows times blocks of activation rows.
#pragma once

#include "cpp/cpu/context.h"

namespace imp::cpu {

struct Tiling {
  std::int64_t n_block, t_block, n_blocks, t_blocks;
  std::int64_t tasks() const { return n_blocks * t_blocks; }
};

inline constexpr std::int64_t max_rows_per_task = 96;  // activation rows

// Enough tasks to balance the threads, not so many that the counter matters.
Tiling tile(std::int64_t n, std::int64_t k, std::int64_t rows, int threads);

}  // namespace imp::cpu
