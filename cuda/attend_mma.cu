// Attention at the released shape on tensor cores: heads of 256 dimensions, up to 12 of them on one
// KV head. Products are of tf32: queries, weights and fp32 cells as hi + lo, so that fp32 is kept;
// cells of two bytes are exact.
//
// A token's keys are cut into parts, whole tiles of keys, and those into groups, by their number
// alone. In small steps a block takes a part, in larger ones a group; either way parts are added to
// their group and groups to the result in the same order, so that a token's bits do not depend on
// the step.
#include <algorithm>

#include "cuda/attend.h"
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"

namespace imp::cuda {
namespace {

constexpr int dim = attend_mma_dim, heads = attend_mma_heads;
constexpr int threads = 256, warps = threads / 32, tile = 64;
constexpr int slice = dim / warps;  // dimensions of a warp, of keys and of values
constexpr int line = 128;           // bytes that a prefetch brings
constexpr int most_parts = 64, most_groups = 4;
constexpr std::int64_t most_part_rows = 16;  // of steps whose blocks take a part
constexpr std::int64_t rows_at_once = 1024;  // bounds the scratch
static_assert(slice == 32 && heads > 8 && heads <= 16 && most_parts / most_groups <= 32);

struct Cut {
  int part;          // keys
  int parts, group;  // of the token, of a group
  __device__ explicit Cut(int keys)
      : part((keys + most_parts * tile - 1) / (most_parts * tile) * tile),
        parts((keys + part - 1) / part),
        group((parts + most_groups - 1) / most_groups) {}
};

// fp32 values as an operand.
struct Split {
  std::uint32_t hi[4], lo[4];
  __device__ __forceinline__ Split(float x0, float x1, float x2, float x3)
      : hi{tf32_hi(x0), tf32_hi(x1), tf32_hi(x2), tf32_hi(x3)},
        lo{tf32_lo(x0), tf32_lo(x1), tf32_lo(x2), tf32_lo(x3)} {}
};

// d += a b; Exact: b is tf32 already.
template <bool Exact>
__device__ __forceinline__ void multiply(float (&d)[4], const Split& a, float b0, float b1) {
  const std::uint32_t hi[2] = {tf32_hi(b0), tf32_hi(b1)};
  mma_tf32(d, a.lo, hi);
  if constexpr (!Exact) {
    const std::uint32_t lo[2] = {tf32_lo(b0), tf32_lo(b1)};
    mma_tf32(d, a.hi, lo);
  }
  mma_tf32(d, a.hi, hi);
}

// Over 16 lanes, in one order.
template <class F>
__device__ __forceinline__ float over_half_warp(float v, F f) {
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) v = f(v, __shfl_xor_sync(all_lanes, v, d));
  return v;
}

// A warp multiplies its slice of all keys of a tile by the queries, then sums its slice of their
// values. With g = lane / 4 and c = lane % 4 a lane has heads g and g + 8, of keys 8n + g and
// dimensions 4c .. 4c + 3 and 16 more, and of values 16m + 4c .. 16m + 4c + 3 and dimensions
// 4g .. 4g + 3: an order that loads whole sectors, and that the operands share.
// grid (T * kv heads, slots)
template <int KeyBytes, int ValueBytes>
__global__ void __launch_bounds__(threads, 2) attend_mma_kernel(const AttendArgs a) {
  constexpr int lanes = 16, keys_of_lane = tile / lanes;  // for a head's softmax
  static_assert(heads * lanes <= threads && keys_of_lane == 4);
  __shared__ alignas(16) float dots[warps][heads][tile + 8];  // of slices; padded against conflicts
  __shared__ alignas(16) float p[heads][tile + 16];
  __shared__ float sum[16][threads];  // of parts, each thread's own
  __shared__ float keep[heads];
  __shared__ Running running[heads];
  __shared__ std::int32_t at[2][tile];  // tokens of the cache, of this tile and of the next
  const int row = static_cast<int>(blockIdx.x) / a.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % a.kv_heads, group = a.heads / a.kv_heads;
  const std::int64_t t = a.first_row + row;
  const int thread = static_cast<int>(threadIdx.x), g = lane_id() / 4, c = lane_id() % 4;
  const int slice0 = warp_id() * slice, width = a.kv_heads * dim;
  const Cells keys = a.keys.from(kv_head * dim + slice0 + 4 * c);
  const Cells values = a.values.from(kv_head * dim + slice0 + 4 * g);
  const ChunkView chunk = a.step.chunk_of(t);
  begin();
  if (chunk.padding()) return;
  const Visible visible(a, chunk, t);
  const Cut cut(visible.count);
  const int share = cut.part * (a.slots == most_parts ? 1 : cut.group);
  const int first = static_cast<int>(blockIdx.y) * share, end = min(visible.count, first + share);
  if (first >= end) return;

  // Places past the end repeat the last key and weigh nothing.
  const auto position = [&](int key) { return visible.position(min(key, end - 1)); };
  const auto slot = [&](int place) { return static_cast<std::int32_t>(a.step.slot(chunk, place)); };
  if (thread < tile) at[0][thread] = slot(position(first + thread));
  float q[2][8];  // of heads g and g + 8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto* from = reinterpret_cast<const float4*>(
        a.q + (t * a.heads + kv_head * group + g + 8 * i) * dim + slice0 + 4 * c);
    const bool there = g + 8 * i < group;
    const float4 low = there ? from[0] : float4{}, high = there ? from[4] : float4{};
    q[i][0] = low.x, q[i][1] = low.y, q[i][2] = low.z, q[i][3] = low.w;
    q[i][4] = high.x, q[i][5] = high.y, q[i][6] = high.z, q[i][7] = high.w;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i][thread] = 0;
  float acc[4][4] = {};
  Running parts = Running::nothing();  // these three: of head thread / lanes
  float top = -INFINITY, total = 0;
  __syncthreads();

  int now = 0, left = cut.part;  // the keys of the part that are still to come
  for (int key0 = first; key0 < end; key0 += tile, now ^= 1) {
    const auto cell = [&](int key) { return static_cast<std::int64_t>(at[now][key]) * width; };
    const bool more = key0 + tile < end;
    left -= tile;
    const bool last = !more || left == 0;  // of its part
    if (warp_id() % (line / (slice * ValueBytes)) == 0)
      for (int key = lane_id(); key < tile; key += 32)
        prefetch(values.data + (cell(key) - 4 * g) * ValueBytes);
    float4 k[tile / 8][2];
#pragma unroll
    for (int n = 0; n < tile / 8; ++n) {
      const std::int64_t from = cell(8 * n + g);
      k[n][0] = keys.load4<KeyBytes>(from);
      k[n][1] = keys.load4<KeyBytes>(from + 16);
    }
    int next = 0;
    if (more && thread < tile) next = position(key0 + tile + thread);
    constexpr int at_once = 4;
#pragma unroll
    for (int n0 = 0; n0 < tile / 8; n0 += at_once) {
      float dot[at_once][4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Split even(q[0][4 * i], q[1][4 * i], q[0][4 * i + 1], q[1][4 * i + 1]);
#pragma unroll
        for (int n = 0; n < at_once; ++n)
          multiply<KeyBytes == 2>(dot[n], even, k[n0 + n][i].x, k[n0 + n][i].y);
        const Split odd(q[0][4 * i + 2], q[1][4 * i + 2], q[0][4 * i + 3], q[1][4 * i + 3]);
#pragma unroll
        for (int n = 0; n < at_once; ++n)
          multiply<KeyBytes == 2>(dot[n], odd, k[n0 + n][i].z, k[n0 + n][i].w);
      }
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        const int key = 8 * (n0 + n) + 2 * c;
        *reinterpret_cast<float2*>(&dots[warp_id()][g][key]) = {dot[n][0], dot[n][1]};
        if (g + 8 < heads)
          *reinterpret_cast<float2*>(&dots[warp_id()][g + 8][key]) = {dot[n][2], dot[n][3]};
      }
    }
    __syncthreads();

    float4 v[tile / 4];
