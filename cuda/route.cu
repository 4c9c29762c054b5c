// Routing: the k best experts of a token and their weights.
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

// Sorts like the logit, -0 as 0; NaN comes below everything.
__device__ __forceinline__ std::uint32_t rank_key(float logit) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);
  return logit != logit ? 0u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float ranked_logit(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ std::uint32_t warp_max_key(std::uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(all_lanes, v);
#else
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = max(v, __shfl_xor_sync(all_lanes, v, d));
  return v;
#endif
}

// Rank `key` among the warp's first n lanes; of equals the lower lane comes first.
__device__ __forceinline__ int rank_of(std::uint32_t key, int n) {
  int rank = 0;
#pragma unroll 8
  for (int l = 0; l < n; ++l) {
    const std::uint32_t other = __shfl_sync(all_lanes, key, l);
    rank += other > key || (other == key && l < lane_id()) ? 1 : 0;
  }
  return rank;
}

constexpr int route_threads = 128, route_warps = route_threads / 32, lane_keys = 16;

struct RouteArgs {
  const std::int32_t* n_padding;
  const float* logits;
  std::int64_t rows;
  int experts, k;
  bool renormalise;
  std::int32_t* ids;
  float* weights;
  const std::int32_t* planted;  // [rows, k] that replace the ids, or absent
};

// k times the best logit behind the one before, of equals the lower id. Returns the best and the
// weights' sum.
__device__ float2 route_slowly(const RouteArgs& a, const float* row, std::int32_t* ids,
                               float* weights) {
  std::uint32_t last = ~0u;
  int last_id = -1;
  float top = 0, total = 0;
  for (int j = 0; j < a.k; ++j) {
    std::uint32_t mine = 0;
    int id = a.experts;
    for (int e = lane_id(); e < a.experts; e += 32) {
      const std::uint32_t key = rank_key(row[e]);
      if ((key < last || (key == last && e > last_id)) && (key > mine || id == a.experts))
        mine = key, id = e;
    }
    last = warp_max_key(mine);
    last_id = static_cast<int>(~warp_max_key(mine == last ? ~static_cast<std::uint32_t>(id) : 0));
    if (j == 0) top = ranked_logit(last);
    const float weight = expf(ranked_logit(last) - top);
    total += weight;
    if (lane_id() == j % 32) ids[j] = last_id, weights[j] = weight;
  }
  return {top, total};
}

// A warp per token. The k-th best of the lanes' best is a bound that few experts reach: those are
// ranked among each other.
__global__ void __launch_bounds__(route_threads) route_kernel(const RouteArgs a) {
  begin();
  __shared__ std::uint32_t found_keys[route_warps][32];
  __shared__ std::int32_t found_ids[route_warps][32];
  const std::int64_t t = blockIdx.x * static_cast<std::int64_t>(route_warps) + warp_id();
  if (t >= a.rows) return;
  // Padding goes where row 0 goes, so that no expert is read for it.
  const float* row = a.logits + (t < a.rows - *a.n_padding ? t : 0) * a.experts;
  std::int32_t* ids = a.ids + t * a.k;
  float* weights = a.weights + t * a.k;
  std::uint32_t keys[lane_keys], most = 0;
#pragma unroll
  for (int i = 0; i < lane_keys; ++i) {
    const int e = lane_id() + 32 * i;
    keys[i] = e < a.experts ? rank_key(row[e]) : 0;
  }
#pragma unroll
  for (int i = 0; i < lane_keys; ++i) most = max(most, keys[i]);
  int found = 33;
  if (a.k <= 32 && a.experts <= 32 * lane_keys) {
    const unsigned kth = __ballot_sync(all_lanes, rank_of(most, 32) == a.k - 1);
    const std::uint32_t bound = max(1u, __shfl_sync(all_lanes, most, __ffs(kth) - 1));  // no NaN
    found = 0;
#pragma unroll
    for (int i = 0; i < lane_keys; ++i) {
      const unsigned those = __ballot_sync(all_lanes, keys[i] >= bound);
      const int at = found + __popc(those & ((1u << lane_id()) - 1));
      if (keys[i] >= bound && at < 32) {
        found_keys[warp_id()][at] = keys[i];
        found_ids[warp_id()][at] = lane_id() + 32 * i;
      }
      found += __popc(those);
    }
    __syncwarp();
  }
  float top = 0, total = 0;
  const bool quick = found >= a.k && found <= 32;
  int rank = a.k;
  float weight = 0;
  if (quick) {
    const std::uint32_t key = lane_id() < found ? found_keys[warp_id()][lane_id()] : 0;
    rank = rank_of(key, found);
    const unsigned first = __ballot_sync(all_lanes, lane_id() < found && rank == 0);
    top = ranked_logit(__shfl_sync(all_lanes, key, __ffs(first) - 1));
    if (lane_id() >= found) rank = a.k;
    if (rank < a.k) weight = expf(ranked_logit(key) - top);
    total = warp_sum(weight);
  } else {
    const float2 best = route_slowly(a, row, ids, weights);
    top = best.x, total = best.y;
    __syncwarp();
  }
  if (!a.renormalise) {
    float sum = 0;
    for (int e = lane_id(); e < a.experts; e += 32) sum += expf(row[e] - top);
    total = warp_sum(sum);
  }
  if (quick) {
    if (rank < a.k) ids[rank] = found_ids[warp_id()][lane_id()], weights[rank] = weight / total;
  } else {
    for (int j = lane_id(); j < a.k; j += 32) weights[j] /= total;
  }
  if (a.planted == nullptr) return;
  __syncwarp();
  for (int j = lane_id(); j < a.k; j += 32) ids[j] = a.planted[t * a.k + j];
}

}  // namespace

void run(const Route& op, const Context& c) {
  const std::int64_t rows = c.rows(op.logits);
  if (rows == 0) return;
  launch(route_kernel, static_cast<unsigned>(div_up(rows, route_warps)), route_threads, 0, c.stream,
         RouteArgs{c.step.n_padding, c.f32(op.logits), rows, static_cast<int>(c.cols(op.logits)),
                   static_cast<int>(op.k), op.renormalise, c.i32(op.ids), c.f32(op.weights),
                   op.planted < 0 ? nullptr : c.step.expert_ids + op.planted * rows * op.k});
}

}  // namespace imp::cuda
