// Dense linear maps of one activation row, and of any number where the weights have no products on
// tensor cores (linear_mma.cu): a warp multiplies 4 weight rows with up to 8 activation rows;
// several warps share long rows.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

template <class F, int T, bool Whole>
__device__ __forceinline__ void part_rows(const LinearArgs& a, const LinearPart& p, int block) {
  constexpr int R = rows_at_once;
  const int group = warp_id() / p.split, part = warp_id() % p.split;
  const std::int64_t t0 = static_cast<std::int64_t>(blockIdx.x % a.token_groups) * T;
  const std::int64_t n0 = (static_cast<std::int64_t>(block) * (matvec_warps / p.split) + group) * R;
  // Rows past the end repeat the last one; their results are dropped.
  Row w[R];
#pragma unroll
  for (int r = 0; r < R; ++r) w[r] = row_of(p.w, min(n0 + r, p.w.rows - 1));
  prefetch_rows(w, p.w.row_bytes, part * 32 + lane_id(), p.split * 32);
  begin();
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.x + min(t0 + t, a.rows - 1) * p.w.cols;
  float acc[T][R] = {};
  if (n0 < p.w.rows)
    dot_rows<F, T, R, Whole>(w, x, static_cast<int>(p.w.cols), part * 32 + lane_id(), p.split * 32,
                             acc);
  float sum = sum_rows(acc);

  if (p.split > 1) {
    __shared__ float parts[matvec_warps][32];
    parts[warp_id()][lane_id()] = sum;
    __syncthreads();
    if (part != 0) return;
    sum = 0;
    for (int i = 0; i < p.split; ++i) sum += parts[warp_id() + i][lane_id()];
  }
  const std::int64_t t = t0 + lane_id() / R, n = n0 + lane_id() % R;
  if (lane_id() < T * R && t < a.rows && n < p.w.rows)
    p.y[t * p.w.rows + n] = activate(p.act, p.alpha * sum);
}

// All parts of one call: blocks find theirs.
template <int T, bool Whole>
__global__ void __launch_bounds__(32 * matvec_warps, T == 1 ? 3 : 2)
    linear_kernel(const __grid_constant__ LinearArgs a) {
  const int block = static_cast<int>(blockIdx.x) / a.token_groups;
  int i = 0;
  while (i + 1 < a.n_parts && block >= a.parts[i + 1].first_block) ++i;
  const LinearPart& p = a.parts[i];
  with_format(p.w.type, [&]<class F>(F) {
    if constexpr (Whole || !F::blocks) part_rows<F, T, Whole>(a, p, block - p.first_block);
  });
}

void launch_parts(LinearArgs& a, bool whole, cudaStream_t stream) {
  if (a.rows == 0 || a.n_parts == 0) return;
  int blocks = 0;
  for (int i = 0; i < a.n_parts; ++i) {
    LinearPart& p = a.parts[i];
    p.split = warps_per_row(p.w);
    p.first_block = blocks;
    blocks += static_cast<int>(div_up(div_up(p.w.rows, rows_at_once), matvec_warps / p.split));
  }
  const auto with = [&]<int T, bool Whole>() {
    a.token_groups = static_cast<int>(div_up(a.rows, T));
    launch(linear_kernel<T, Whole>, static_cast<unsigned>(blocks) * a.token_groups,
           32 * matvec_warps, 0, stream, a);
  };
  if (!whole) return with.template operator()<1, false>();
  if (a.rows == 1) return with.template operator()<1, true>();
  if (a.rows == 2) return with.template operator()<2, true>();
  if (a.rows <= 4) return with.template operator()<4, true>();
  with.template operator()<tokens_at_once, true>();
}

void run_matvec(const LinearArgs& args, cudaStream_t stream) {
  LinearArgs a{args.x, args.rows, 0, 0, {}};
  LinearArgs odd = a;  // rows that are not whole units
  for (int i = 0; i < args.n_parts; ++i) {
    LinearArgs& to = whole_units(args.parts[i].w) ? a : odd;
    to.parts[to.n_parts++] = args.parts[i];
  }
  launch_parts(a, true, stream);
  launch_parts(odd, false, stream);
}

__global__ void swiglu_kernel(const float* gate, const float* up, float* y, std::int64_t n) {
  begin();
  const std::int64_t i = global_thread();
  if (i < n) y[i] = silu(gate[i]) * up[i];
}

}  // namespace

// Enough warps to fill the device, but each with a whole pass. Depends on the weight alone, so that
// a row's bits do not depend on the batch.
int warps_per_row(const Matrix& w) {
  constexpr std::int64_t enough_warps = 2048;
  const std::int64_t groups = div_up(w.rows, rows_at_once), units = div_up(w.cols, unit_elems);
  int split = 1;
  while (split < matvec_warps && groups * split < enough_warps && units > 32 * split) split *= 2;
  return split;
}

void run(const Linears& op, const Context& c) {
  LinearArgs mma{c.f32(op.x), c.rows(op.x), 0, 0, {}};
  LinearArgs skinny = mma, a = mma;
  for (const Linears::Part& p : op.parts) {
    const Matrix& w = c.matrix(p.w);
    LinearArgs& to = takes_skinny(w, a.rows, c) ? skinny : on_tensor_cores(w, a.rows, c) ? mma : a;
    to.parts[to.n_parts++] = {w, c.f32(p.y), p.alpha * w.scale, p.act, 0, 1};
  }
  run_mma(run_large(mma, c), c.stream);
  run_skinny(skinny, c.stream);
  run_matvec(a, c.stream);
}

void run(const Linear& op, const Context& c) {
  run(Linears{op.x, {{op.w, op.y, op.alpha, op.act}}}, c);
}

void run_matvec(const Linear& op, const Context& c) {
  const Matrix& w = c.matrix(op.w);
  run_matvec(
      {c.f32(op.x), c.rows(op.x), 0, 1, {{w, c.f32(op.y), op.alpha * w.scale, op.act, 0, 1}}},
      c.stream);
}

void run(const SwiGlu& op, const Context& c) {
  const std::int64_t n = c.rows(op.y) * c.cols(op.y);
  if (n == 0) return;
  launch(swiglu_kernel, blocks_for(n), block_threads, 0, c.stream, c.f32(op.gate), c.f32(op.up),
         c.f32(op.y), n);
}

}  // namespace imp::cuda
