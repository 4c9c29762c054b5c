// The gated delta-net of decode steps of many sequences at the released shape, in one kernel. A
// block takes a sequence's key head with its value heads, and another when it is done; their states
// come and go as a whole by bulk copies, so that memory reads and writes long runs while the block
// computes. Bits are those of the three ops.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/common/bulk.cuh"
#include "cuda/common/delta.cuh"
#include "cuda/device.h"
#include "cuda/gated_delta_net.h"
#include "cuda/launch.h"

namespace imp::cuda {
namespace {

using delta_net::dim, delta_net::group;
constexpr int threads = 256, columns = 2;  // of a lane
constexpr int slices = 4, slice_quads = dim / slices / 4;
constexpr int slice_warps = dim / (32 * columns);
constexpr std::uint32_t state_bytes = dim * dim * sizeof(float);
static_assert(32 * slices * slice_warps == threads && slices * delta_columns == 32);

struct Shared {
  float states[group][dim * dim];  // of the value heads: on their way in, here, on their way out
  float heads[2 + group][dim];     // convolved: query, key, values
  float predicted[slices][dim], out[slices][dim];
  float o[dim];
  float decay[group], beta[group];
  Barrier arrived[group];
};

__device__ __forceinline__ float over_slices(const float (&part)[slices][dim], int column) {
  return (part[0][column] + part[2][column]) + (part[1][column] + part[3][column]);
}

// A unit is a key head of a chunk. Blocks take them in turn.
__global__ void __launch_bounds__(threads, 1)
    gated_delta_ring_kernel(const __grid_constant__ NetArgs a) {
  extern __shared__ uint4 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int units = *a.step.n_chunks * a.key_heads;
  const int stride = static_cast<int>(gridDim.x);
  int unit = static_cast<int>(blockIdx.x);
  if (unit >= units) return begin();
  const auto chunk_of = [&](int i) -> const ChunkView& { return a.step.chunks[i / a.key_heads]; };
  const auto value_head = [&](int i, int member) { return i % a.key_heads + member * a.key_heads; };
  const auto state_of = [&](int i, int member) {
    return a.step.state_at(chunk_of(i), a.delta_state) +
           static_cast<std::int64_t>(value_head(i, member)) * (dim * dim);
  };
  const auto fetch = [&](int i, int member) {
    expect_bytes(s.arrived + member, state_bytes);
    bulk_copy(s.states[member], state_of(i, member), state_bytes, s.arrived + member);
  };
  if (threadIdx.x == 0) {
    init_barriers(s.arrived, group);
    for (int member = 0; member < group; ++member) fetch(unit, member);
  }
  constexpr int each = div_up((2 + group) * dim, threads);
  const auto place = [](int i) { return static_cast<int>(threadIdx.x) + i * threads; };
  const auto inside = [&](int i) { return place(i) < (2 + group) * dim; };
  const auto channel_of = [&](int u, int i) {
    return (u % a.key_heads + place(i) / dim * a.key_heads) * dim + place(i) % dim;
  };
  Channel channel[each];
  float alpha = 0, b = 0;  // of value head threadIdx.x
  const auto load_past = [&](int u) {
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i))
        channel[i].load_past(a, a.step.state_at(chunk_of(u), a.conv_state), channel_of(u, i));
  };
  const auto load_inputs = [&](int u) {
    const std::int64_t row = chunk_of(u).row;
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i)) channel[i].x = a.x[row * a.channels + channel_of(u, i)];
    if (threadIdx.x < group) {
      const std::int64_t at = row * a.value_heads + value_head(u, static_cast<int>(threadIdx.x));
      alpha = a.alpha[at], b = a.b[at];
    }
  };
  const int slice = warp_id() / slice_warps;
  const int column = columns * (warp_id() % slice_warps * 32 + lane_id());
  load_past(unit);
  begin();  // states and tails are this op's alone
  load_inputs(unit);

  for (int round = 0; unit < units; ++round, unit += stride) {
    const int next = unit + stride;
    float* tail = a.step.state_at(chunk_of(unit), a.conv_state);
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (inside(i)) {
        s.heads[place(i) / dim][place(i) % dim] = channel[i].result();
        channel[i].store_past(a, tail, channel_of(unit, i));
      }
    if (threadIdx.x < group) {
      const int u = value_head(unit, static_cast<int>(threadIdx.x));
      s.decay[threadIdx.x] = delta_decay(a.a[u], alpha, a.dt[u]);
      s.beta[threadIdx.x] = sigmoid(b);
    }
    __syncthreads();
    if (warp_id() < 2)
      normed_head(s.heads[warp_id()], dim, warp_id() == 0 ? 1 / sqrtf(static_cast<float>(dim)) : 1,
                  s.heads[warp_id()], dim);
    if (next < units) {  // their way is long
      load_past(next);
      load_inputs(next);
    }
    __syncthreads();
    const auto quad = [&](int head, int m) {
      return reinterpret_cast<const float4*>(s.heads[head])[slices * m + slice];
    };
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      // The last of a head, by a warp of its own.
      const bool ends = warp_id() == 1 + member;
      const std::int64_t head =
          static_cast<std::int64_t>(chunk_of(unit).row) * a.value_heads + value_head(unit, member);
      const std::int64_t y = head * dim + lane_id();
      float z[dim / 32];
      if (ends)
#pragma unroll
        for (int i = 0; i < dim / 32; ++i) z[i] = a.z[y + 32 * i];

      float* const state = s.states[member] + 4 * slice * dim + column;
      float2 held[4 * slice_quads];
      float2 sum{0, 0};
      await_phase(s.arrived + member, round & 1);
#pragma unroll
      for (int m = 0; m < slice_quads; ++m) {
        const float4 quad_k = quad(1, m);
        const float k[4] = {quad_k.x, quad_k.y, quad_k.z, quad_k.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2& v = held[4 * m + i];
          v = *reinterpret_cast<const float2*>(state + (4 * slices * m + i) * dim);
          sum = {fmaf(k[i], v.x, sum.x), fmaf(k[i], v.y, sum.y)};
        }
      }
      *reinterpret_cast<float2*>(&s.predicted[slice][column]) = sum;
      __syncthreads();
      const float decay = s.decay[member], beta = s.beta[member];
      const float* value = s.heads[2 + member];
      const auto change_of = [&](int i) {
        return beta * fmaf(-decay, over_slices(s.predicted, i), value[i]);
      };
      const float2 change{change_of(column), change_of(column + 1)};
      sum = {0, 0};
#pragma unroll
      for (int m = 0; m < slice_quads; ++m) {
        const float4 quad_k = quad(1, m), quad_q = quad(0, m);
        const float k[4] = {quad_k.x, quad_k.y, quad_k.z, quad_k.w};
        const float q[4] = {quad_q.x, quad_q.y, quad_q.z, quad_q.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2& v = held[4 * m + i];
          v = {fmaf(k[i], change.x, decay * v.x), fmaf(k[i], change.y, decay * v.y)};
          sum = {fmaf(q[i], v.x, sum.x), fmaf(q[i], v.y, sum.y)};
          *reinterpret_cast<float2*>(state + (4 * slices * m + i) * dim) = v;
        }
      }
      *reinterpret_cast<float2*>(&s.out[slice][column]) = sum;
      show_bulk_copies();
      __syncthreads();
      if (threadIdx.x == 0) {
        bulk_store(state_of(unit, member), s.states[member], state_bytes);
        // The head before has left by now; the one after next takes its place.
        await_stores_read<1>();
        if (member > 0 && next < units) fetch(next, member - 1);
        if (member == 0 && round > 0) fetch(unit, group - 1);
      }
      if (ends) {
#pragma unroll
        for (int i = lane_id(); i < dim; i += 32) s.o[i] = over_slices(s.out, i);
        __syncwarp();
        const float r = rms_factor(s.o, dim, a.eps);
#pragma unroll
        for (int i = 0; i < dim / 32; ++i) {
          const int at = lane_id() + 32 * i;
          a.y[y + 32 * i] = s.o[at] * r * a.norm[at] * activate(a.act, z[i]);
        }
      }
    }
  }
  if (threadIdx.x == 0) await_stores();
}

}  // namespace

bool has_gated_delta_ring(const NetArgs& a) {
  constexpr int floats = 4;  // of the 16 bytes that bulk copies move
  return sizeof(Shared) <= limits().block_shared && a.delta_state % floats == 0 &&
         a.step.state_stride % floats == 0;
}

void gated_delta_ring(const NetArgs& a, std::int64_t chunks, cudaStream_t stream) {
  check(cudaFuncSetAttribute(gated_delta_ring_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(Shared))),
        "cudaFuncSetAttribute");
  const auto blocks = std::min<std::int64_t>(limits().processors, chunks * a.key_heads);
  launch(gated_delta_ring_kernel, static_cast<unsigned>(blocks), threads, sizeof(Shared), stream,
         a);
}

}  // namespace imp::cuda
