// What the kernels of the experts share: one call's arguments, and slots (token, rank) in tiles of
// the same expert, which reads its weights once a tile. A slot's bits do not depend on its tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/common/math.cuh"
#include "cuda/context.h"

namespace imp::cuda {

inline constexpr int tile_slots = 4;  // at most; more would leave fewer warps
// Tokens that are not grouped, every slot is its own tile, where grouping costs more than it saves.
inline constexpr std::int64_t direct_rows = 8;
inline constexpr std::int64_t most_experts = 8192;  // what a block counts in shared memory

struct Tile {
  std::int32_t expert, first, count;  // slots[first .. first + count)
};

struct Groups {
  std::int32_t* slots;    // [n] sorted by expert
  std::int32_t* n_tiles;  // [1]
  Tile* tiles;            // [most_tiles()]
};

inline std::int64_t most_tiles(std::int64_t slots, std::int64_t experts) {
  return (slots + (tile_slots - 1) * std::min(slots, experts)) / tile_slots + 1;
}
// Defined in moe_groups.cu. ids [n]
void group_slots(const std::int32_t* ids, std::int64_t n, std::int64_t experts, const Groups&,
                 cudaStream_t);

struct FfnArgs {
  Experts gate, up, down;
  const float* x;           // [T, hidden]
  const std::int32_t* ids;  // [slots]
  std::int64_t slots;
  Groups groups;  // of tiles; unused if every slot is a tile of its own
  int tiles;      // at most
  bool grouped;
  std::int32_t low, high;  // experts [low, high) of this call
  float *hidden, *y;       // [slots, ff], [slots, hidden]
  int k, n_blocks;
  bool gathers;  // a gather runs beside this call
  // The shared expert's hidden rows beside the others, and what is read next.
  const float *shared_gate, *shared_up;
  float* shared_hidden;
  std::int64_t shared_elements;  // [T * shared ff]; 0 = none
  const std::byte* shared_down;
  std::int64_t shared_down_bytes;

#ifdef __CUDACC__
  __device__ __forceinline__ Tile tile(int i) const {
    return grouped ? groups.tiles[i] : Tile{ids[i], i, 1};
  }
#endif
};

// Sum of a token's slots and its shared expert.
struct SumArgs {
  Experts down;
  Matrix shared_down;
  const std::int32_t* ids;  // [T * k]
  const float *hidden, *shared_hidden, *weights, *share;
  float* y;      // [T, hidden]
  int k, split;  // split: warps that a linear map has for a group of the shared rows
  int ahead;     // stages of a warp
};

// Defined in moe_mma.cu: NVFP4 experts on tensor cores.
bool has_mma(const FfnArgs&);
void run_mma(const FfnArgs&, cudaStream_t);     // y of every slot
void run_up_mma(const FfnArgs&, cudaStream_t);  // hidden of every slot
// Defined in moe_sum.cu.
bool has_sum_mma(const FfnArgs&, const SumArgs&);
void run_sum_mma(FfnArgs, SumArgs, cudaStream_t);  // without y of a slot

#ifdef __CUDACC__

__device__ __forceinline__ float expert_scale(const Experts& b, int expert) {
  return b.expert.scale * (b.factors != nullptr ? b.factors[expert] : 1.0f);
}

// The tile of this block and its slots.
struct Work {
  Tile tile;
  const std::int32_t* slots = nullptr;  // nullptr: tile i is slot i
  // False if there is no such tile, or not in this call.
  __device__ __forceinline__ bool find(const FfnArgs& a, int i) {
    if (a.grouped && i >= *a.groups.n_tiles) return false;
    take(a, i);
    return tile.expert >= a.low && tile.expert < a.high;
  }
  __device__ __forceinline__ void take(const FfnArgs& a, int i) {
    tile = a.tile(i);
    slots = a.grouped ? a.groups.slots + tile.first : nullptr;
  }
  __device__ __forceinline__ int slot(int i) const {
    return slots != nullptr ? slots[min(i, tile.count - 1)] : tile.first;
  }
};

#endif

}  // namespace imp::cuda