#pragma unroll
    for (int i = 0; i < tile / 4; ++i)
      v[i] = values.load4<ValueBytes>(cell(i / 4 * 16 + 4 * c + i % 4));
    if (more && thread < tile) at[now ^ 1][thread] = slot(next);
    if (warp_id() < heads * lanes / 32) {
      const int h = thread / lanes, key = thread % lanes * keys_of_lane;
      float4 s = *reinterpret_cast<const float4*>(&dots[0][h][key]);
#pragma unroll
      for (int w = 1; w < warps; ++w) {
        const float4 x = *reinterpret_cast<const float4*>(&dots[w][h][key]);
        s = {s.x + x.x, s.y + x.y, s.z + x.z, s.w + x.w};
      }
      const auto score = [&](float dot, int i) {
        return key0 + key + i < end ? a.scale * dot : -INFINITY;
      };
      s = {score(s.x, 0), score(s.y, 1), score(s.z, 2), score(s.w, 3)};
      const float highest =
          fmaxf(top, over_half_warp(fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w)),
                                    [](float x, float y) { return fmaxf(x, y); }));
      s = {expf(s.x - highest), expf(s.y - highest), expf(s.z - highest), expf(s.w - highest)};
      *reinterpret_cast<float4*>(&p[h][key]) = s;
      const float weights =
          over_half_warp((s.x + s.y) + (s.z + s.w), [](float x, float y) { return x + y; });
      const float old = expf(top - highest);
      total = fmaf(total, old, weights);
      top = highest;
      if (last) {
        parts.step(top, total);
        top = -INFINITY, total = 0;
      }
      if (thread % lanes == 0) {
        keep[h] = old;
        if (last) running[h] = parts;
      }
    }
    __syncthreads();

    const float keep_low = keep[g], keep_high = g + 8 < heads ? keep[g + 8] : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      acc[j][0] *= keep_low, acc[j][1] *= keep_low;
      acc[j][2] *= keep_high, acc[j][3] *= keep_high;
    }
