// Attention of heads of any size over the paged cache in two passes: blocks take a token, a KV head
// and a part of its keys; then the parts are merged in order and gated. How a token's keys are cut
// depends on their number alone, so that its bits do not depend on the batch.
#include "cuda/attend.h"
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

constexpr int tile = 32;                 // keys whose scores are kept at once
constexpr int keys_of_warp = 4;          // at once
constexpr int most_dim = 1024;           // of a head
constexpr int key_parts = 64;            // of a token's keys
constexpr std::int64_t split_rows = 64;  // in larger steps one block takes all parts in turn

// Keys of a part, whole tiles.
__device__ std::int64_t part_keys(std::int64_t count) {
  return div_up(div_up(count, key_parts), tile) * tile;
}

// Heads: query heads of a block, the rest of a large group goes to other blocks.
// grid (T * kv heads, parts, head groups)
template <int Heads, int Threads, int KeyBytes, int ValueBytes>
__global__ void __launch_bounds__(Threads) attend_kernel(const AttendArgs a) {
  begin();
  extern __shared__ float queries[];  // [Heads][dim], then zeros
  __shared__ float p[Heads][tile];
  __shared__ float corrections[Heads], maxima[Heads], totals[Heads];
  __shared__ Running running[Heads];
  __shared__ std::int64_t at[tile];
  const std::int64_t t = blockIdx.x / a.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x % a.kv_heads), group = a.heads / a.kv_heads;
  const int first = blockIdx.z * Heads, heads = min(Heads, group - first);
  const std::int64_t head = kv_head * group + first;  // of the query, the first of the block
  const std::int64_t width = static_cast<std::int64_t>(a.kv_heads) * a.dim;
  const ChunkView& chunk = a.step.chunk_of(t);
  if (chunk.padding()) return;
  const Visible visible(a, chunk, t);
  const std::int64_t count = visible.count, part = part_keys(count);
  if (blockIdx.y * part >= count) return;

  for (int i = threadIdx.x; i < Heads * a.dim; i += Threads)
    queries[i] = i / a.dim < heads ? a.q[(t * a.heads + head) * a.dim + i] : 0.0f;
  if (threadIdx.x < Heads) running[threadIdx.x] = Running::nothing();
  float sum[Heads] = {};  // over all parts
  const int d = threadIdx.x;
  for (std::int64_t begin = blockIdx.y * part; begin < count; begin += gridDim.y * part) {
    const std::int64_t end = min(count, begin + part);
    float acc[Heads] = {};
    __syncthreads();
    if (threadIdx.x < Heads) {
      maxima[threadIdx.x] = -INFINITY;
      totals[threadIdx.x] = 0;
    }
    for (std::int64_t first_key = begin; first_key < end; first_key += tile) {
      const int n = static_cast<int>(min(static_cast<std::int64_t>(tile), end - first_key));
      __syncthreads();
      if (threadIdx.x < tile)  // places past the end repeat the last key and weigh nothing
        at[threadIdx.x] =
            a.step.slot(chunk, visible.position(static_cast<int>(first_key) +
                                                min(static_cast<int>(threadIdx.x), n - 1))) *
                width +
            kv_head * a.dim;
      __syncthreads();

      for (int w = warp_id(); w < tile / keys_of_warp; w += Threads / 32) {
        constexpr int heads_at_once = 8;
#pragma unroll
        for (int h0 = 0; h0 < Heads; h0 += heads_at_once) {
          float dots[heads_at_once * keys_of_warp] = {};
          for (int i = lane_id(); i < a.dim; i += 32) {
            float k[keys_of_warp];
#pragma unroll
            for (int j = 0; j < keys_of_warp; ++j)
              k[j] = a.keys.load<KeyBytes>(at[w * keys_of_warp + j] + i);
#pragma unroll
            for (int h = 0; h < heads_at_once; ++h) {
              const float q = queries[(h0 + h) * a.dim + i];
#pragma unroll
              for (int j = 0; j < keys_of_warp; ++j)
                dots[h * keys_of_warp + j] = fmaf(q, k[j], dots[h * keys_of_warp + j]);
            }
          }
          const float dot = warp_sums(dots);
          const int key = w * keys_of_warp + lane_id() % keys_of_warp;
          p[h0 + lane_id() / keys_of_warp][key] = key < n ? a.scale * dot : -INFINITY;
        }
      }
      __syncthreads();

      for (int h = warp_id(); h < Heads; h += Threads / 32) {
        const float score = p[h][lane_id()], before = maxima[h];
        const float top = fmaxf(before, warp_max(score));
        const float weight = expf(score - top);
        const float total = warp_sum(weight);
        __syncwarp();
        p[h][lane_id()] = weight;
        if (lane_id() == 0) {
          corrections[h] = expf(before - top);
          maxima[h] = top;
          totals[h] = totals[h] * corrections[h] + total;
        }
      }
      __syncthreads();

      if (d >= a.dim) continue;
#pragma unroll
      for (int h = 0; h < Heads; ++h) acc[h] *= corrections[h];
#pragma unroll 2
      for (int j = 0; j < tile; j += 4) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = a.values.load<ValueBytes>(at[j + i] + d);
#pragma unroll
        for (int h = 0; h < Heads; ++h)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[h] = fmaf(p[h][j + i], v[i], acc[h]);
      }
    }
    __syncthreads();
    if (threadIdx.x < Heads) running[threadIdx.x].step(maxima[threadIdx.x], totals[threadIdx.x]);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < Heads; ++h) sum[h] = running[h].values(sum[h], acc[h]);
  }
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
    if (h >= heads) continue;
    const std::int64_t to = (t * a.heads + head + h) * a.slots + blockIdx.y;
    if (d < a.dim) a.parts[to * a.dim + d] = sum[h];
    if (d == 0) {
      a.sums[to * 2] = running[h].top;
      a.sums[to * 2 + 1] = running[h].total;
    }
  }
}

