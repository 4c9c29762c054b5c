// A token's k best experts and their weights, by one warp.
#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/route.h"

namespace imp::cuda {

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

// Rank of `key` among the warp's first N lanes; of equals the lower lane comes first.
template <int N>
__device__ __forceinline__ int rank_of(std::uint32_t key) {
  int rank = 0;
#pragma unroll
  for (int l = 0; l < N; ++l) {
    const std::uint32_t other = __shfl_sync(all_lanes, key, l);
    rank += other > key || (other == key && l < lane_id()) ? 1 : 0;
  }
  return rank;
}

// In shared memory: those that are ranked.
struct Candidates {
  std::uint32_t keys[32];
  std::int32_t ids[32];
};

// k times the best logit behind the one before, of equals the lower id. Returns the best and the
// weights' sum.
__device__ inline float2 choose_slowly(const RouteArgs& a, const float* logits, std::int32_t* ids,
                                       float* weights) {
  std::uint32_t last = ~0u;
  int last_id = -1;
  float top = 0, total = 0;
  for (int j = 0; j < a.k; ++j) {
    std::uint32_t mine = 0;
    int id = a.experts;
    for (int e = lane_id(); e < a.experts; e += 32) {
      const std::uint32_t key = rank_key(logits[e]);
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

// The choice for the token of these logits, `planted` instead of its ids if present. The k-th best
// of the lanes' best is a bound that few experts reach: those are ranked among each other.
__device__ inline void choose_experts(const RouteArgs& a, const float* logits, Candidates& found,
                                      std::int32_t* ids, float* weights,
                                      const std::int32_t* planted) {
  constexpr int lane_keys = 16;
  std::uint32_t keys[lane_keys], most = 0;
#pragma unroll
  for (int i = 0; i < lane_keys; ++i) {
    const int e = lane_id() + 32 * i;
    keys[i] = e < a.experts ? rank_key(logits[e]) : 0;
  }
#pragma unroll
  for (int i = 0; i < lane_keys; ++i) most = max(most, keys[i]);
  int n = 33;
  if (a.k <= 32 && a.experts <= 32 * lane_keys) {
    const unsigned kth = __ballot_sync(all_lanes, rank_of<32>(most) == a.k - 1);
    const std::uint32_t bound = max(1u, __shfl_sync(all_lanes, most, __ffs(kth) - 1));  // no NaN
    n = 0;
#pragma unroll
    for (int i = 0; i < lane_keys; ++i) {
      const unsigned those = __ballot_sync(all_lanes, keys[i] >= bound);
      const int at = n + __popc(those & ((1u << lane_id()) - 1));
      if (keys[i] >= bound && at < 32) {
        found.keys[at] = keys[i];
        found.ids[at] = lane_id() + 32 * i;
      }
      n += __popc(those);
    }
    __syncwarp();
  }
  float top = 0, total = 0;
  const bool quick = n >= a.k && n <= 32;
  int rank = a.k;
  float weight = 0;
  if (quick) {
    // The lanes behind those found have 0, which no candidate ranks below.
    const std::uint32_t key = lane_id() < n ? found.keys[lane_id()] : 0;
    rank = n <= 16 ? rank_of<16>(key) : rank_of<32>(key);
    const unsigned first = __ballot_sync(all_lanes, lane_id() < n && rank == 0);
    top = ranked_logit(__shfl_sync(all_lanes, key, __ffs(first) - 1));
    if (lane_id() >= n) rank = a.k;
    if (rank < a.k) weight = expf(ranked_logit(key) - top);
    total = warp_sum(weight);
  } else {
    const float2 best = choose_slowly(a, logits, ids, weights);
    top = best.x, total = best.y;
    __syncwarp();
  }
  if (!a.renormalise) {
    float sum = 0;
    for (int e = lane_id(); e < a.experts; e += 32) sum += expf(logits[e] - top);
    total = warp_sum(sum);
  }
  if (quick) {
    if (rank < a.k) ids[rank] = found.ids[lane_id()], weights[rank] = weight / total;
  } else {
    for (int j = lane_id(); j < a.k; j += 32) weights[j] /= total;
  }
  if (planted == nullptr) return;
  __syncwarp();
  for (int j = lane_id(); j < a.k; j += 32) ids[j] = planted[j];
}

}  // namespace imp::cuda
