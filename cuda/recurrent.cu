// Gated delta-net: causal convolution, delta rule, gated norm. State is read and written in place,
// in the rows that the step names.
#include "cuda/check.h"
#include "cuda/common/delta.cuh"
#include "cuda/common/history.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

struct ConvArgs {
  StepView step;
  const float* x;  // [T, channels]
  const float* w;  // [kernel, channels]
  float* y;
  std::int64_t channels, state;
  int kernel;
};

// A thread per channel of a chunk. grid (chunks, channels)
__global__ void conv_silu_kernel(const ConvArgs a) {
  const std::int64_t channel = blockIdx.y * static_cast<std::int64_t>(block_threads) + threadIdx.x;
  if (channel >= a.channels || blockIdx.x >= *a.step.n_chunks) return begin();
  const ChunkView& chunk = a.step.chunks[blockIdx.x];
  const int history = a.kernel - 1;
  for (int j = 0; j < history; ++j) {
    prefetch(a.w + j * a.channels + channel);
    prefetch(a.step.state_at(chunk, a.state) + j * a.channels + channel);
  }
  prefetch(a.w + history * a.channels + channel);
  begin();
  const std::int64_t first = chunk.row * a.channels + channel;
  const Column column{a.x + first, a.step.state_at(chunk, a.state) + channel, a.channels, history};
  for (int i = 0; i < chunk.rows; ++i) {
    float sum = 0;
    for (int j = 0; j < a.kernel; ++j)
      sum = fmaf(a.w[j * a.channels + channel], column.at(i - history + j), sum);
    a.y[first + i * a.channels] = silu(sum);
  }
  column.advance(chunk.rows);
}

struct DeltaArgs {
  StepView step;
  float* qkv;  // [T, width]: queries, keys, values
  const float *alpha, *b, *a, *dt;
  float* gates;  // [T, 2 * value_heads]: e^g, beta
  float* o;      // [T, value_heads * value_dim]
  std::int64_t width, state;
  int key_heads, value_heads, key_dim, value_dim;
};

// A warp per query or key head of a token, then the gates. One block per token.
__global__ void __launch_bounds__(block_threads) delta_prepare_kernel(const DeltaArgs a) {
  begin();
  float* row = a.qkv + blockIdx.x * a.width;
  const float q_scale = 1 / sqrtf(static_cast<float>(a.key_dim));
  for (int h = warp_id(); h < 2 * a.key_heads; h += block_threads / 32) {
    float* x = row + h * a.key_dim;
    normed_head(x, a.key_dim, h < a.key_heads ? q_scale : 1.0f, x, a.key_dim);
  }
  float* gates = a.gates + blockIdx.x * 2ll * a.value_heads;
  const std::int64_t at = blockIdx.x * static_cast<std::int64_t>(a.value_heads);
  for (int u = threadIdx.x; u < a.value_heads; u += block_threads) {
    gates[u] = delta_decay(a.a[u], a.alpha[at + u], a.dt[u]);
    gates[a.value_heads + u] = sigmoid(a.b[at + u]);
  }
}

constexpr int delta_threads = 128;
constexpr int block_columns = delta_threads / 32 * delta_columns;
constexpr int most_key_quads = 16;  // of a slice; 16 * 4 * 4 = 256 key dimensions in registers