// A block per token and query head.
__global__ void __launch_bounds__(block_threads) merge_kernel(const AttendArgs a) {
  begin();
  const std::int64_t t = blockIdx.x / a.heads;
  const ChunkView& chunk = a.step.chunk_of(t);
  if (chunk.padding()) return;
  const Visible visible(a, chunk, t);
  const int parts = min(a.slots, static_cast<int>(div_up(visible.count, part_keys(visible.count))));
  const std::int64_t first = blockIdx.x * static_cast<std::int64_t>(a.slots);
  for (int d = threadIdx.x; d < a.dim; d += block_threads) {
    Running running = Running::nothing();
    float sum = 0;
#pragma unroll 8
    for (std::int64_t i = first; i < first + parts; ++i) {
      running.step(a.sums[2 * i], a.sums[2 * i + 1]);
      sum = running.values(sum, a.parts[i * a.dim + d]);
    }
    const float gate = a.qg[(2ll * blockIdx.x + 1) * a.dim + d];
    a.y[blockIdx.x * static_cast<std::int64_t>(a.dim) + d] = sum / running.total * sigmoid(gate);
  }
}

int blocks_of(std::int64_t rows) { return rows <= split_rows ? key_parts : 1; }

// A thread per dimension of a head.
template <int Heads, int Threads>
void launch_attend(const AttendArgs& a, std::int64_t rows, cudaStream_t stream) {
  if constexpr (Threads < most_dim)
    if (a.dim > Threads) return launch_attend<Heads, most_dim>(a, rows, stream);
  const dim3 grid(static_cast<unsigned>(rows * a.kv_heads), static_cast<unsigned>(a.slots),
                  static_cast<unsigned>(div_up(a.heads / a.kv_heads, Heads)));
  const std::size_t shared = sizeof(float) * Heads * static_cast<std::size_t>(a.dim);
  with_cell_bytes(a.keys, a.values, [&]<int KeyBytes, int ValueBytes>() {
    const auto kernel = attend_kernel<Heads, Threads, KeyBytes, ValueBytes>;
    constexpr std::size_t always_allowed = 32 * 1024;  // beside the static part
    if (shared > always_allowed)
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared)),
            "cudaFuncSetAttribute");
    launch(kernel, grid, Threads, shared, stream, a);
  });
}

bool has_mma(const Attend& op) {
  return op.dim == attend_mma_dim && op.heads / op.kv_heads <= attend_mma_heads;
}

}  // namespace

std::size_t scratch_bytes(const Attend& op, std::int64_t rows) {
  if (has_mma(op)) return attend_mma_scratch_bytes(rows, op.heads);
  if (op.dim > most_dim)
    fail(ErrorCode::unsupported,
         str("attention heads of ", op.dim, " dimensions, the CUDA kernels take up to ", most_dim));
  return static_cast<std::size_t>(rows * op.heads * blocks_of(rows) * (op.dim + 2)) * sizeof(float);
}

void run(const Attend& op, const Context& c) {
  const std::int64_t rows = c.rows(op.q);
  if (rows == 0) return;
  const int slots = blocks_of(rows);
  auto* parts = reinterpret_cast<float*>(c.scratch);
  const KvLayer& kv = c.kv[op.layer];
  const AttendArgs a{c.step,
                     c.f32(op.q),
                     c.f32(op.qg),
                     {kv.k, c.types.k},
                     {kv.v, c.types.v},
                     op.selected ? c.i32(op.selected) : nullptr,
                     parts,
                     parts + rows * op.heads * slots * op.dim,
                     c.f32(op.y),
                     0,
                     static_cast<int>(op.heads),
                     static_cast<int>(op.kv_heads),
                     static_cast<int>(op.dim),
                     static_cast<int>(op.ratio),
                     static_cast<int>(op.blocks),
                     slots,
                     1.0f / sqrtf(static_cast<float>(op.dim))};
  if (has_mma(op)) return attend_mma(a, rows, c.scratch, c.stream);
  if (op.heads / op.kv_heads <= 8)
    launch_attend<8, 256>(a, rows, c.stream);
  else
    launch_attend<16, 256>(a, rows, c.stream);
  launch(merge_kernel, static_cast<unsigned>(rows * op.heads), block_threads, 0, c.stream, a);
}

}  // namespace imp::cuda
