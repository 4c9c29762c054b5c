// Gated residual streams.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

constexpr int norm_threads = 640;

// One block per group of a row.
__global__ void __launch_bounds__(norm_threads)
    group_norm_kernel(const float* x, const float* w, float* y, std::int64_t groups, int n,
                      float eps) {
  begin();
  const std::int64_t at = blockIdx.x * static_cast<std::int64_t>(n);
  const float* gains = w + blockIdx.x % groups * n;
  float squares = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += norm_threads) squares = fmaf(x[at + i], x[at + i], squares);
  const float r = 1.0f / sqrtf(block_sum<norm_threads>(squares) / static_cast<float>(n) + eps);
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += norm_threads) y[at + i] = x[at + i] * r * gains[i];
}

__global__ void residual_mix_kernel(const float* n, const float* gate, float* x,
                                    std::int64_t streams, std::int64_t hidden,
                                    std::int64_t elements) {
  begin();
  const std::int64_t i = global_thread();
  if (i >= elements) return;
  const std::int64_t at = i / hidden * streams * hidden + i % hidden;
  float sum = 0;
  for (std::int64_t s = 0; s < streams; ++s)
    sum = fmaf(sigmoid(gate[at + s * hidden]), n[at + s * hidden], sum);
  x[i] = sum * (1.0f / static_cast<float>(streams));
}

__global__ void residual_inject_kernel(float* r, const float* y, const float* s,
                                       std::int64_t streams, std::int64_t hidden,
                                       std::int64_t elements) {
  begin();
  const std::int64_t i = global_thread();
  if (i >= elements) return;
  const std::int64_t t = i / (streams * hidden), stream = i / hidden % streams;
  r[i] = fmaf(2 * s[t * streams + stream], y[t * hidden + i % hidden], r[i]);
}

// A block per stream of a row: injects, then norms what it wrote, with the bits of the two alone.
// Threads do the work of two of the norm's, so that more streams are on their way at a time, and
// keep up to `kept` elements; longer streams are read again.
constexpr int inject_threads = norm_threads / 2;
__global__ void __launch_bounds__(inject_threads)
    inject_norm_kernel(float* r, const float* y, const float* s, const float* w, float* n,
                       std::int64_t streams, int hidden, float eps) {
  constexpr int kept = 8;
  const std::int64_t t = blockIdx.x / streams, stream = blockIdx.x % streams;
  float* to = r + blockIdx.x * static_cast<std::int64_t>(hidden);
  const float* gains = w + stream * hidden;
  const auto place = [](int j) { return static_cast<int>(threadIdx.x) + j * inject_threads; };
  float gain[kept];
#pragma unroll
  for (int j = 0; j < kept; ++j) gain[j] = place(j) < hidden ? gains[place(j)] : 0.0f;
  begin();
  const float factor = 2 * s[t * streams + stream];
  const float* from = y + t * hidden;
  float v[kept], squares[2] = {};
#pragma unroll
  for (int j = 0; j < kept; ++j)
    v[j] = place(j) < hidden ? fmaf(factor, from[place(j)], to[place(j)]) : 0.0f;
#pragma unroll
  for (int j = 0; j < kept; ++j) {
    if (place(j) < hidden) to[place(j)] = v[j];
    squares[j % 2] = fmaf(v[j], v[j], squares[j % 2]);
  }
#pragma unroll 2
  for (int j = kept; place(j) < hidden; ++j) {
    const float x = fmaf(factor, from[place(j)], to[place(j)]);
    to[place(j)] = x;
    squares[j % 2] = fmaf(x, x, squares[j % 2]);
  }
  const float scale =
      1.0f / sqrtf(block_sum<inject_threads>(squares) / static_cast<float>(hidden) + eps);
  float* out = n + blockIdx.x * static_cast<std::int64_t>(hidden);
#pragma unroll
  for (int j = 0; j < kept; ++j)
    if (place(j) < hidden) out[place(j)] = v[j] * scale * gain[j];
  for (int j = kept; place(j) < hidden; ++j) out[place(j)] = to[place(j)] * scale * gains[place(j)];
}

