// The write and the next read of the residual streams for a few rows, in the two kernels of
// residual_read.cu but on tensor cores: a row's result does not depend on how many there are.
#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/products.cuh"
#include "cuda/launch.h"
#include "cuda/residual_read.h"

namespace imp::cuda {
namespace {

constexpr int streams = read_streams;
constexpr int warps = 8, threads = 32 * warps;

// ---------------------------------------------------------------- low rank and new gates

constexpr int down_tiles = 2, down_rows = down_tiles * tile_rows;
constexpr int halves = 2, ranks = streams * halves;  // of a cluster: each has half of a stream
static_assert(ranks == tile_tokens);                 // and ends one token

struct DownShared {
  float sums[warps][tile_tokens][down_rows + 4], squares[warps][tile_tokens];
  float parts[ranks][down_rows], part_squares[ranks];  // of this block's token, from all ranks
};

// A cluster's rows of `m`: since a norm's factor is one number for a stream of a token,
// sum_i m_i n_i = factor * sum_i m_i w_i r_i.
template <class F>
__device__ __forceinline__ void down_part(const ReadArgs& a, const Matrix& m, int n0, int t0,
                                          Act act, float* to, DownShared& shared) {
  constexpr int ahead = sizeof(typename F::Raw) > 16 ? 3 : 5;
  const int rank = static_cast<int>(blockIdx.x) % ranks, stream = rank / halves;
  const int g = lane_id() / 4, c = lane_id() % 4;
  const int groups = a.hidden / group_columns;
  const int slice = rank % halves * warps + warp_id();
  const int first = groups * slice / (halves * warps),
            last = groups * (slice + 1) / (halves * warps);
  Row rows[down_tiles][2];
#pragma unroll
  for (int i = 0; i < down_tiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Row whole =
          row_of(m, min(static_cast<std::int64_t>(n0 + i * tile_rows + 8 * h + g), m.rows - 1));
      rows[i][h] = {whole.data + stream * m.row_bytes / streams,
                    whole.scales + stream * m.scale_row_bytes / streams};
    }
  typename F::Raw raw[ahead][down_tiles][2];
  const auto load = [&](typename F::Raw(&to)[down_tiles][2], int group) {
    if (group >= last) return;
#pragma unroll
    for (int i = 0; i < down_tiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) to[i][h] = F::load(rows[i][h], group_units * group + c);
  };
#pragma unroll
  for (int i = 0; i < ahead; ++i) load(raw[i], first + i);
  extern __shared__ float4 gain_memory[];
  float* gains = reinterpret_cast<float*>(gain_memory) +
                 (first - groups * (slice - warp_id()) / (halves * warps)) * group_columns;
  for (int i = 4 * lane_id(); i < (last - first) * group_columns; i += 4 * 32)
    copy_async(gains + i, a.w + stream * a.hidden + first * group_columns + i, true);
  end_group();

  begin();
  const std::int64_t t = min(t0 + g, a.rows - 1);
  const int column = c * unit_elems;  // of a group
  const float* r = a.r + (t * streams + stream) * a.hidden + column;
  const float* y = a.y + t * a.hidden + column;
  const float twice = 2 * a.s[t * streams + stream];
  struct Unit {
    float4 r[2], y[2];
  };
  Unit units[ahead];
  const auto load_x = [&](Unit& to, int group) {
    if (group >= last) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = group * group_columns + 4 * h;
      to.r[h] = *reinterpret_cast<const float4*>(r + at);
      to.y[h] = *reinterpret_cast<const float4*>(y + at);
    }
  };
#pragma unroll
  for (int i = 0; i < ahead; ++i) load_x(units[i], first + i);
  float acc[down_tiles][4] = {}, squares = 0;
  const auto gained = [&](const Unit& unit, int h, int group) {
    const float4 gain =
        *reinterpret_cast<const float4*>(gains + (group - first) * group_columns + column + 4 * h);
    const float4 v = {fmaf(twice, unit.y[h].x, unit.r[h].x), fmaf(twice, unit.y[h].y, unit.r[h].y),
                      fmaf(twice, unit.y[h].z, unit.r[h].z), fmaf(twice, unit.y[h].w, unit.r[h].w)};
    squares = fmaf(v.x, v.x, squares);
    squares = fmaf(v.y, v.y, squares);
    squares = fmaf(v.z, v.z, squares);
    squares = fmaf(v.w, v.w, squares);
    return float4{v.x * gain.x, v.y * gain.y, v.z * gain.z, v.w * gain.w};
  };
  wait_groups<0>();
  __syncwarp();  // the warp's gains are there
  for (int i0 = first; i0 < last; i0 += ahead)
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (i0 + i >= last) break;
      const auto x = Products<F>::split(gained(units[i], 0, i0 + i), gained(units[i], 1, i0 + i));
      load_x(units[i], i0 + i + ahead);
#pragma unroll
      for (int j = 0; j < down_tiles; ++j) Products<F>::add(acc[j], raw[i][j], x);
      load(raw[i], i0 + i + ahead);
    }

