// Queries, keys and values of attention and its indexer, normed, rotated and stored. A warp per
// head of a token; one more takes the token's part in the indexer's block keys.
#include "cuda/check.h"
#include "cuda/common/cells.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/rope.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

constexpr int warps = 8;

struct InputsArgs {
  StepView step;
  const float *qg, *k, *v, *index_q, *index_raw, *rope;
  const float *q_norm, *k_norm, *index_q_norm, *index_k_norm;
  float *q, *index_q_out, *index_keys;
  Cells keys, values;
  std::int64_t state;
  int rows, heads, kv_heads, dim, rotary_dim, index_heads, index_dim, ratio;
  double theta;
  float eps;
};

// The key of the block whose first token is at `first`: rows of this step, before them the tail.
__device__ void block_key(const InputsArgs& a, const ChunkView& chunk, const float* tail,
                          int first) {
  const auto mean = [&](int d) {
    float sum = 0;
    for (int r = 0; r < a.ratio; ++r) {
      const int at = first + r - chunk.position;  // in the chunk
      sum += at >= 0 ? a.index_raw[static_cast<std::int64_t>(chunk.row + at) * a.index_dim + d]
                     : tail[r * a.index_dim + d];
    }
    return sum / static_cast<float>(a.ratio);
  };
  float squares = 0;
  for (int d = lane_id(); d < a.index_dim; d += 32) squares = fmaf(mean(d), mean(d), squares);
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(a.index_dim) + a.eps);
  float* key = a.index_keys + a.step.slot(chunk, first) / a.ratio * a.index_dim;
  const int half = a.rotary_dim / 2;
  for (int d = lane_id(); d < half; d += 32) {
    const float x = mean(d) * scale * a.index_k_norm[d];
    const float y = mean(half + d) * scale * a.index_k_norm[half + d];
    const float angle = rope_angle(first, d, a.rotary_dim, a.theta);
    const float cos = cosf(angle), sin = sinf(angle);
    key[d] = x * cos - y * sin;
    key[half + d] = y * cos + x * sin;
  }
  for (int d = 2 * half + lane_id(); d < a.index_dim; d += 32)
    key[d] = mean(d) * scale * a.index_k_norm[d];
}

// Blocks that end at this token and lie in the chunk as a whole. The chunk's first token also has
// the block that began before the chunk, and moves the tail on, which nobody else reads.
__device__ void index_keys(const InputsArgs& a, const ChunkView& chunk, int t) {
  float* tail = a.step.state_at(chunk, a.state);
  const int position = chunk.position + (t - chunk.row), first = position + 1 - a.ratio;
  if ((position + 1) % a.ratio == 0 && first >= chunk.position) block_key(a, chunk, nullptr, first);
  if (t != chunk.row) return;
  const int begun = position - position % a.ratio, end = position + chunk.rows;
  if (begun < position && begun + a.ratio <= end) block_key(a, chunk, tail, begun);
  __syncwarp();
  for (int p = max(position, end - a.ratio); p < end; ++p)
    for (int d = lane_id(); d < a.index_dim; d += 32)
      tail[p % a.ratio * a.index_dim + d] =
          a.index_raw[static_cast<std::int64_t>(chunk.row + p - position) * a.index_dim + d];
}

__global__ void __launch_bounds__(32 * warps) attend_inputs_kernel(const InputsArgs a) {
  const int parts = a.heads + 2 * a.kv_heads + (a.index_heads > 0 ? a.index_heads + 1 : 0);
  const int i = static_cast<int>(blockIdx.x) * warps + warp_id(), t = i / parts;
  if (t >= a.rows) return begin();
  const int part = i % parts;  // heads of q, k, v, the indexer's; its keys
  const int k_part = part - a.heads, v_part = k_part - a.kv_heads, index_part = v_part - a.kv_heads;
  const ChunkView chunk = a.step.chunk_of(t);
  if (chunk.padding()) return begin();
  const std::int64_t slot = a.step.slot(chunk, chunk.position + (t - chunk.row));
  const float* w = k_part < 0                    ? a.q_norm
                   : v_part < 0                  ? a.k_norm
                   : index_part == a.index_heads ? a.index_k_norm
                                                 : a.index_q_norm;
  constexpr int line = 32;  // floats
  const int dim = index_part < 0 ? a.dim : a.index_dim;
  if (v_part < 0 || index_part >= 0)
    for (int at = lane_id() * line; at < dim; at += 32 * line) prefetch(w + at);
  begin();
  const float* table = a.rope + static_cast<std::int64_t>(t) * a.rotary_dim;
  // Head `head` of `heads` in rows of heads of `stride`.
  const auto row = [t](auto* base, int heads, int head, int stride) {
    return base + (static_cast<std::int64_t>(t) * heads + head) * stride;
  };
  if (k_part < 0)
    return norm_rope(row(a.qg, a.heads, part, 2 * dim), w, table, dim, a.rotary_dim, a.eps,
                     Into{row(a.q, a.heads, part, dim)});
  if (v_part < 0) {
    const std::int64_t to = (slot * a.kv_heads + k_part) * dim;
    return norm_rope(row(a.k, a.kv_heads, k_part, dim), w, table, dim, a.rotary_dim, a.eps,
                     [&](int d, float y) { a.keys.store(to + d, y); });
  }
  if (index_part < 0) {
    const float* from = row(a.v, a.kv_heads, v_part, dim);
    const std::int64_t to = (slot * a.kv_heads + v_part) * dim;
    for (int d = lane_id(); d < dim; d += 32) a.values.store(to + d, from[d]);
    return;
  }
  if (index_part == a.index_heads) return index_keys(a, chunk, t);
  norm_rope(row(a.index_q, a.index_heads, index_part, dim), w, table, dim, a.rotary_dim, a.eps,
            Into{row(a.index_q_out, a.index_heads, index_part, dim)});
}

}  // namespace

void run(const AttendInputs& op, const Context& c) {
  const std::int64_t rows = c.rows(op.k);
  if (rows == 0) return;
  const KvLayer& kv = c.kv[op.layer];
  const bool indexed = op.index_heads > 0;
  const InputsArgs a{c.step,
                     c.f32(op.qg),
                     c.f32(op.k),
                     c.f32(op.v),
                     indexed ? c.f32(op.index_q) : nullptr,
                     indexed ? c.f32(op.index_raw) : nullptr,
                     c.f32(op.rope),
                     c.vector(op.q_norm),
                     c.vector(op.k_norm),
                     indexed ? c.vector(op.index_q_norm) : nullptr,
                     indexed ? c.vector(op.index_k_norm) : nullptr,
                     c.f32(op.q),
                     indexed ? c.f32(op.normed_index_q) : nullptr,
                     kv.index,
                     {kv.k, c.types.k},
                     {kv.v, c.types.v},
                     op.state,
                     static_cast<int>(rows),
                     static_cast<int>(op.heads),
                     static_cast<int>(op.kv_heads),
                     static_cast<int>(op.dim),
                     static_cast<int>(op.rotary_dim),
                     static_cast<int>(op.index_heads),
                     static_cast<int>(op.index_dim),
                     static_cast<int>(op.ratio),
                     op.theta,
                     op.eps};
  const std::int64_t parts =
      op.heads + 2 * op.kv_heads + (indexed ? op.index_heads + 1 : std::int64_t{0});
  launch(attend_inputs_kernel, static_cast<unsigned>(div_up(rows * parts, warps)), 32 * warps, 0,
         c.stream, a);
}

}  // namespace imp::cuda
