// Dense linear maps of few activation rows on tensor cores: weights go from memory straight into
// the registers that the products read (common/products.cuh), and wait there from before the
// step's inputs are there. The warps of a block have the same rows and a slice of the columns each.
//
// Which columns are added in which order depends on the weight alone: not on the number of
// activation rows, nor on the maps that share the launch.
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/products.cuh"
#include "cuda/launch.h"
#include "cuda/linear.h"

namespace imp::cuda {
namespace {

constexpr int warps = 8, threads = 32 * warps;

// A warp multiplies M tiles of weights with N tiles of activations, and has up to `Ahead` groups of
// columns of its weights in flight; a multiprocessor runs `Blocks` blocks.
template <int M, int N, int Ahead, int Blocks>
struct Shape {
  static constexpr int m = M, n = N, ahead = Ahead, blocks = Blocks;
  static constexpr int rows = M * tile_rows, tokens = N * tile_tokens;
  // The pitch keeps a warp's sums out of each other's banks.
  using Sums = float[warps][tokens][rows + 4];
};

template <class F, class S>
__device__ __forceinline__ void part_products(const LinearArgs& a, const LinearPart& p, int block,
                                              typename S::Sums& sums) {
  constexpr int M = S::m, N = S::n;
  constexpr int ahead = sizeof(typename F::Raw) > 16 ? (S::ahead + 2) / 4 : S::ahead;
  constexpr int x_ahead = ahead % 2 == 0 ? 2 : 1;
  const int g = lane_id() / 4, c = lane_id() % 4;
  const std::int64_t row0 = block * static_cast<std::int64_t>(S::rows);
  const std::int64_t t0 = static_cast<std::int64_t>(blockIdx.x % a.token_groups) * S::tokens;
  const int units = static_cast<int>(p.w.cols / unit_elems);
  const int groups = static_cast<int>(div_up(units, group_units));
  const int first = groups * warp_id() / warps, last = groups * (warp_id() + 1) / warps;

  // Rows past the end repeat the last one; their results are dropped.
  Row w[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      w[m][h] = row_of(p.w, min(row0 + m * tile_rows + 8 * h + g, p.w.rows - 1));
  typename F::Raw raw[ahead][M][2];
  const auto load = [&](typename F::Raw(&to)[M][2], int group) {
    if (group >= last) return;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        to[m][h] = F::load(w[m][h], min(group_units * group + c, units - 1));
  };
#pragma unroll
  for (int i = 0; i < ahead; ++i) load(raw[i], first + i);

  begin();
  const float* x[N];
#pragma unroll
  for (int n = 0; n < N; ++n)
    x[n] = a.x + min(t0 + n * tile_tokens + g, a.rows - 1) * p.w.cols + c * unit_elems;
  float4 values[x_ahead][N][2];
  const auto load_x = [&](float4(&to)[N][2], int group) {
    const bool there = group < last && group_units * group + c < units;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        to[n][h] = there ? *reinterpret_cast<const float4*>(x[n] + group_columns * group + 4 * h)
                         : float4{};
  };
#pragma unroll
  for (int i = 0; i < x_ahead; ++i) load_x(values[i], first + i);

  float acc[M][N][4] = {};
  for (int i0 = first; i0 < last; i0 += ahead)
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (i0 + i < last)
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float4(&v)[2] = values[i % x_ahead][n];
          const auto unit = Products<F>::split(v[0], v[1]);
#pragma unroll
          for (int m = 0; m < M; ++m) Products<F>::add(acc[m][n], raw[i][m], unit);
        }
      load(raw[i], i0 + i + ahead);
      load_x(values[i % x_ahead], i0 + i + x_ahead);
    }

#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[warp_id()][n * tile_tokens + 2 * c + e % 2][m * tile_rows + e / 2 * 8 + g] =
            acc[m][n][e];
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < S::rows * S::tokens; e += threads) {
    const int row = e % S::rows, token = e / S::rows;
    if (row0 + row >= p.w.rows || t0 + token >= a.rows) continue;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) sum += sums[i][token][row];
    p.y[(t0 + token) * p.w.rows + row0 + row] = activate(p.act, p.alpha * sum);
  }
}

template <class S>
__global__ void __launch_bounds__(threads, S::blocks)
    linear_skinny_kernel(const __grid_constant__ LinearArgs a) {
  __shared__ typename S::Sums sums;
  const int block = static_cast<int>(blockIdx.x) / a.token_groups;
  int i = 0;
  while (i + 1 < a.n_parts && block >= a.parts[i + 1].first_block) ++i;
  const LinearPart& p = a.parts[i];
  with_products(p.w.type,
                [&]<class F>(F) { part_products<F, S>(a, p, block - p.first_block, sums); });
}

template <class S>
void launch_shape(LinearArgs a, cudaStream_t stream) {
  int blocks = 0;
  for (int i = 0; i < a.n_parts; ++i) {
    a.parts[i].first_block = blocks;
    blocks += static_cast<int>(div_up(a.parts[i].w.rows, S::rows));
  }
  a.token_groups = static_cast<int>(div_up(a.rows, S::tokens));
  launch(linear_skinny_kernel<S>, static_cast<unsigned>(blocks) * a.token_groups, threads, 0,
         stream, a);
}

}  // namespace

bool has_skinny(const Matrix& w) { return has_products(w); }

void run_skinny(const LinearArgs& a, cudaStream_t stream) {
  if (a.rows == 0 || a.n_parts == 0) return;
  if (a.rows <= 8) return launch_shape<Shape<1, 1, 4, 3>>(a, stream);
  if (a.rows <= 16) return launch_shape<Shape<2, 2, 2, 1>>(a, stream);
  launch_shape<Shape<1, 4, 2, 1>>(a, stream);
}

}  // namespace imp::cuda
