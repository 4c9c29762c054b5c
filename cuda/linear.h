// What the kernels of linear maps share: one call's arguments.
#pragma once

#include <cstdint>

#include "cpp/ops/linear.h"
#include "cuda/context.h"

namespace imp::cuda {

struct LinearPart {
  Matrix w;
  float* y;  // [T, w.rows]
  float alpha;
  Act act;
  int first_block;  // of its row blocks in the grid
  int split;        // without tensor cores: warps that share a group of weight rows
};

struct LinearArgs {
  const float* x;  // [T, cols of all parts]
  std::int64_t rows;
  int token_groups, n_parts;
  LinearPart parts[max_linear_parts];
};

// Defined in linear_mma.cu: weights on tensor cores.
bool has_mma(const Matrix&);
void run_mma(const LinearArgs&, cudaStream_t);
// Defined in linear_skinny.cu: the same without shared memory, for few rows and for more formats.
bool has_skinny(const Matrix&);
void run_skinny(const LinearArgs&, cudaStream_t);
// Of weights that both know: long rows are for clusters, which share the columns.
inline constexpr std::int64_t most_skinny_rows = 16, most_skinny_cols = 4096;

// Whether an op of so many rows takes tensor cores: one row is a matter of memory alone.
inline bool on_tensor_cores(const Matrix& w, std::int64_t rows, const Context& c) {
  return (has_mma(w) || has_skinny(w)) && (rows > 1 || c.batch_invariant);
}
inline bool takes_skinny(const Matrix& w, std::int64_t rows, const Context& c) {
  const bool few = rows <= most_skinny_rows && w.cols <= most_skinny_cols && !c.batch_invariant;
  return on_tensor_cores(w, rows, c) && has_skinny(w) && (few || !has_mma(w));
}
// Defined in linear.cu: any number of rows, each in the order of one row alone.
void run_matvec(const Linear&, const Context&);

// x = 1/4 sum_s sigmoid(scale * low w_s^T) n_s; w_s: rows [s * hidden, (s + 1) * hidden)
inline constexpr int mix_streams = 4;
struct MixArgs {
  Matrix w;
  const float *low, *n;  // [T, w.cols], [T, streams * hidden]
  float* x;              // [T, hidden]
  std::int64_t rows, hidden;
};
void run_mma(const MixArgs&, cudaStream_t);

// Defined in linear_large.cu: maps of so many rows and more that have kernels for them or that
// cuBLASLt takes, where there is one. They return what is left over, and whether they took the map.
inline constexpr std::int64_t least_large_rows = most_skinny_rows + 1;
LinearArgs run_large(const LinearArgs&, const Context&);
bool run_large(const MixArgs&, const Context&);

// Defined in linear_wgmma.cu: many outputs of up to so many rows, where the device has products of
// warp groups. `halves`: hi of all rows, then lo [2, rows, cols]. Maps of one call are those whose
// weights lie one after the other.
inline constexpr int most_wgmma_rows = 128;
bool has_wgmma(std::int64_t outputs, std::int64_t rows);
bool has_wgmma(const MixArgs&);
void run_wgmma(const LinearArgs&, const std::byte* halves, cudaStream_t);
void run_wgmma(const MixArgs&, const std::byte* halves, cudaStream_t);

}  // namespace imp::cuda
