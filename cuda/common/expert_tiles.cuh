// What the kernels of NVFP4 experts on tensor cores share. Weights stream through rings of stages
// in shared memory and become bf16 in registers; activations are sums of two bf16 (hi, lo). Up to 4
// slots share a product: their hi are its columns 0..3, their lo 4..7. A slot's bits depend neither
// on its neighbours nor on their number.
#pragma once

#include "cuda/check.h"
#include "cuda/common/bulk.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nvfp4_tiles.cuh"
#include "cuda/moe.h"

namespace imp::cuda {

namespace tiles = nvfp4_tiles;

// ---------------------------------------------------------------- activations

// A row of bf16 in shared memory, 8 numbers a word of 16 bytes: word 4w + c of a tile holds columns
// 32c + 8w .. + 7, so that lanes c read side by side. Rows are half a line off each other.
__host__ __device__ constexpr int row_words(int cols) { return cols / 8 + 4; }
__device__ __forceinline__ int word_of(int unit) {  // unit: columns 8 unit .. + 7
  return (unit & ~15) | (unit & 3) << 2 | (unit >> 2 & 3);
}

// Writes hi and lo of x[0 .. cols); threads `first` of `step` share the work. A thread has some
// loads on their way at a time and calls ready() before it writes.
template <int Ahead, class Ready>
__device__ __forceinline__ void stage(const float* x, int cols, uint4* hi, uint4* lo, int first,
                                      int step, Ready ready) {
  const auto* from = reinterpret_cast<const float4*>(x);
  const int units = cols / 8;
#pragma unroll 1
  for (int base = first; base < units; base += Ahead * step) {
    float4 v[Ahead][2];
#pragma unroll
    for (int i = 0; i < Ahead; ++i)
      if (const int u = base + i * step; u < units)
        v[i][0] = from[2 * u], v[i][1] = from[2 * u + 1];
    ready();
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      const int u = base + i * step;
      if (u >= units) break;
      const float4 a = v[i][0], b = v[i][1];
      const SplitPair p[4] = {split_pair(a.x, a.y), split_pair(a.z, a.w), split_pair(b.x, b.y),
                              split_pair(b.z, b.w)};
      hi[word_of(u)] = make_uint4(p[0].hi, p[1].hi, p[2].hi, p[3].hi);
      lo[word_of(u)] = make_uint4(p[0].lo, p[1].lo, p[2].lo, p[3].lo);
    }
  }
}

// A lane's view of its column g: hi rows first, then lo rows, `n` of each. Columns of no slot
// repeat another; nobody reads their results.
struct Column {
  const uint4* row;
  __device__ __forceinline__ Column(const uint4* rows, int n, int words) {
    const int g = lane_id() / 4, slot = min(g % tile_slots, n - 1);
    row = rows + (g < tile_slots ? slot : n + slot) * words + lane_id() % 4;
  }
  __device__ __forceinline__ uint4 word(int tile, int w) const { return row[16 * tile + 4 * w]; }
};

// ---------------------------------------------------------------- products

inline constexpr int stage_tiles = 5;  // pairs of tiles that a warp multiplies at a time
inline constexpr int product_rows = 2 * tiles::rows;

// sums += two tiles, one above the other, times tile t of x.
__device__ __forceinline__ void add_pair(const std::byte* codes, const std::byte* scales,
                                         int to_lower, const Column& x, int t,
                                         float (&sums)[2][4]) {
  const auto code = [&](int tile) {
    return reinterpret_cast<const uint4*>(codes + tile * tiles::code_bytes)[lane_id()];
  };
  const auto scale = [&](int tile) -> std::uint32_t {
    return reinterpret_cast<const std::uint16_t*>(scales + tile * tiles::scale_bytes)[lane_id()];
  };
  uint4 words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = x.word(t, w);
  const tiles::Pair pair{code(0), code(to_lower), scale(0), scale(to_lower)};
  tiles::each_product(pair, [&](const std::uint32_t (&a)[4], int w, int j) {
    const uint4& b = words[w];
    if (j == 0)
      mma_bf16(sums[0], a, {b.x, b.y});
    else
      mma_bf16(sums[1], a, {b.z, b.w});
  });
}

// The same for n <= stage_tiles pairs that adjoin. Two sums, so that products need not wait for
// each other.
__device__ __forceinline__ void add_pairs(const std::byte* codes, const std::byte* scales,
                                          int to_lower, const Column& x, int t, int n,
                                          float (&sums)[2][4]) {
  const auto add = [&](int i) {
    add_pair(codes + i * tiles::code_bytes, scales + i * tiles::scale_bytes, to_lower, x, t + i,
             sums);
  };
  if (n == stage_tiles) {
#pragma unroll
    for (int i = 0; i < stage_tiles; ++i) add(i);
  } else {
#pragma unroll 1
    for (int i = 0; i < n; ++i) add(i);
  }
}

__device__ __forceinline__ void join_sums(const float (&sums)[2][4], float (&acc)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = sums[0][i] + sums[1][i];
}

// hi + lo: lanes c < 2 get row g of slots 2c, 2c + 1, then row g + 8.
__device__ __forceinline__ void join(float (&acc)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] += __shfl_xor_sync(all_lanes, acc[i], 2);
}

// ---------------------------------------------------------------- barriers

// One arrival of a warp, of all that its lanes did.
__device__ __forceinline__ void warp_arrive(Barrier* b) {
  __syncwarp();
  if (lane_id() == 0) arrive(b);
}

// ---------------------------------------------------------------- launches

// Shared memory beyond what a kernel may take without asking.
template <class... Arguments>
void allow_shared(void (*kernel)(Arguments...), std::size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

}  // namespace imp::cuda
