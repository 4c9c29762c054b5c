// Rotation table, norm and rotation of heads, and the cache of keys and values.
#include "cuda/check.h"
#include "cuda/common/cells.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/rope.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

__global__ void rope_table_kernel(const std::int32_t* positions, int dim, double theta, float* y,
                                  std::int64_t pairs) {
  begin();
  const std::int64_t i = global_thread();
  if (i >= pairs) return;
  const int half = dim / 2, j = static_cast<int>(i % half);
  const std::int64_t t = i / half;
  const float angle = rope_angle(positions[t], j, dim, theta);
  y[t * dim + j] = cosf(angle);
  y[t * dim + half + j] = sinf(angle);
}

// A warp per head: y = rope(x / rms(x) * w).
__global__ void __launch_bounds__(block_threads)
    head_norm_rope_kernel(const float* x, const float* rope, const float* w, float* y,
                          std::int64_t heads, int dim, int stride, int rotary_dim, float eps,
                          std::int64_t all_heads) {
  begin();
  const std::int64_t head = blockIdx.x * static_cast<std::int64_t>(block_threads / 32) + warp_id();
  if (head >= all_heads) return;
  norm_rope(x + head * stride, w, rope + head / heads * rotary_dim, dim, rotary_dim, eps,
            Into{y + head * dim});
}

// A block per token.
__global__ void __launch_bounds__(block_threads)
    kv_store_kernel(const StepView step, const float* k, const float* v, Cells keys, Cells values,
                    std::int64_t width) {
  begin();
  const std::int64_t t = blockIdx.x;
  const ChunkView& chunk = step.chunk_of(t);
  if (chunk.padding()) return;
  const std::int64_t to = step.slot(chunk, chunk.position + t - chunk.row) * width;
  for (std::int64_t i = threadIdx.x; i < width; i += block_threads) {
    keys.store(to + i, k[t * width + i]);
    values.store(to + i, v[t * width + i]);
  }
}

}  // namespace

void run(const RopeTable& op, const Context& c) {
  const std::int64_t pairs = c.rows(op.y) * (op.dim / 2);
  if (pairs == 0) return;
  launch(rope_table_kernel, blocks_for(pairs), block_threads, 0, c.stream, c.step.positions,
         static_cast<int>(op.dim), op.theta, c.f32(op.y), pairs);
}

void run(const HeadNormRope& op, const Context& c) {
  const std::int64_t heads = c.rows(op.x) * op.heads;
  if (heads == 0) return;
  launch(head_norm_rope_kernel, static_cast<unsigned>(div_up(heads, block_threads / 32)),
         block_threads, 0, c.stream, c.f32(op.x), c.f32(op.rope), c.vector(op.w), c.f32(op.y),
         op.heads, static_cast<int>(op.dim), static_cast<int>(op.stride),
         static_cast<int>(op.rotary_dim), op.eps, heads);
}

void run(const KvStore& op, const Context& c) {
  const auto rows = static_cast<unsigned>(c.rows(op.k));
  if (rows == 0) return;
  const KvLayer& kv = c.kv[op.layer];
  launch(kv_store_kernel, rows, block_threads, 0, c.stream, c.step, c.f32(op.k), c.f32(op.v),
         Cells{kv.k, c.types.k}, Cells{kv.v, c.types.v}, op.width);
}

}  // namespace imp::cuda