  squares += __shfl_xor_sync(all_lanes, squares, 1);
  squares += __shfl_xor_sync(all_lanes, squares, 2);
  if (c == 0) shared.squares[warp_id()][g] = squares;
#pragma unroll
  for (int j = 0; j < down_tiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      shared.sums[warp_id()][2 * c + e % 2][j * tile_rows + e / 2 * 8 + g] = acc[j][e];
  __syncthreads();
  cluster_wait();  // all blocks have started
  const int row = static_cast<int>(threadIdx.x) % down_rows,
            token = static_cast<int>(threadIdx.x) / down_rows;
  static_assert(threads == down_rows * tile_tokens);
  float total = 0;
#pragma unroll
  for (int i = 0; i < warps; ++i) total += shared.sums[i][token][row];
  store_remote(&shared.parts[rank][row], token, total);
  if (threadIdx.x < tile_tokens) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) all += shared.squares[i][threadIdx.x];
    store_remote(&shared.part_squares[rank], threadIdx.x, all);
  }
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x >= down_rows || t0 + rank >= a.rows) return;
  const std::int64_t mine = t0 + rank;
  total = 0;
#pragma unroll
  for (int s = 0; s < streams; ++s) {
    const float all = shared.part_squares[halves * s] + shared.part_squares[halves * s + 1];
    const float factor = 1.0f / sqrtf(all / static_cast<float>(a.hidden) + a.eps);
    total = fmaf(factor, shared.parts[halves * s][row] + shared.parts[halves * s + 1][row], total);
    if (to == a.low && n0 == 0 && row == s) a.factors[mine * streams + s] = factor;
  }
  if (n0 + row < m.rows)
    to[mine * m.rows + n0 + row] = activate(act, m.scale * total * (1.0f / streams));
}

// grid (ranks * groups of tokens * groups of rows): first the low rank's, then the gates'.
__global__ void __launch_bounds__(threads, 1)
    read_down_rows_kernel(const __grid_constant__ ReadArgs a, int token_groups) {
  __shared__ DownShared shared;
  cluster_started();
  const int cluster = static_cast<int>(blockIdx.x) / ranks, group = cluster / token_groups;
  const int low_groups = static_cast<int>(div_up(a.down.rows, down_rows));
  const int t0 = cluster % token_groups * tile_tokens;
  const bool gates = group >= low_groups;
  const Matrix& m = gates ? a.inject : a.down;
  with_products(m.type, [&]<class F>(F) {
    down_part<F>(a, m, (gates ? group - low_groups : group) * down_rows, t0,
                 gates ? Act::sigmoid : Act::silu, gates ? a.next_s : a.low, shared);
  });
}

// ---------------------------------------------------------------- mix

// A block has a tile of elements; its warps share the streams and halves of the columns.
template <class F>
__global__ void __launch_bounds__(threads)
    read_mix_rows_kernel(const __grid_constant__ ReadArgs a, int token_groups) {
  constexpr int ahead = sizeof(typename F::Raw) > 16 ? 2 : 5;
  __shared__ float gates[warps / streams][streams][tile_tokens][tile_rows + 4];
  const int g = lane_id() / 4, c = lane_id() % 4;
  const int i0 = static_cast<int>(blockIdx.x) / token_groups * tile_rows;
  const int t0 = static_cast<int>(blockIdx.x) % token_groups * tile_tokens;
  const int units = static_cast<int>(a.up.cols / unit_elems);
  const int groups = static_cast<int>(div_up(units, group_units));
  const int slice = warp_id() / streams, slices = warps / streams;
  const int first = groups * slice / slices, last = groups * (slice + 1) / slices;
  const std::int64_t row = static_cast<std::int64_t>(warp_id() % streams) * a.hidden + i0 + g;
  const Row rows[2] = {row_of(a.up, row), row_of(a.up, row + 8)};
  typename F::Raw raw[ahead][2];
  const auto load = [&](typename F::Raw(&to)[2], int group) {
    if (group >= last) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) to[h] = F::load(rows[h], min(group_units * group + c, units - 1));
  };
