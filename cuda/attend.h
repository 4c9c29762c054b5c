// What the attention kernels share: their arguments, and which keys a token sees.
#pragma once

#include <cstdint>

#include "cuda/common/cells.cuh"
#include "cuda/context.h"

namespace imp::cuda {

struct AttendArgs {
  StepView step;
  const float *q, *qg;  // [T, heads * dim], [T, heads * 2 dim]
  Cells keys, values;
  const std::int32_t* selected;  // [T, blocks], or absent
  float *parts, *sums;           // [T, heads, n_blocks, dim], [T, heads, n_blocks, 2]
  float* y;
  int heads, kv_heads, dim, ratio, blocks;
  int n_blocks;  // that share a token's parts
  float scale;
};

#ifdef __CUDACC__

// The keys that a token sees: all up to itself, or the selected blocks and the incomplete last one.
struct Visible {
  const std::int32_t* selected = nullptr;
  std::int64_t count = 0, all = 0;
  std::int64_t in_blocks = 0;
  int ratio;

  __device__ Visible(const AttendArgs& a, const ChunkView& chunk, std::int64_t t) : ratio(a.ratio) {
    all = chunk.position + (t - chunk.row) + 1;
    count = all;
    if (a.selected == nullptr || a.selected[t * a.blocks] < 0) return;
    selected = a.selected + t * a.blocks;
    in_blocks = static_cast<std::int64_t>(a.blocks) * ratio;
    count = in_blocks + all % ratio;
  }
  __device__ std::int64_t position(std::int64_t i) const {
    if (selected == nullptr) return i;
    return i < in_blocks ? static_cast<std::int64_t>(selected[i / ratio]) * ratio + i % ratio
                         : all - all % ratio + (i - in_blocks);
  }
};

#endif

// Small steps of heads of this size, at most so many on a KV head; parts are attend_decode_parts.
inline constexpr int attend_decode_dim = 256, attend_decode_heads = 12, attend_decode_parts = 64;
void attend_decode(const AttendArgs&, std::int64_t rows, cudaStream_t);

}  // namespace imp::cuda