#pragma unroll
    for (int m = 0; m < tile / 16; ++m) {
      const float4 low = *reinterpret_cast<const float4*>(&p[g][16 * m + 4 * c]);
      const float4 high =
          g + 8 < heads ? *reinterpret_cast<const float4*>(&p[g + 8][16 * m + 4 * c]) : float4{};
      const Split even(low.x, high.x, low.y, high.y), odd(low.z, high.z, low.w, high.w);
      const auto of = [&](int i, int j) {
        const float4& x = v[4 * m + i];
        return j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply<ValueBytes == 2>(acc[j], even, of(0, j), of(1, j));
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply<ValueBytes == 2>(acc[j], odd, of(2, j), of(3, j));
    }
    if (!last) continue;
    left = cut.part;
    const Running low = running[g], high = g + 8 < heads ? running[g + 8] : Running::nothing();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = sum[4 * j + i][thread];
        x = (i < 2 ? low : high).values(x, acc[j][i]);
        acc[j][i] = 0;
      }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int h = g + 8 * i;
    if (h >= group) continue;
    const std::int64_t to =
        (static_cast<std::int64_t>(row) * a.heads + kv_head * group + h) * a.slots + blockIdx.y;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      *reinterpret_cast<float4*>(a.parts + to * dim + slice0 + 8 * c + 4 * j) = {
          sum[2 * i + j][thread], sum[4 + 2 * i + j][thread], sum[8 + 2 * i + j][thread],
          sum[12 + 2 * i + j][thread]};
    if (warp_id() == 0 && c == 0) {
      a.sums[to * 2] = running[h].top;
      a.sums[to * 2 + 1] = running[h].total;
    }
  }
}

