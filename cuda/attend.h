// What the attention kernels share: their arguments, and which keys a token sees.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/common/cells.cuh"
#include "cuda/context.h"

namespace imp::cuda {

struct AttendArgs {
  StepView step;
  const float *q, *qg;  // [T, heads * dim], [T, heads * 2 dim]
  Cells keys, values;
  const std::int32_t* selected;  // [T, blocks], or absent
  float *parts, *sums;           // [rows of this launch, heads, slots, dim], [.., .., slots, 2]
  float* y;
  std::int64_t first_row;  // of this launch
  int heads, kv_heads, dim, ratio, blocks;
  int slots;  // that the blocks of a token write sums to
  float scale;
};

#ifdef __CUDACC__

// The keys that a token sees: all up to itself, or the selected blocks and the incomplete last one.
struct Visible {
  const std::int32_t* selected = nullptr;
  int count = 0, all = 0;
  int in_blocks = 0;
  unsigned ratio;

  __device__ Visible(const AttendArgs& a, const ChunkView& chunk, std::int64_t t)
      : ratio(static_cast<unsigned>(a.ratio)) {
    all = chunk.position + (static_cast<int>(t) - chunk.row) + 1;
    count = all;
    if (a.selected == nullptr || a.selected[t * a.blocks] < 0) return;
    selected = a.selected + t * a.blocks;
    in_blocks = a.blocks * a.ratio;
    count = in_blocks + all % a.ratio;
  }
  __device__ int position(int i) const {
    if (selected == nullptr) return i;
    const unsigned u = static_cast<unsigned>(i);
    return i < in_blocks
               ? selected[u / ratio] * static_cast<int>(ratio) + static_cast<int>(u % ratio)
               : all - (count - i);
  }
};

// A softmax in the making: parts are added in order, by whichever kernel holds them, bit for bit
// the same; adding to nothing changes no bit. The weighted sum of values goes through `values`.
struct Running {
  float top, total;
  float keep, add;  // what the last step multiplied the old and the new sum by

  __device__ static Running nothing() { return {-INFINITY, 0, 0, 0}; }
  __device__ void step(float part_top, float part_total) {
    const float next = fmaxf(top, part_top);
    keep = expf(top - next);
    add = expf(part_top - next);
    total = fmaf(part_total, add, __fmul_rn(total, keep));
    top = next;
  }
  __device__ float values(float old, float part) const {
    return fmaf(part, add, __fmul_rn(old, keep));
  }
};

#endif

// Heads of this size, at most so many on a KV head, on tensor cores. The arguments' slots, parts,
// sums and first_row are set inside.
inline constexpr int attend_mma_dim = 256, attend_mma_heads = 12;
std::size_t attend_mma_scratch_bytes(std::int64_t rows, std::int64_t heads);
void attend_mma(AttendArgs, std::int64_t rows, std::byte* scratch, cudaStream_t);

}  // namespace imp::cuda