// The state stays in registers while a chunk's tokens pass. Prepare: does what
// delta_prepare_kernel does, for its own heads. grid (chunks, value heads, columns)
template <int Quads, bool Prepare>
__global__ void __launch_bounds__(delta_threads) delta_kernel(const DeltaArgs a) {
  if (blockIdx.x >= *a.step.n_chunks) return begin();
  const ChunkView& chunk = a.step.chunks[blockIdx.x];
  const int u = blockIdx.y, h = u % a.key_heads;
  const int column =
      blockIdx.z * block_columns + warp_id() * delta_columns + lane_id() % delta_columns;
  const bool inside = column < a.value_dim;
  float* state = a.step.state_at(chunk, a.state) +
                 static_cast<std::int64_t>(u) * a.key_dim * a.value_dim + column;

  float s[4 * Quads];
#pragma unroll
  for (int i = 0; i < 4 * Quads; ++i)
    s[i] = inside && delta_key(i) < a.key_dim
               ? state[static_cast<std::int64_t>(delta_key(i)) * a.value_dim]
               : 0.0f;
  begin();  // the state is this op's alone
  __shared__ alignas(16) float keys[2][16 * Quads], queries[2][16 * Quads];
  const float* q = a.qkv + chunk.row * a.width + h * a.key_dim;
  const float* k = q + a.key_heads * a.key_dim;
  const float* v = a.qkv + chunk.row * a.width + 2 * a.key_heads * a.key_dim + u * a.value_dim;
  const float* gates = a.gates + chunk.row * 2ll * a.value_heads + u;
  float* o = a.o + (chunk.row * static_cast<std::int64_t>(a.value_heads) + u) * a.value_dim;
  for (int t = 0; t < chunk.rows; ++t) {
    float *kt = keys[t & 1], *qt = queries[t & 1];
    float decay, beta;
    if constexpr (Prepare) {
      const std::int64_t at = (chunk.row + t) * static_cast<std::int64_t>(a.value_heads) + u;
      if (warp_id() == 0)
        normed_head(k, a.key_dim, 1.0f, kt, 16 * Quads);
      else if (warp_id() == 1)
        normed_head(q, a.key_dim, 1 / sqrtf(static_cast<float>(a.key_dim)), qt, 16 * Quads);
      decay = delta_decay(a.a[u], a.alpha[at], a.dt[u]);
      beta = sigmoid(a.b[at]);
    } else {
      for (int i = threadIdx.x; i < 16 * Quads; i += delta_threads) {
        kt[i] = i < a.key_dim ? k[i] : 0.0f;
        qt[i] = i < a.key_dim ? q[i] : 0.0f;
      }
      decay = gates[0];
      beta = gates[a.value_heads];
    }
    const float value = inside ? v[column] : 0.0f;
    __syncthreads();
    const float out = delta_step<Quads>(s, kt, qt, value, decay, beta);
    if (inside && lane_id() < delta_columns) o[column] = out;
    q += a.width, k += a.width, v += a.width;
    gates += 2 * a.value_heads;
    o += static_cast<std::int64_t>(a.value_heads) * a.value_dim;
  }
#pragma unroll
  for (int i = 0; i < 4 * Quads; ++i)
    if (inside && delta_key(i) < a.key_dim)
      state[static_cast<std::int64_t>(delta_key(i)) * a.value_dim] = s[i];
}

// Any key dimension, with the state in memory. A thread per column. grid as above
__global__ void __launch_bounds__(delta_threads) delta_wide_kernel(const DeltaArgs a) {
  begin();
  const int column = blockIdx.z * delta_threads + threadIdx.x, u = blockIdx.y;
  if (blockIdx.x >= *a.step.n_chunks || column >= a.value_dim) return;
  const ChunkView& chunk = a.step.chunks[blockIdx.x];
  float* state = a.step.state_at(chunk, a.state) +
                 static_cast<std::int64_t>(u) * a.key_dim * a.value_dim + column;
  for (std::int64_t t = chunk.row; t < chunk.row + chunk.rows; ++t) {
    const float* q = a.qkv + t * a.width + u % a.key_heads * a.key_dim;
    const float* k = q + a.key_heads * a.key_dim;
    const float value = a.qkv[t * a.width + 2 * a.key_heads * a.key_dim + u * a.value_dim + column];
    const float decay = a.gates[t * 2 * a.value_heads + u],
                beta = a.gates[t * 2 * a.value_heads + a.value_heads + u];
    float predicted = 0, out = 0;
    for (std::int64_t i = 0; i < a.key_dim; ++i)
      predicted = fmaf(k[i], state[i * a.value_dim], predicted);
    const float change = beta * (value - decay * predicted);
    for (std::int64_t i = 0; i < a.key_dim; ++i) {
      const float next = fmaf(k[i], change, decay * state[i * a.value_dim]);
      state[i * a.value_dim] = next;
      out = fmaf(q[i], next, out);
    }
    a.o[(t * a.value_heads + u) * a.value_dim + column] = out;
  }
}

