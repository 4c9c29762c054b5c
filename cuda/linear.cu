// Dense linear maps: a warp multiplies 4 weight rows with up to 8 activation rows; several warps
// share long rows. Right for decode steps; long prompts re-read the weights from the second cache.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

struct LinearArgs {
  Matrix w;
  const float* x;  // [T, w.cols]
  float* y;        // [T, w.rows]
  std::int64_t rows;
  std::int64_t token_groups;
  int split;  // warps that share a group of weight rows
  float alpha;
  Act act;
};

template <class F, int T, bool Whole>
__global__ void __launch_bounds__(32 * matvec_warps, 2) linear_kernel(const LinearArgs a) {
  constexpr int R = rows_at_once;
  const int group = warp_id() / a.split, part = warp_id() % a.split;
  const std::int64_t t0 = blockIdx.x % a.token_groups * T;
  const std::int64_t n0 = (blockIdx.x / a.token_groups * (matvec_warps / a.split) + group) * R;
  // Rows past the end repeat the last one; their results are dropped.
  Row w[R];
#pragma unroll
  for (int r = 0; r < R; ++r) w[r] = row_of(a.w, min(n0 + r, a.w.rows - 1));
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.x + min(t0 + t, a.rows - 1) * a.w.cols;
  float acc[T][R] = {};
  if (n0 < a.w.rows)
    dot_rows<F, T, R, Whole>(w, x, static_cast<int>(a.w.cols), part * 32 + lane_id(), a.split * 32,
                             acc);
  float sum = sum_rows(acc);

  if (a.split > 1) {
    __shared__ float parts[matvec_warps][32];
    parts[warp_id()][lane_id()] = sum;
    __syncthreads();
    if (part != 0) return;
    sum = 0;
    for (int i = 0; i < a.split; ++i) sum += parts[warp_id() + i][lane_id()];
  }
  const std::int64_t t = t0 + lane_id() / R, n = n0 + lane_id() % R;
  if (lane_id() < T * R && t < a.rows && n < a.w.rows)
    a.y[t * a.w.rows + n] = activate(a.act, a.alpha * sum);
}

// Warps per row group: enough to fill the device, but each with a whole pass. Depends on the
// weight alone, so that a row's bits do not depend on the batch.
int warps_per_row(const Matrix& w) {
  constexpr std::int64_t enough_warps = 2048;
  const std::int64_t groups = div_up(w.rows, rows_at_once), units = div_up(w.cols, unit_elems);
  int split = 1;
  while (split < matvec_warps && groups * split < enough_warps && units > 32 * split) split *= 2;
  return split;
}

template <class F, int T, bool Whole>
void launch(LinearArgs a, cudaStream_t stream) {
  a.token_groups = div_up(a.rows, T);
  const std::int64_t row_groups = div_up(a.w.rows, rows_at_once);
  const std::int64_t blocks = div_up(row_groups, matvec_warps / a.split) * a.token_groups;
  linear_kernel<F, T, Whole><<<static_cast<unsigned>(blocks), 32 * matvec_warps, 0, stream>>>(a);
}

__global__ void swiglu_kernel(const float* gate, const float* up, float* y, std::int64_t n) {
  const std::int64_t i = global_thread();
  if (i < n) y[i] = silu(gate[i]) * up[i];
}

}  // namespace

void run(const Linear& op, const Context& c) {
  const Matrix& w = c.matrix(op.w);
  const LinearArgs a{w, c.f32(op.x),      c.f32(op.y),        c.rows(op.x),
                     0, warps_per_row(w), op.alpha * w.scale, op.act};
  if (a.rows == 0) return;
  with_format(w.type, [&]<class F>(F) {
    if constexpr (!F::blocks)
      if (!whole_units(w)) return launch<F, 1, false>(a, c.stream);
    if (a.rows == 1) return launch<F, 1, true>(a, c.stream);
    if (a.rows == 2) return launch<F, 2, true>(a, c.stream);
    if (a.rows <= 4) return launch<F, 4, true>(a, c.stream);
    launch<F, tokens_at_once, true>(a, c.stream);
  });
  check_launch("Linear");
}

void run(const SwiGlu& op, const Context& c) {
  const std::int64_t n = c.rows(op.y) * c.cols(op.y);
  if (n == 0) return;
  swiglu_kernel<<<blocks_for(n), block_threads, 0, c.stream>>>(c.f32(op.gate), c.f32(op.up),
                                                               c.f32(op.y), n);
  check_launch("SwiGlu");
}

}  // namespace imp::cuda
