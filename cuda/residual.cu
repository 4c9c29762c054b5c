// Gated residual streams.
#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

// One block per group of a row.
__global__ void __launch_bounds__(block_threads)
    group_norm_kernel(const float* x, const float* w, float* y, std::int64_t groups, int n,
                      float eps) {
  const std::int64_t at = blockIdx.x * static_cast<std::int64_t>(n);
  const float* gains = w + blockIdx.x % groups * n;
  float squares = 0;
  for (int i = threadIdx.x; i < n; i += block_threads)
    squares = fmaf(x[at + i], x[at + i], squares);
  const float r = 1.0f / sqrtf(block_sum<block_threads>(squares) / static_cast<float>(n) + eps);
  for (int i = threadIdx.x; i < n; i += block_threads) y[at + i] = x[at + i] * r * gains[i];
}

__global__ void residual_mix_kernel(const float* n, const float* gate, float* x,
                                    std::int64_t streams, std::int64_t hidden,
                                    std::int64_t elements) {
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
  const std::int64_t i = global_thread();
  if (i >= elements) return;
  const std::int64_t t = i / (streams * hidden), stream = i / hidden % streams;
  r[i] = fmaf(2 * s[t * streams + stream], y[t * hidden + i % hidden], r[i]);
}

}  // namespace

void run(const GroupNorm& op, const Context& c) {
  const std::int64_t parts = c.rows(op.x) * op.groups;
  if (parts == 0) return;
  group_norm_kernel<<<static_cast<unsigned>(parts), block_threads, 0, c.stream>>>(
      c.f32(op.x), c.vector(op.w), c.f32(op.y), op.groups,
      static_cast<int>(c.cols(op.x) / op.groups), op.eps);
  check_launch("GroupNorm");
}

void run(const ResidualMix& op, const Context& c) {
  const std::int64_t n = c.rows(op.x) * c.cols(op.x);
  if (n == 0) return;
  residual_mix_kernel<<<blocks_for(n), block_threads, 0, c.stream>>>(
      c.f32(op.n), c.f32(op.gate), c.f32(op.x), op.streams, c.cols(op.x), n);
  check_launch("ResidualMix");
}

void run(const ResidualInject& op, const Context& c) {
  const std::int64_t n = c.rows(op.r) * c.cols(op.r);
  if (n == 0) return;
  residual_inject_kernel<<<blocks_for(n), block_threads, 0, c.stream>>>(
      c.f32(op.r), c.f32(op.y), c.f32(op.s), c.cols(op.s), c.cols(op.y), n);
  check_launch("ResidualInject");
}

}  // namespace imp::cuda
