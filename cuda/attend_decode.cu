// Attention of decode steps at the released shape: heads of 256 dimensions, up to 12 of them on one
// KV head. A block takes 64 keys of a token and a KV head, all loads in flight at once; a second
// kernel merges the parts in order. How keys are cut depends on their number alone.
#include "cuda/attend.h"
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"

namespace imp::cuda {
namespace {

constexpr int dim = attend_decode_dim, heads = attend_decode_heads;
constexpr int threads = 512, warps = threads / 32, keys_of_warp = 4, tile = warps * keys_of_warp;
constexpr int most_parts = attend_decode_parts;
static_assert(tile == 64 && threads == 2 * dim);

// Keys of a part, whole tiles.
__device__ __forceinline__ std::int64_t part_keys(std::int64_t count) {
  return div_up(div_up(count, most_parts), tile) * tile;
}

// grid (T * kv heads, parts)
template <int KeyBytes, int ValueBytes>
__global__ void __launch_bounds__(threads, 1) attend_decode_kernel(const AttendArgs a) {
  __shared__ float q[heads][dim];
  __shared__ float p[heads][tile];
  __shared__ float half_sum[heads][dim];
  __shared__ float keep[heads], top[heads], total[heads];
  __shared__ std::int64_t at[tile];
  const int t = blockIdx.x / a.kv_heads, kv_head = blockIdx.x % a.kv_heads;
  const int group = a.heads / a.kv_heads;
  const std::int64_t head = static_cast<std::int64_t>(t) * a.heads + kv_head * group;
  const std::int64_t width = static_cast<std::int64_t>(a.kv_heads) * dim;
  const ChunkView chunk = a.step.chunk_of(t);
  begin();
  if (chunk.padding()) return;
  const Visible visible(a, chunk, t);
  const std::int64_t part = part_keys(visible.count);
  const std::int64_t first = blockIdx.y * part, end = min(visible.count, first + part);
  if (first >= end) return;

  for (int i = threadIdx.x; i < heads * dim; i += threads)
    q[i / dim][i % dim] = i / dim < group ? a.q[head * dim + i] : 0.0f;
  if (threadIdx.x < heads) top[threadIdx.x] = -INFINITY, total[threadIdx.x] = 0;
  const int d = threadIdx.x % dim, half = threadIdx.x / dim;
  float acc[heads] = {};
  for (std::int64_t key0 = first; key0 < end; key0 += tile) {
    const int n = static_cast<int>(min(static_cast<std::int64_t>(tile), end - key0));
    __syncthreads();
    if (threadIdx.x < tile)  // places past the end repeat the last key and weigh nothing
      at[threadIdx.x] =
          a.step.slot(chunk, visible.position(key0 + min(static_cast<int>(threadIdx.x), n - 1))) *
              width +
          kv_head * dim;
    __syncthreads();
    constexpr int line = 128 / ValueBytes;  // cells
    if (threadIdx.x < tile * dim / line)
      prefetch(a.values.data +
               ValueBytes * (at[threadIdx.x / (dim / line)] + threadIdx.x % (dim / line) * line));

    float4 k[keys_of_warp][2];
#pragma unroll
    for (int j = 0; j < keys_of_warp; ++j) {
      const std::int64_t row = at[warp_id() * keys_of_warp + j] + 4 * lane_id();
      k[j][0] = a.keys.load4<KeyBytes>(row);
      k[j][1] = a.keys.load4<KeyBytes>(row + dim / 2);
    }
#pragma unroll
    for (int h0 = 0; h0 < heads; h0 += 4) {
      float dots[16];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const auto* row = reinterpret_cast<const float4*>(q[h0 + h]) + lane_id();
        const float4 a0 = row[0], a1 = row[32];
#pragma unroll
        for (int j = 0; j < keys_of_warp; ++j) {
          float sum = a0.x * k[j][0].x;
          sum = fmaf(a0.y, k[j][0].y, sum);
          sum = fmaf(a0.z, k[j][0].z, sum);
          sum = fmaf(a0.w, k[j][0].w, sum);
          sum = fmaf(a1.x, k[j][1].x, sum);
          sum = fmaf(a1.y, k[j][1].y, sum);
          sum = fmaf(a1.z, k[j][1].z, sum);
          dots[h * 4 + j] = fmaf(a1.w, k[j][1].w, sum);
        }
      }
      const float dot = warp_sums(dots);  // of value lane % 16
      const int key = warp_id() * keys_of_warp + lane_id() % 4;
      if (lane_id() < 16) p[h0 + lane_id() / 4][key] = key < n ? a.scale * dot : -INFINITY;
    }
    __syncthreads();

    float v[tile / 2];  // of this half's keys
#pragma unroll
    for (int j = 0; j < tile / 2; ++j)
      v[j] = a.values.load<ValueBytes>(at[half * (tile / 2) + j] + d);
    if (warp_id() < heads) {
      const int h = warp_id();
      const float s0 = p[h][lane_id()], s1 = p[h][lane_id() + 32], before = top[h];
      const float now = fmaxf(before, warp_max(fmaxf(s0, s1)));
      const float w0 = expf(s0 - now), w1 = expf(s1 - now);
      const float sum = warp_sum(w0 + w1);
      p[h][lane_id()] = w0;
      p[h][lane_id() + 32] = w1;
      if (lane_id() == 0) {
        keep[h] = expf(before - now);
        top[h] = now;
        total[h] = fmaf(total[h], keep[h], sum);
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < heads; ++h) {
      float sum = acc[h] * keep[h];
#pragma unroll
      for (int j = 0; j < tile / 2; j += 4) {
        const float4 w = *reinterpret_cast<const float4*>(&p[h][half * (tile / 2) + j]);
        sum = fmaf(w.x, v[j], sum);
        sum = fmaf(w.y, v[j + 1], sum);
        sum = fmaf(w.z, v[j + 2], sum);
        sum = fmaf(w.w, v[j + 3], sum);
      }
      acc[h] = sum;
    }
  }
  if (half == 1)
#pragma unroll
    for (int h = 0; h < heads; ++h) half_sum[h][d] = acc[h];
  __syncthreads();
  if (half == 1) return;
#pragma unroll
  for (int h = 0; h < heads; ++h)
    if (h < group)
      a.parts[((head + h) * most_parts + blockIdx.y) * dim + d] = acc[h] + half_sum[h][d];
  if (threadIdx.x < group) {
    float* to = a.sums + ((head + threadIdx.x) * most_parts + blockIdx.y) * 2;
    to[0] = top[threadIdx.x];
    to[1] = total[threadIdx.x];
  }
}

// A block per token and query head: parts weigh exp(their top - the highest top).
__global__ void __launch_bounds__(dim) merge_decode_kernel(const AttendArgs a) {
  constexpr int at_once = 40;  // parts of the released model's budget of keys, and a few more
  __shared__ float weight[most_parts];
  __shared__ float denominator;
  const std::int64_t head = blockIdx.x;
  const int t = blockIdx.x / a.heads, d = threadIdx.x;
  const ChunkView chunk = a.step.chunk_of(t);
  begin();
  if (chunk.padding()) return;
  const float gate = a.qg[(2 * head + 1) * dim + d];
  const Visible visible(a, chunk, t);
  const int parts = static_cast<int>(div_up(visible.count, part_keys(visible.count)));
  const float* from = a.parts + head * most_parts * dim + d;
  float first[at_once];  // on their way while the weights are computed
#pragma unroll
  for (int i = 0; i < at_once; ++i) first[i] = i < parts ? from[i * dim] : 0.0f;
  if (warp_id() == 0) {
    const auto* sums = reinterpret_cast<const float2*>(a.sums) + head * most_parts;
    constexpr int each = most_parts / 32;
    float2 mine[each];
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = lane_id() + 32 * i;
      mine[i] = at < parts ? sums[at] : float2{-INFINITY, 0};
      top = fmaxf(top, mine[i].x);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const float w = expf(mine[i].x - top);
      weight[lane_id() + 32 * i] = w;
      sum = fmaf(w, mine[i].y, sum);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) denominator = sum;
  }
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < at_once; ++i)
    if (i < parts) sum = fmaf(weight[i], first[i], sum);
#pragma unroll 16
  for (int i = at_once; i < parts; ++i) sum = fmaf(weight[i], from[i * dim], sum);
  a.y[head * dim + d] = sum / denominator * sigmoid(gate);
}

}  // namespace

void attend_decode(const AttendArgs& a, std::int64_t rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(rows * a.kv_heads), most_parts);
  with_cell_bytes(a.keys, a.values, [&]<int KeyBytes, int ValueBytes>() {
    launch(attend_decode_kernel<KeyBytes, ValueBytes>, grid, threads, 0, stream, a);
  });
  launch(merge_decode_kernel, static_cast<unsigned>(rows * a.heads), dim, 0, stream, a);
}

}  // namespace imp::cuda
