// Slots sorted by expert and cut into tiles. One block: a decode step has few.
#include "cuda/check.h"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/moe.h"

namespace imp::cuda {
namespace {

constexpr int group_threads = 1024;

// The order of an expert's slots differs from run to run; results do not depend on it.
__global__ void __launch_bounds__(group_threads)
    group_kernel(const std::int32_t* ids, int n, int experts, Groups g) {
  extern __shared__ std::int32_t places[];  // [experts] counts, then the next free places
  __shared__ int2 warps[group_threads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < experts; e += group_threads) places[e] = 0;
  begin();
  __syncthreads();
  for (int i = thread; i < n; i += group_threads) atomicAdd(&places[ids[i]], 1);
  __syncthreads();
  int2 before = {0, 0};  // slots and tiles of the experts so far
  for (int base = 0; base < experts; base += group_threads) {
    const int e = base + thread, count = e < experts ? places[e] : 0;
    const int2 mine = {count, static_cast<int>(div_up(count, tile_slots))};
    int2 sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int a = __shfl_up_sync(all_lanes, sum.x, d), b = __shfl_up_sync(all_lanes, sum.y, d);
      if (lane_id() >= d) sum.x += a, sum.y += b;
    }
    __syncthreads();
    if (lane_id() == 31) warps[warp_id()] = sum;
    __syncthreads();
    int2 lower = before;
    for (int w = 0; w < group_threads / 32; ++w) {
      if (w < warp_id()) lower.x += warps[w].x, lower.y += warps[w].y;
      before.x += warps[w].x, before.y += warps[w].y;
    }
    const int start = lower.x + sum.x - mine.x;
    if (e < experts) places[e] = start;
    for (int i = 0; i < mine.y; ++i)
      g.tiles[lower.y + sum.y - mine.y + i] = {e, start + i * tile_slots,
                                               min(tile_slots, count - i * tile_slots)};
  }
  if (thread == 0) *g.n_tiles = before.y;
  __syncthreads();
  for (int i = thread; i < n; i += group_threads) g.slots[atomicAdd(&places[ids[i]], 1)] = i;
}

}  // namespace

void group_slots(const std::int32_t* ids, std::int64_t n, std::int64_t experts, const Groups& g,
                 cudaStream_t stream) {
  launch(group_kernel, 1, group_threads, sizeof(std::int32_t) * static_cast<std::size_t>(experts),
         stream, ids, static_cast<int>(n), static_cast<int>(experts), g);
}

}  // namespace imp::cuda