// A block per token and query head: adds slots to groups and groups to the result.
template <int Slots>
__global__ void __launch_bounds__(dim) merge_mma_kernel(const AttendArgs a) {
  constexpr int most = Slots / most_groups;  // slots of a group
  // Of those of the released model's budget of keys, a few more.
  constexpr int at_once = most < 10 ? most : 10;
  __shared__ float4 factors[most_groups][most];  // of what is there, of what is added; its total
  __shared__ float tops[most_groups];
  const std::int64_t head = blockIdx.x, t = a.first_row + blockIdx.x / a.heads;
  const int d = static_cast<int>(threadIdx.x);
  const ChunkView chunk = a.step.chunk_of(t);
  begin();
  if (chunk.padding()) return;
  const float gate = a.qg[(2 * (t * a.heads + head % a.heads) + 1) * dim + d];
  const Cut cut(Visible(a, chunk, t).count);
  const int n = Slots == most_parts ? cut.parts : (cut.parts + cut.group - 1) / cut.group;
  const int group = Slots == most_parts ? cut.group : 1;
  const auto count = [&](int i) { return max(0, min(group, n - i * group)); };  // of group i
  const float* from = a.parts + head * Slots * dim + d;
  float first[most_groups][at_once];  // on their way while the factors are computed
#pragma unroll
  for (int i = 0; i < most_groups; ++i)
#pragma unroll
    for (int j = 0; j < at_once; ++j)
      first[i][j] = j < count(i) ? from[(i * group + j) * dim] : 0.0f;
  if (warp_id() < most_groups) {
    const bool there = lane_id() < count(warp_id());
    const float2 mine =
        there
            ? reinterpret_cast<const float2*>(a.sums)[head * Slots + warp_id() * group + lane_id()]
            : float2{-INFINITY, 0};
    float top = mine.x;  // of the slots so far
#pragma unroll
    for (int i = 1; i < most; i *= 2) {
      const float other = __shfl_up_sync(all_lanes, top, i);
      if (lane_id() >= i) top = fmaxf(top, other);
    }
    const float before = __shfl_up_sync(all_lanes, top, 1);
    if (there)
      factors[warp_id()][lane_id()] = {lane_id() == 0 ? 0 : expf(before - top), expf(mine.x - top),
                                       mine.y, 0};
    if (lane_id() == count(warp_id()) - 1) tops[warp_id()] = top;
  }
  __syncthreads();
  Running running = Running::nothing();
  float result = 0;
#pragma unroll
  for (int i = 0; i < most_groups; ++i) {
    if (count(i) == 0) break;
    float sum = 0, total = 0;
    const auto add = [&](int j, float part) {
      const float4 f = factors[i][j];
      sum = fmaf(part, f.y, __fmul_rn(sum, f.x));
      total = fmaf(f.z, f.y, __fmul_rn(total, f.x));
    };
#pragma unroll
    for (int j = 0; j < at_once; ++j)
      if (j < count(i)) add(j, first[i][j]);
    for (int j = at_once; j < count(i); ++j) add(j, from[(i * group + j) * dim]);
    running.step(tops[i], total);
    result = running.values(result, sum);
  }
  a.y[(t * a.heads + head % a.heads) * dim + d] = result / running.total * sigmoid(gate);
}

int slots_of(std::int64_t rows) { return rows <= most_part_rows ? most_parts : most_groups; }

}  // namespace

std::size_t attend_mma_scratch_bytes(std::int64_t rows, std::int64_t q_heads) {
  return static_cast<std::size_t>(std::min(rows, rows_at_once) * q_heads * slots_of(rows) *
                                  (dim + 2)) *
         sizeof(float);
}

void attend_mma(AttendArgs a, std::int64_t rows, std::byte* scratch, cudaStream_t stream) {
  a.slots = slots_of(rows);
  a.parts = reinterpret_cast<float*>(scratch);
  a.sums = a.parts + std::min(rows, rows_at_once) * a.heads * a.slots * dim;
  for (a.first_row = 0; a.first_row < rows; a.first_row += rows_at_once) {
    const std::int64_t n = std::min(rows_at_once, rows - a.first_row);
    const dim3 grid(static_cast<unsigned>(n * a.kv_heads), static_cast<unsigned>(a.slots));
    with_cell_bytes(a.keys, a.values, [&]<int KeyBytes, int ValueBytes>() {
      launch(attend_mma_kernel<KeyBytes, ValueBytes>, grid, threads, 0, stream, a);
    });
    const auto merge =
        a.slots == most_parts ? merge_mma_kernel<most_parts> : merge_mma_kernel<most_groups>;
    launch(merge, static_cast<unsigned>(n * a.heads), dim, 0, stream, a);
  }
}

}  // namespace imp::cuda
