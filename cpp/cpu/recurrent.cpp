// Gated delta-net. Heads run in parallel, tokens of a chunk in order.
#include <array>
#include <cmath>

#include "cpp/cpu/history.h"
#include "cpp/cpu/run.h"

namespace imp::cpu {

void run(const ConvSilu& op, const Context& c) {
  const std::int64_t cols = c.cols(op.x), history = op.kernel - 1;
  c.over_rows(c.rows(op.x), cols, [&](std::int64_t t0, std::int64_t t1, int) {
    std::array<const float*, max_conv_kernel> taps;
    for (std::int64_t t = t0; t < t1; ++t) {
      const Chunk& chunk = c.step.chunk_of(t);
      const float* tail = c.memory.state_at(chunk, op.state);
      for (std::int64_t j = 0; j < op.kernel; ++j)
        taps[static_cast<std::size_t>(j)] =
            chunk_row(c.row(op.x, chunk.row), tail, history, cols, t - chunk.row - history + j);
      c.k.conv_silu(taps.data(), op.w.data, op.kernel, c.row(op.y, t), cols);
    }
  });
  for (const Chunk& chunk : c.step.chunks)
    advance_tail(c.row(op.x, chunk.row), c.memory.state_at(chunk, op.state), history, cols,
                 chunk.rows);
}

namespace {

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// l2-normalises queries and keys in place and computes e^g and beta.
void prepare(const DeltaRule& op, const Context& c) {
  const float q_scale = 1 / std::sqrt(static_cast<float>(op.key_dim));
  c.over_rows(c.rows(op.qkv), c.cols(op.qkv), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t) {
      float* q = c.row(op.qkv, t);
      for (std::int64_t h = 0; h < 2 * op.key_heads; ++h)
        c.k.l2_norm(q + h * op.key_dim, q + h * op.key_dim, op.key_dim, l2_norm_eps,
                    h < op.key_heads ? q_scale : 1);
      const float *alpha = c.row(op.alpha, t), *b = c.row(op.b, t);
      float* gates = c.row(op.gates, t);
      for (std::int64_t u = 0; u < op.value_heads; ++u) {
        gates[u] = std::exp(op.a.data[u] * softplus(alpha[u] + op.dt.data[u]));
        gates[op.value_heads + u] = 1 / (1 + std::exp(-b[u]));
      }
    }
  });
}

}  // namespace

void run(const DeltaRule& op, const Context& c) {
  prepare(op, c);
  const auto chunks = static_cast<std::int64_t>(c.step.chunks.size());
  c.pool.parallel_for(chunks * op.value_heads, [&](std::int64_t task, int) {
    const Chunk& chunk = c.step.chunks[static_cast<std::size_t>(task / op.value_heads)];
    const std::int64_t u = task % op.value_heads, h = u % op.key_heads;
    float* s = c.memory.state_at(chunk, op.state) + u * op.key_dim * op.value_dim;
    const float* q = c.row(op.qkv, chunk.row) + h * op.key_dim;
    const float* v = c.row(op.qkv, chunk.row) + 2 * op.key_heads * op.key_dim + u * op.value_dim;
    const float* gates = c.row(op.gates, chunk.row);
    c.k.delta_rule(
        {q, q + op.key_heads * op.key_dim, v, c.cols(op.qkv), gates + u, gates + op.value_heads + u,
         c.cols(op.gates), c.row(op.o, chunk.row) + u * op.value_dim, c.cols(op.o), chunk.rows},
        s, op.key_dim, op.value_dim);
  });
}

void run(const GatedNorm& op, const Context& c) {
  const std::int64_t cols = c.cols(op.o);
  c.over_rows(c.rows(op.o), cols, [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t) {
      float* y = c.row(op.y, t);
      for (std::int64_t d = 0; d < cols; d += op.dim)
        c.k.rms_norm(c.row(op.o, t) + d, op.w.data, y + d, op.dim, op.eps);
      if (op.act == Act::sigmoid) {
        c.k.sigmoid_mul(c.row(op.z, t), y, cols);
      } else {
        c.k.silu_mul(c.row(op.z, t), y, y, cols);
      }
    }
  });
}

void run(const GatedDeltaNet& op, const Context& c) {
  run(op.conv_op(), c);
  run(op.delta_op(), c);
  run(op.norm_op(), c);
}

}  // namespace imp::cpu