#pragma unroll
  for (int i = 0; i < ahead; ++i) load(raw[i], first + i);
  // What this thread mixes: an element of two streams; its neighbour has the other two.
  constexpr int own = streams / 2;
  const int token = static_cast<int>(threadIdx.x) / 32, element = lane_id() / 2;
  const int stream0 = lane_id() % 2 * own;
  float gain[own];
#pragma unroll
  for (int s = 0; s < own; ++s) gain[s] = a.w[(stream0 + s) * a.hidden + i0 + element];

  begin();
  const float* low = a.low + min(t0 + g, a.rows - 1) * a.up.cols + c * unit_elems;
  float4 values[ahead][2];
  const auto load_x = [&](float4(&to)[2], int group) {
    const bool there = group < last && group_units * group + c < units;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      to[h] =
          there ? *reinterpret_cast<const float4*>(low + group * group_columns + 4 * h) : float4{};
  };
#pragma unroll
  for (int i = 0; i < ahead; ++i) load_x(values[i], first + i);
  const std::int64_t t = min(t0 + token, a.rows - 1);
  const float y = a.y[t * a.hidden + i0 + element];
  float r[own], factor[own];
#pragma unroll
  for (int s = 0; s < own; ++s) {
    const std::int64_t at = t * streams + stream0 + s;
    r[s] = fmaf(2 * a.s[at], y, a.r[at * a.hidden + i0 + element]);
    factor[s] = a.factors[at];
  }
  float acc[4] = {};
  for (int j0 = first; j0 < last; j0 += ahead)
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (j0 + j >= last) break;
      Products<F>::add(acc, raw[j], Products<F>::split(values[j][0], values[j][1]));
      load(raw[j], j0 + j + ahead);
      load_x(values[j], j0 + j + ahead);
    }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    gates[slice][warp_id() % streams][2 * c + e % 2][e / 2 * 8 + g] = acc[e];
  __syncthreads();
  float mixed = 0;
#pragma unroll
  for (int s = 0; s < own; ++s) {
    float gate = 0;
#pragma unroll
    for (int i = 0; i < slices; ++i) gate += gates[i][stream0 + s][token][element];
    mixed = fmaf(sigmoid(a.up.scale * gate), r[s] * factor[s] * gain[s], mixed);
  }
  mixed += __shfl_xor_sync(all_lanes, mixed, 1);
  if (t0 + token >= a.rows) return;
#pragma unroll
  for (int s = 0; s < own; ++s) a.r[(t * streams + stream0 + s) * a.hidden + i0 + element] = r[s];
  if (stream0 == 0) a.x[t * a.hidden + i0 + element] = mixed * (1.0f / streams);
}

}  // namespace

bool has_read_rows(const ReadArgs& a) {
  return a.rows <= most_read_rows && a.hidden <= most_read_hidden && has_products(a.down) &&
         has_products(a.inject) && has_products(a.up);
}

void run_read_rows(const ReadArgs& a, cudaStream_t stream) {
  const int token_groups = static_cast<int>(div_up(a.rows, tile_tokens));
  const auto groups = div_up(a.down.rows, down_rows) + div_up(a.inject.rows, down_rows);
  const auto gains =
      static_cast<std::size_t>(div_up(a.hidden / group_columns, halves) * group_columns) * 4;
  launch_clusters(read_down_rows_kernel, static_cast<unsigned>(groups * token_groups * ranks),
                  threads, ranks, gains, stream, a, token_groups);
  with_products(a.up.type, [&]<class F>(F) {
    launch(read_mix_rows_kernel<F>, static_cast<unsigned>(a.hidden / tile_rows * token_groups),
           threads, 0, stream, a, token_groups);
  });
}

}  // namespace imp::cuda