// Longer steps prepare in a kernel of its own, which does not repeat the work in every block.
constexpr std::int64_t prepare_rows = 64;

template <int Quads>
void launch_delta(const DeltaArgs& a, std::int64_t rows, std::int64_t chunks, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(a.value_heads),
                  static_cast<unsigned>(div_up(a.value_dim, block_columns)));
  if (16 * Quads < a.key_dim) {
    if constexpr (Quads < most_key_quads) return launch_delta<2 * Quads>(a, rows, chunks, stream);
    const dim3 wide(grid.x, grid.y, static_cast<unsigned>(div_up(a.value_dim, delta_threads)));
    launch(delta_prepare_kernel, static_cast<unsigned>(rows), block_threads, 0, stream, a);
    launch(delta_wide_kernel, wide, delta_threads, 0, stream, a);
  } else if (rows > prepare_rows) {
    launch(delta_prepare_kernel, static_cast<unsigned>(rows), block_threads, 0, stream, a);
    launch(delta_kernel<Quads, false>, grid, delta_threads, 0, stream, a);
  } else {
    launch(delta_kernel<Quads, true>, grid, delta_threads, 0, stream, a);
  }
}

// A warp per head: y = o / rms(o) * w * act(z).
__global__ void __launch_bounds__(block_threads)
    gated_norm_kernel(const float* o, const float* z, const float* w, float* y, int dim, float eps,
                      Act act, std::int64_t heads) {
  begin();
  const std::int64_t head = blockIdx.x * static_cast<std::int64_t>(block_threads / 32) + warp_id();
  if (head >= heads) return;
  const std::int64_t at = head * dim;
  const float r = rms_factor(o + at, dim, eps);
  for (int i = lane_id(); i < dim; i += 32) {
    y[at + i] = o[at + i] * r * w[i] * activate(act, z[at + i]);
  }
}

}  // namespace

void run(const ConvSilu& op, const Context& c) {
  if (c.most_chunks == 0) return;
  const dim3 grid(static_cast<unsigned>(c.most_chunks), blocks_for(c.cols(op.x)));
  launch(conv_silu_kernel, grid, block_threads, 0, c.stream,
         ConvArgs{c.step, c.f32(op.x), c.vector(op.w), c.f32(op.y), c.cols(op.x), op.state,
                  static_cast<int>(op.kernel)});
}

void run(const DeltaRule& op, const Context& c) {
  const std::int64_t rows = c.rows(op.qkv);
  if (rows == 0) return;
  const DeltaArgs a{c.step,
                    c.f32(op.qkv),
                    c.f32(op.alpha),
                    c.f32(op.b),
                    c.vector(op.a),
                    c.vector(op.dt),
                    c.f32(op.gates),
                    c.f32(op.o),
                    c.cols(op.qkv),
                    op.state,
                    static_cast<int>(op.key_heads),
                    static_cast<int>(op.value_heads),
                    static_cast<int>(op.key_dim),
                    static_cast<int>(op.value_dim)};
  launch_delta<1>(a, rows, c.most_chunks, c.stream);
}

void run(const GatedNorm& op, const Context& c) {
  const std::int64_t heads = c.rows(op.o) * c.cols(op.o) / op.dim;
  if (heads == 0) return;
  launch(gated_norm_kernel, static_cast<unsigned>(div_up(heads, block_threads / 32)), block_threads,
         0, c.stream, c.f32(op.o), c.f32(op.z), c.vector(op.w), c.f32(op.y),
         static_cast<int>(op.dim), op.eps, op.act, heads);
}

}  // namespace imp::cuda
