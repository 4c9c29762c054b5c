// What the kernels of ResidualRead share: one call's arguments.
#pragma once

#include <cstdint>

#include "cuda/context.h"

namespace imp::cuda {

inline constexpr int read_streams = 4;

struct ReadArgs {
  float* r;                // [T, streams * hidden]
  const float *y, *s, *w;  // [T, hidden], [T, streams], [streams * hidden]
  Matrix down, inject, up;
  float *low, *next_s, *factors, *x;  // [T, low rank], [T, streams] twice, [T, hidden]
  int rows, hidden;
  float eps;
};

// Defined in residual_read_rows.cu: a few rows on tensor cores. With more of them norms of their
// own and the large maps are faster; the gains of half a stream fit beside the sums in 48 KiB.
inline constexpr int most_read_rows = 16, most_read_hidden = 16384;
bool has_read_rows(const ReadArgs&);
void run_read_rows(const ReadArgs&, cudaStream_t);

}  // namespace imp::cuda
