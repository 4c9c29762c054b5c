// Causal convolutions look back past the start of a chunk, into the sequence's stored tail. One
// thread owns a channel of a chunk: it reads the old tail before it moves it.
#pragma once

#include <cstdint>

namespace imp::cuda {

struct Column {
  const float* rows;  // column of the chunk's first row
  float* tail;        // [history] rows before the chunk, oldest first
  std::int64_t stride;
  int history;

  // Element i of the chunk, or for i < 0 of the tail.
  __device__ float at(int i) const {
    return i >= 0 ? rows[i * stride] : tail[(history + i) * stride];
  }
  // Moves the tail forward over n rows.
  __device__ void advance(int n) const {
    for (int i = 0; i < history; ++i)
      tail[i * stride] =
          i + n < history ? tail[(i + n) * stride] : rows[(i + n - history) * stride];
  }
};

}  // namespace imp::cuda