// 8 lanes take one element of all streams: as many weight rows, and their gated mean.
constexpr int mix_lanes = 8;
template <class F, int T, int Streams>
__global__ void __launch_bounds__(block_threads)
    linear_mix_kernel(const MixArgs a, int token_groups) {
  const int lane = threadIdx.x % mix_lanes;
  const std::int64_t t0 = static_cast<std::int64_t>(blockIdx.x % token_groups) * T;
  const std::int64_t i =
      blockIdx.x / token_groups * (block_threads / mix_lanes) + threadIdx.x / mix_lanes;
  Row w[Streams];
#pragma unroll
  for (int s = 0; s < Streams; ++s) w[s] = row_of(a.w, s * a.hidden + min(i, a.hidden - 1));
  prefetch_rows(w, a.w.row_bytes, lane, mix_lanes);
  begin();
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.low + min(t0 + t, a.rows - 1) * a.w.cols;
  float acc[T][Streams] = {};
  dot_rows<F, T, Streams, true>(w, x, static_cast<int>(a.w.cols), lane, mix_lanes, acc);
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int s = 0; s < Streams; ++s)
#pragma unroll
      for (int d = mix_lanes / 2; d > 0; d >>= 1)
        acc[t][s] += __shfl_xor_sync(all_lanes, acc[t][s], d);
    if (lane != t || t0 + t >= a.rows || i >= a.hidden) continue;
    const float* n = a.n + (t0 + t) * Streams * a.hidden + i;
    float sum = 0;
#pragma unroll
    for (int s = 0; s < Streams; ++s)
      sum = fmaf(sigmoid(a.w.scale * acc[t][s]), n[s * a.hidden], sum);
    a.x[(t0 + t) * a.hidden + i] = sum * (1.0f / Streams);
  }
}

}  // namespace

void run(const LinearMix& op, const Context& c) {
  const Matrix& w = c.matrix(op.w);
  if (op.streams != mix_streams || !whole_units(w)) {
    run(Linear{op.low, op.w, op.gate, 1, Act::none}, c);
    return run(ResidualMix{op.n, op.gate, op.streams, op.x}, c);
  }
  const MixArgs a{w, c.f32(op.low), c.f32(op.n), c.f32(op.x), c.rows(op.x), c.cols(op.x)};
  if (a.rows == 0) return;
  if (has_mma(w) && on_tensor_cores(w, a.rows, c)) {
    if (!run_large(a, c)) run_mma(a, c.stream);
    return;
  }
  with_format(w.type, [&]<class F>(F) {
    const auto with = [&]<int T>() {
      const int token_groups = static_cast<int>(div_up(a.rows, T));
      const std::int64_t blocks = div_up(a.hidden, block_threads / mix_lanes) * token_groups;
      launch(linear_mix_kernel<F, T, mix_streams>, static_cast<unsigned>(blocks), block_threads, 0,
             c.stream, a, token_groups);
    };
    if (a.rows == 1) return with.template operator()<1>();
    if (a.rows == 2) return with.template operator()<2>();
    if (a.rows <= 4) return with.template operator()<4>();
    with.template operator()<tokens_at_once>();
  });
}

void run(const InjectNorm& op, const Context& c) {
  const std::int64_t parts = c.rows(op.r) * c.cols(op.s);
  if (parts == 0) return;
  launch(inject_norm_kernel, static_cast<unsigned>(parts), inject_threads, 0, c.stream, c.f32(op.r),
         c.f32(op.y), c.f32(op.s), c.vector(op.w), c.f32(op.n), c.cols(op.s),
         static_cast<int>(c.cols(op.y)), op.eps);
}

void run(const GroupNorm& op, const Context& c) {
  const std::int64_t parts = c.rows(op.x) * op.groups;
  if (parts == 0) return;
  launch(group_norm_kernel, static_cast<unsigned>(parts), norm_threads, 0, c.stream, c.f32(op.x),
         c.vector(op.w), c.f32(op.y), op.groups, static_cast<int>(c.cols(op.x) / op.groups),
         op.eps);
}

void run(const ResidualMix& op, const Context& c) {
  const std::int64_t n = c.rows(op.x) * c.cols(op.x);
  if (n == 0) return;
  launch(residual_mix_kernel, blocks_for(n), block_threads, 0, c.stream, c.f32(op.n),
         c.f32(op.gate), c.f32(op.x), op.streams, c.cols(op.x), n);
}

void run(const ResidualInject& op, const Context& c) {
  const std::int64_t n = c.rows(op.r) * c.cols(op.r);
  if (n == 0) return;
  launch(residual_inject_kernel, blocks_for(n), block_threads, 0, c.stream, c.f32(op.r),
         c.f32(op.y), c.f32(op.s), c.cols(op.s), c.cols(op.y), n);
}

}  // namespace imp::cuda
