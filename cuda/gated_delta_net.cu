// The gated delta-net of decode steps at the released shape, in one kernel. A cluster takes a
// sequence's key head with its value heads, a block 16 columns of each: their states stay in
// registers from before the step's inputs are there. Bits are those of the three ops.
#include "cuda/check.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/delta.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/gated_delta_net.h"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

using delta_net::dim, delta_net::taps, delta_net::group;
constexpr int cluster_blocks = 8, block_columns = dim / cluster_blocks;
constexpr int head_warps = block_columns / delta_columns, threads = 32 * head_warps * group;
constexpr int quads = dim / 16, state_floats = 4 * quads;

// grid (key heads * blocks of a cluster, chunks); two warps per value head.
__global__ void __launch_bounds__(threads, 3)
    gated_delta_net_kernel(const __grid_constant__ NetArgs a) {
  __shared__ alignas(16) float heads[2][dim];  // query, key
  __shared__ float outs[group][dim];
  const ChunkView chunk = a.step.chunks[blockIdx.y];
  if (chunk.padding()) return begin();
  cluster_started();
  const int key_head = blockIdx.x / cluster_blocks, part = blockIdx.x % cluster_blocks;
  const int member = warp_id() / head_warps, u = key_head + member * a.key_heads;
  const int column =
      part * block_columns + warp_id() % head_warps * delta_columns + lane_id() % delta_columns;
  float* tail = a.step.state_at(chunk, a.conv_state);
  float* state =
      a.step.state_at(chunk, a.delta_state) + static_cast<std::int64_t>(u) * dim * dim + column;
  float s[state_floats];
#pragma unroll
  for (int i = 0; i < state_floats; ++i) s[i] = state[delta_key(i) * dim];
  // Every block has the convolution of the whole query and key; a thread has up to two of their
  // channels, and one of its value head.
  constexpr int each = div_up(2 * dim, threads);
  const auto place = [](int i) { return static_cast<int>(threadIdx.x) + i * threads; };
  const auto channel_of = [&](int i) {
    return (place(i) / dim * a.key_heads + key_head) * dim + place(i) % dim;
  };
  const int value_channel = (2 * a.key_heads + u) * dim + column;
  Channel head[each], value;
#pragma unroll
  for (int i = 0; i < each; ++i)
    if (place(i) < 2 * dim) head[i].load_past(a, tail, channel_of(i));
  value.load_past(a, tail, value_channel);
  const float rate = a.a[u], dt = a.dt[u], gain = a.norm[column];

  begin();  // states and tails are this op's alone
  const std::int64_t at = static_cast<std::int64_t>(chunk.row) * a.value_heads + u;
  const float* x = a.x + static_cast<std::int64_t>(chunk.row) * a.channels;
#pragma unroll
  for (int i = 0; i < each; ++i)
    if (place(i) < 2 * dim) head[i].x = x[channel_of(i)];
  value.x = x[value_channel];
  const float alpha = a.alpha[at], b = a.b[at], z = a.z[at * dim + column];
#pragma unroll
  for (int i = 0; i < each; ++i)
    if (place(i) < 2 * dim) heads[place(i) / dim][place(i) % dim] = head[i].result();
  __syncthreads();
  if (warp_id() < 2)
    normed_head(heads[warp_id()], dim, warp_id() == 0 ? 1 / sqrtf(static_cast<float>(dim)) : 1.0f,
                heads[warp_id()], dim);
  const float decay = delta_decay(rate, alpha, dt), beta = sigmoid(b), v = value.result();
  __syncthreads();
  const float out = delta_step<quads>(s, heads[1], heads[0], v, decay, beta);

  cluster_wait();                                                  // all blocks have started
  constexpr unsigned ranks = cluster_blocks * delta_columns / 32;  // of each lane of a column
#pragma unroll
  for (unsigned i = 0; i < ranks; ++i)
    store_remote(&outs[member][column], lane_id() / delta_columns * ranks + i, out);
  cluster_arrive();
#pragma unroll
  for (int i = 0; i < state_floats; ++i) state[delta_key(i) * dim] = s[i];
  cluster_wait();  // also: all have read the tails that they share
#pragma unroll
  for (int i = 0; i < each; ++i)
    if (place(i) < 2 * dim && place(i) % dim / block_columns == part)
      head[i].store_past(a, tail, channel_of(i));
  const float r = rms_factor(outs[member], dim, a.eps);
  if (lane_id() < delta_columns) {
    a.y[at * dim + column] = out * r * gain * activate(a.act, z);
    value.store_past(a, tail, value_channel);
  }
}

void gated_delta_cluster(const NetArgs& a, std::int64_t chunks, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.key_heads * cluster_blocks),
                  static_cast<unsigned>(chunks));
  launch_clusters(gated_delta_net_kernel, grid, threads, cluster_blocks, 0, stream, a);
}

constexpr std::int64_t least_ring_sequences = 8;  // fewer leave multiprocessors without a key head
constexpr std::int64_t most_cluster_sequences = 16;  // the three ops move more states faster

bool takes(const GatedDeltaNet& op, const Context& c) {
  return c.one_row_chunks && op.key_dim == dim && op.value_dim == dim && op.kernel == taps &&
         op.value_heads == group * op.key_heads && overlaps_launches();
}

}  // namespace

void run(const GatedDeltaNet& op, const Context& c) {
  if (c.most_chunks == 0) return;
  if (takes(op, c)) {
    const NetArgs a{c.step,
                    c.f32(op.x),
                    c.f32(op.z),
                    c.f32(op.alpha),
                    c.f32(op.b),
                    c.vector(op.conv),
                    c.vector(op.a),
                    c.vector(op.dt),
                    c.vector(op.norm),
                    c.f32(op.y),
                    c.cols(op.x),
                    op.conv_state,
                    op.delta_state,
                    static_cast<int>(op.key_heads),
                    static_cast<int>(op.value_heads),
                    op.eps,
                    op.act};
    if (c.most_chunks >= least_ring_sequences && has_gated_delta_ring(a))
      return gated_delta_ring(a, c.most_chunks, c.stream);
    if (c.most_chunks <= most_cluster_sequences)
      return gated_delta_cluster(a, c.most_chunks, c.stream);
  }
  run(op.conv_op(), c);
  run(op.delta_op(), c);
  run(op.norm_op(), c);
}

}  // namespace imp::cuda
