// The gated delta-net of decode steps of many sequences at the released shape, in one kernel. A
// block takes a sequence's key head with its value heads one by one, and another when it is done.
// A state is in the block's registers as a whole; part by part the new one leaves and the next
// head's takes its place, so that memory reads and writes at the same time. Bits are those of the
// three ops.
#include <algorithm>

#include "cuda/common/delta.cuh"
#include "cuda/device.h"
#include "cuda/gated_delta_net.h"
#include "cuda/launch.h"

namespace imp::cuda {
namespace {

using delta_net::dim, delta_net::group;
constexpr int threads = 256, processor_blocks = 2;
constexpr int columns = 2;  // of a lane
constexpr int slices = 4, quads = dim / slices / 4;
constexpr int slice_warps = dim / (32 * columns);
static_assert(32 * slices * slice_warps == threads && slices * delta_columns == 32);

// A key head of a chunk.
struct Unit {
  float *state, *tail;  // of its first value head; of the convolution
  std::int64_t row;
  int key_head;
};

__device__ __forceinline__ Unit unit_at(const NetArgs& a, int i) {
  const ChunkView& chunk = a.step.chunks[i / a.key_heads];
  const int head = i % a.key_heads;
  return {a.step.state_at(chunk, a.delta_state) + static_cast<std::int64_t>(head) * (dim * dim),
          a.step.state_at(chunk, a.conv_state), chunk.row, head};
}

// Of four keys that adjoin. Nobody reads states again in this step: they need not stay in caches.
using Quad = float2[4];
__device__ __forceinline__ void load(Quad& quad, const float* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) quad[i] = __ldcs(reinterpret_cast<const float2*>(from + i * dim));
}
__device__ __forceinline__ void store(float* to, const Quad& quad) {
#pragma unroll
  for (int i = 0; i < 4; ++i) __stcs(reinterpret_cast<float2*>(to + i * dim), quad[i]);
}

__device__ __forceinline__ float over_slices(const float (&part)[slices][dim], int column) {
  return (part[0][column] + part[2][column]) + (part[1][column] + part[3][column]);
}

__global__ void __launch_bounds__(threads, processor_blocks)
    gated_delta_stream_kernel(const __grid_constant__ NetArgs a) {
  __shared__ alignas(16) float heads[2 + group][dim];  // convolved: query, key, values
  __shared__ alignas(8) float predicted[slices][dim], outs[slices][dim];
  __shared__ float out[dim], decays[group], betas[group];
  const int units = *a.step.n_chunks * a.key_heads;
  const int first = static_cast<int>(blockIdx.x), stride = static_cast<int>(gridDim.x);
  if (first >= units) return begin();
  const std::int64_t member_floats = static_cast<std::int64_t>(a.key_heads) * (dim * dim);
  const int slice = warp_id() / slice_warps;
  const int column = columns * (warp_id() % slice_warps * 32 + lane_id());
  const int own = 4 * slice * dim + column;      // the thread's first element of a state
  constexpr int quad_floats = 4 * slices * dim;  // to its next quad
  Quad state[quads];
#pragma unroll
  for (int m = 0; m < quads; ++m) load(state[m], unit_at(a, first).state + own + m * quad_floats);

  for (int at = first; at < units; at += stride) {
    const Unit unit = unit_at(a, at);
    const float* const next = at + stride < units ? unit_at(a, at + stride).state + own : nullptr;
    constexpr int each = div_up((2 + group) * dim, threads);
    const auto place = [](int i) { return static_cast<int>(threadIdx.x) + i * threads; };
    const auto inside = [&](int i) { return place(i) < (2 + group) * dim; };
    const auto channel_of = [&](int i) {
      return (unit.key_head + place(i) / dim * a.key_heads) * dim + place(i) % dim;
    };
    Channel channel[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i)) channel[i].load_past(a, unit.tail, channel_of(i));
    if (at == first) begin();  // states and tails are this op's alone
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i)) channel[i].x = a.x[unit.row * a.channels + channel_of(i)];
    if (threadIdx.x < group) {
      const int u = unit.key_head + static_cast<int>(threadIdx.x) * a.key_heads;
      const std::int64_t i = unit.row * a.value_heads + u;
      const float alpha = a.alpha[i], b = a.b[i];
      decays[threadIdx.x] = delta_decay(a.a[u], alpha, a.dt[u]);
      betas[threadIdx.x] = sigmoid(b);
    }
    // Weights are near, and all at once they would not fit into registers beside a state.
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i)) {
        channel[i].load_weights(a, channel_of(i));
        heads[place(i) / dim][place(i) % dim] = channel[i].result();
      }
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i)) channel[i].store_past(a, unit.tail, channel_of(i));
    __syncthreads();
    if (warp_id() < 2)
      normed_head(heads[warp_id()], dim, warp_id() == 0 ? 1 / sqrtf(static_cast<float>(dim)) : 1,
                  heads[warp_id()], dim);
    __syncthreads();
    const auto quad = [&](int head, int m) {
      return reinterpret_cast<const float4*>(heads[head])[slices * m + slice];
    };
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      // The last of a head, by a warp of its own.
      const bool ends = warp_id() == 1 + member;
      const std::int64_t y =
          (unit.row * a.value_heads + unit.key_head + member * a.key_heads) * dim + lane_id();
      float z[dim / 32];
      if (ends)
