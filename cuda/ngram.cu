// The n-gram block's gate and dilated convolution.
#include "cuda/check.h"
#include "cuda/common/history.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

struct GateArgs {
  const float *r, *key, *v;  // [T, streams * n], [T, streams * n], [T, n]
  const float *w_key, *w_query, *w_conv;
  float *value, *normed;
  std::int64_t streams;
  int n;
  float eps;
};

// One block per stream of a token.
constexpr int gate_threads = 640;
__global__ void __launch_bounds__(gate_threads) ngram_gate_kernel(const GateArgs a) {
  begin();
  const std::int64_t at = blockIdx.x * static_cast<std::int64_t>(a.n);
  const std::int64_t gains = blockIdx.x % a.streams * a.n;
  const float* v = a.v + blockIdx.x / a.streams * a.n;
  const auto total = [&](auto element) {
    float sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < a.n; i += gate_threads) sum += element(i);
    return block_sum<gate_threads>(sum);
  };
  const auto inverse_rms = [&](float squares) {
    return 1.0f / sqrtf(squares / static_cast<float>(a.n) + a.eps);
  };
  const float k = inverse_rms(total([&](int i) { return a.key[at + i] * a.key[at + i]; }));
  const float q = inverse_rms(total([&](int i) { return a.r[at + i] * a.r[at + i]; }));
  const float u =
      total([&](int i) {
        return a.key[at + i] * k * a.w_key[gains + i] * (a.r[at + i] * q * a.w_query[gains + i]);
      }) /
      sqrtf(static_cast<float>(a.n));
  const float sign = u > 0 ? 1.0f : u < 0 ? -1.0f : u;  // 0 stays 0, NaN stays NaN
  const float gate = sigmoid(sign * sqrtf(fmaxf(fabsf(u), ngram_gate_floor)));
  const float n = inverse_rms(total([&](int i) { return gate * v[i] * (gate * v[i]); }));
#pragma unroll 4
  for (int i = threadIdx.x; i < a.n; i += gate_threads) {
    a.value[at + i] = gate * v[i];
    a.normed[at + i] = gate * v[i] * n * a.w_conv[gains + i];
  }
}

struct DilatedArgs {
  StepView step;
  float* r;
  const float *value, *n, *w;
  std::int64_t channels, state;
  int kernel, dilation;
};

// A thread per channel of a chunk. grid (chunks, channels)
__global__ void ngram_conv_kernel(const DilatedArgs a) {
  begin();
  const std::int64_t channel = blockIdx.y * static_cast<std::int64_t>(block_threads) + threadIdx.x;
  if (channel >= a.channels || blockIdx.x >= *a.step.n_chunks) return;
  const ChunkView& chunk = a.step.chunks[blockIdx.x];
  const std::int64_t first = chunk.row * a.channels + channel;
  const Column column{a.n + first, a.step.state_at(chunk, a.state) + channel, a.channels,
                      (a.kernel - 1) * a.dilation};
  for (int i = 0; i < chunk.rows; ++i) {
    float sum = 0;
    for (int j = 0; j < a.kernel; ++j)
      sum =
          fmaf(a.w[j * a.channels + channel], column.at(i - (a.kernel - 1 - j) * a.dilation), sum);
    const std::int64_t at = first + i * a.channels;
    a.r[at] += silu(sum) + a.value[at];
  }
  column.advance(chunk.rows);
}

}  // namespace

void run(const NgramGate& op, const Context& c) {
  const std::int64_t parts = c.rows(op.r) * op.streams;
  if (parts == 0) return;
  launch(ngram_gate_kernel, static_cast<unsigned>(parts), gate_threads, 0, c.stream,
         GateArgs{c.f32(op.r), c.f32(op.key), c.f32(op.v), c.vector(op.w_key), c.vector(op.w_query),
                  c.vector(op.w_conv), c.f32(op.value), c.f32(op.n), op.streams,
                  static_cast<int>(c.cols(op.v)), op.eps});
}

void run(const NgramConv& op, const Context& c) {
  if (c.most_chunks == 0) return;
  const dim3 grid(static_cast<unsigned>(c.most_chunks), blocks_for(c.cols(op.n)));
  launch(
      ngram_conv_kernel, grid, block_threads, 0, c.stream,
      DilatedArgs{c.step, c.f32(op.r), c.f32(op.value), c.f32(op.n), c.vector(op.w), c.cols(op.n),
                  op.state, static_cast<int>(op.kernel), static_cast<int>(op.dilation)});
}

}  // namespace imp::cuda
