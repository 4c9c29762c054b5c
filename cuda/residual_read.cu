// The write and the next read of the residual streams for one row, in two kernels. Nobody stores
// what the streams are between them: r + 2 s_i y and its norm are computed where they are used.
// Rows of weights wait in registers from before the step's inputs are there.
#include "cuda/check.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/matvec.cuh"
#include "cuda/launch.h"
#include "cuda/residual_read.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

constexpr int streams = read_streams;

// ---------------------------------------------------------------- low rank and new gates

constexpr int down_rows = 4, down_threads = 160;  // two units of a stream of 2560 for each thread

// A cluster's rows of `m`, each block with its stream's columns: since a norm's factor is one
// number for a stream, sum_i m_i n_i = factor * sum_i m_i w_i r_i.
template <class F>
__device__ __forceinline__ void down_part(const ReadArgs& a, const Matrix& m, int n0, Act act,
                                          float* to) {
  constexpr int R = down_rows, ahead = sizeof(typename F::Raw) > 16 ? 1 : 2;
  const int stream = blockIdx.x % streams, units = a.hidden / unit_elems;
  const float* gains = a.w + stream * a.hidden;
  Row rows[R];
#pragma unroll
  for (int j = 0; j < R; ++j) {
    const Row whole = row_of(m, min(static_cast<std::int64_t>(n0 + j), m.rows - 1));
    rows[j] = {whole.data + stream * m.row_bytes / streams,
               whole.scales + stream * m.scale_row_bytes / streams};
  }
  struct Unit {
    typename F::Raw raw[R];
    float4 gain[2];
  };
  const auto load = [&](int u) {
    Unit unit;
#pragma unroll
    for (int j = 0; j < R; ++j) unit.raw[j] = F::load(rows[j], u);
    unit.gain[0] = *reinterpret_cast<const float4*>(gains + F::first(u));
    unit.gain[1] = *reinterpret_cast<const float4*>(gains + F::second(u));
    return unit;
  };
  Unit unit[ahead];
#pragma unroll
  for (int i = 0; i < ahead; ++i) unit[i] = load(min(threadIdx.x + i * down_threads, units - 1));

  begin();
  const float* r = a.r + stream * a.hidden;
  const float twice = 2 * a.s[stream];
  float acc[R] = {}, squares = 0;
  // Four of a unit's elements, gained.
  const auto gained = [&](int first, const float4& gain) {
    float4 v = *reinterpret_cast<const float4*>(r + first);
    const float4 y = *reinterpret_cast<const float4*>(a.y + first);
    v = {fmaf(twice, y.x, v.x), fmaf(twice, y.y, v.y), fmaf(twice, y.z, v.z),
         fmaf(twice, y.w, v.w)};
    squares = fmaf(v.x, v.x, squares);
    squares = fmaf(v.y, v.y, squares);
    squares = fmaf(v.z, v.z, squares);
    squares = fmaf(v.w, v.w, squares);
    return float4{v.x * gain.x, v.y * gain.y, v.z * gain.z, v.w * gain.w};
  };
  const auto add = [&](int u, const Unit& unit) {
    const float4 first = gained(F::first(u), unit.gain[0]),
                 second = gained(F::second(u), unit.gain[1]);
#pragma unroll
    for (int j = 0; j < R; ++j) {
      float v[unit_elems];
      F::decode(unit.raw[j], v);
      acc[j] = add_unit<F>(unit.raw[j], v, first, second, acc[j]);
    }
  };
#pragma unroll
  for (int i = 0; i < ahead; ++i)
    if (const int u = threadIdx.x + i * down_threads; u < units) add(u, unit[i]);
  for (int u = threadIdx.x + ahead * down_threads; u < units; u += down_threads) add(u, load(u));

  constexpr int warps = down_threads / 32;
  __shared__ float sums[warps][R], warp_squares[warps];
  __shared__ float shares[streams][R];  // of the first block: the streams' parts of its rows
  const float sum = warp_sums<R>(acc);
  squares = warp_sum(squares);
  if (lane_id() < R) sums[warp_id()][lane_id()] = sum;
  if (lane_id() == 0) warp_squares[warp_id()] = squares;
  __syncthreads();
  cluster_wait();  // all blocks have started
  if (threadIdx.x < R) {
    float total = 0, all_squares = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) {
      total += sums[i][threadIdx.x];
      all_squares += warp_squares[i];
    }
    const float factor = 1.0f / sqrtf(all_squares / static_cast<float>(a.hidden) + a.eps);
    store_remote(&shares[stream][threadIdx.x], 0, factor * total);
    if (blockIdx.x < streams && threadIdx.x == 0) a.factors[stream] = factor;
  }
  cluster_arrive();
  cluster_wait();
  if (stream != 0 || threadIdx.x >= R || n0 + threadIdx.x >= m.rows) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < streams; ++i) total += shares[i][threadIdx.x];
  to[n0 + threadIdx.x] = activate(act, m.scale * total * (1.0f / streams));
}