#pragma unroll
        for (int i = 0; i < dim / 32; ++i) z[i] = a.z[y + 32 * i];

      float* const to = unit.state + member * member_floats + own;
      const float* const from = member + 1 < group ? to + member_floats : next;
      float2 sum{0, 0};
#pragma unroll
      for (int m = 0; m < quads; ++m) {
        const float4 key = quad(1, m);
        const float k[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 s = state[m][i];
          sum = {fmaf(k[i], s.x, sum.x), fmaf(k[i], s.y, sum.y)};
        }
      }
      *reinterpret_cast<float2*>(&predicted[slice][column]) = sum;
      __syncthreads();
      const float decay = decays[member], beta = betas[member];
      const auto change_of = [&](int i) {
        return beta * fmaf(-decay, over_slices(predicted, i), heads[2 + member][i]);
      };
      const float2 change{change_of(column), change_of(column + 1)};
      sum = {0, 0};
      const auto load_next = [&](int m) {
        if (from != nullptr) load(state[m], from + m * quad_floats);
      };
#pragma unroll
      for (int m = 0; m < quads; ++m) {
        const float4 key = quad(1, m), query = quad(0, m);
        const float k[4] = {key.x, key.y, key.z, key.w};
        const float q[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2& s = state[m][i];
          s = {fmaf(k[i], change.x, decay * s.x), fmaf(k[i], change.y, decay * s.y)};
          sum = {fmaf(q[i], s.x, sum.x), fmaf(q[i], s.y, sum.y)};
        }
        store(to + m * quad_floats, state[m]);
        if (m > 0) load_next(m - 1);  // the stores before have read their registers by now
      }
      load_next(quads - 1);
      *reinterpret_cast<float2*>(&outs[slice][column]) = sum;
      __syncthreads();
      if (ends) {
#pragma unroll
        for (int i = lane_id(); i < dim; i += 32) out[i] = over_slices(outs, i);
        __syncwarp();
        const float r = rms_factor(out, dim, a.eps);
#pragma unroll
        for (int i = 0; i < dim / 32; ++i) {
          const int j = lane_id() + 32 * i;
          a.y[y + 32 * i] = out[j] * r * a.norm[j] * activate(a.act, z[i]);
        }
      }
    }
  }
}

}  // namespace

void gated_delta_stream(const NetArgs& a, std::int64_t chunks, cudaStream_t stream) {
  const auto blocks =
      std::min<std::int64_t>(processor_blocks * limits().processors, chunks * a.key_heads);
  launch(gated_delta_stream_kernel, static_cast<unsigned>(blocks), threads, 0, stream, a);
}

}  // namespace imp::cuda