// grid (streams * groups of rows): first the low rank's, then the gates'.
__global__ void __launch_bounds__(down_threads, 4)
    read_down_kernel(const __grid_constant__ ReadArgs a) {
  cluster_started();
  const int group = static_cast<int>(blockIdx.x) / streams;
  const int low_groups = static_cast<int>(div_up(a.down.rows, down_rows));
  const bool gates = group >= low_groups;
  const Matrix& m = gates ? a.inject : a.down;
  with_format(m.type, [&]<class F>(F) {
    down_part<F>(a, m, (gates ? group - low_groups : group) * down_rows,
                 gates ? Act::sigmoid : Act::silu, gates ? a.next_s : a.low);
  });
}

// ---------------------------------------------------------------- mix

constexpr int mix_lanes = 8, mix_threads = 64;  // lanes of an element: a row of each stream

template <class F>
__global__ void __launch_bounds__(mix_threads) read_mix_kernel(const __grid_constant__ ReadArgs a) {
  constexpr int ahead = sizeof(typename F::Raw) > 16 ? 2 : 5;
  const int lane = threadIdx.x % mix_lanes;
  const int i = blockIdx.x * (mix_threads / mix_lanes) + threadIdx.x / mix_lanes;
  const int units = static_cast<int>(a.up.cols / unit_elems);
  Row rows[streams];
#pragma unroll
  for (int s = 0; s < streams; ++s) rows[s] = row_of(a.up, s * a.hidden + i);
  typename F::Raw raw[ahead][streams];
#pragma unroll
  for (int j = 0; j < ahead; ++j)
#pragma unroll
    for (int s = 0; s < streams; ++s)
      raw[j][s] = F::load(rows[s], min(lane + j * mix_lanes, units - 1));
  const int stream = lane % streams, at = stream * a.hidden + i;  // lanes of a stream agree
  const float gain = a.w[at];

  begin();
  const float r = fmaf(2 * a.s[stream], a.y[i], a.r[at]), factor = a.factors[stream];
  float acc[streams] = {};
  const auto add = [&](int u, const typename F::Raw(&of)[streams]) {
    const float4 first = *reinterpret_cast<const float4*>(a.low + F::first(u)),
                 second = *reinterpret_cast<const float4*>(a.low + F::second(u));
#pragma unroll
    for (int s = 0; s < streams; ++s) {
      float v[unit_elems];
      F::decode(of[s], v);
      acc[s] = add_unit<F>(of[s], v, first, second, acc[s]);
    }
  };
#pragma unroll
  for (int j = 0; j < ahead; ++j)
    if (lane + j * mix_lanes < units) add(lane + j * mix_lanes, raw[j]);
  for (int u = lane + ahead * mix_lanes; u < units; u += mix_lanes) {
#pragma unroll
    for (int s = 0; s < streams; ++s) raw[0][s] = F::load(rows[s], u);
    add(u, raw[0]);
  }
  float gate = acc[0];
#pragma unroll
  for (int s = 0; s < streams; ++s) {
#pragma unroll
    for (int d = mix_lanes / 2; d > 0; d >>= 1) acc[s] += __shfl_xor_sync(all_lanes, acc[s], d);
    if (s == stream) gate = acc[s];
  }
  float mixed = sigmoid(a.up.scale * gate) * (r * factor * gain);
  mixed += __shfl_xor_sync(all_lanes, mixed, 1);
  mixed += __shfl_xor_sync(all_lanes, mixed, 2);
  if (lane < streams) a.r[at] = r;
  if (lane == 0) a.x[i] = mixed * (1.0f / streams);
}

bool takes(const ResidualRead& op, const Context& c) {
  constexpr std::int64_t block = 64;  // elements: the largest of a format
  return !c.batch_invariant && op.streams == streams && c.cols(op.y) % block == 0 &&
         whole_units(c.matrix(op.up)) && overlaps_launches();
}

void run_row(const ReadArgs& a, cudaStream_t stream) {
  const auto groups = div_up(a.down.rows, down_rows) + div_up(a.inject.rows, down_rows);
  launch_clusters(read_down_kernel, static_cast<unsigned>(groups * streams), down_threads, streams,
                  0, stream, a);
  with_format(a.up.type, [&]<class F>(F) {
    launch(read_mix_kernel<F>, static_cast<unsigned>(a.hidden / (mix_threads / mix_lanes)),
           mix_threads, 0, stream, a);
  });
}

}  // namespace

void run(const ResidualRead& op, const Context& c) {
  ReadArgs a{c.f32(op.r),
             c.f32(op.y),
             c.f32(op.s),
             c.vector(op.w),
             c.matrix(op.down),
             c.matrix(op.inject),
             c.matrix(op.up),
             c.f32(op.low),
             c.f32(op.next_s),
             c.f32(op.n),
             c.f32(op.x),
             static_cast<int>(c.rows(op.r)),
             static_cast<int>(c.cols(op.y)),
             op.eps};  // factors are where n would be
  if (takes(op, c)) {
    if (a.rows == 1) return run_row(a, c.stream);
    if (has_read_rows(a)) return run_read_rows(a, c.stream);
  }
  run(op.inject_op(), c);
  run(op.down_op(), c);
  run(op.mix_op(), c);
}

}  // namespace imp::cuda
