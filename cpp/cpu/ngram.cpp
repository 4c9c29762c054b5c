// The n-gram block's gate and dilated convolution.
#include <algorithm>
#include <array>
#include <cmath>

#include "cpp/cpu/history.h"
#include "cpp/cpu/run.h"

namespace imp::cpu {

void run(const NgramGate& op, const Context& c) {
  const std::int64_t hidden = c.cols(op.v);
  const float inv = 1 / std::sqrt(static_cast<float>(hidden));
  c.over_rows(c.rows(op.r), c.cols(op.r), [&](std::int64_t t0, std::int64_t t1, int thread) {
    float *key = c.scratch(thread), *query = key + hidden;
    for (std::int64_t t = t0; t < t1; ++t)
      for (std::int64_t s = 0; s < op.streams; ++s) {
        const std::int64_t at = s * hidden;
        c.k.rms_norm(c.row(op.key, t) + at, op.w_key.data + at, key, hidden, op.eps);
        c.k.rms_norm(c.row(op.r, t) + at, op.w_query.data + at, query, hidden, op.eps);
        const float u = c.k.dot(key, query, hidden) * inv;
        const float sign = u > 0 ? 1.0f : u < 0 ? -1.0f : u;  // 0 stays 0, NaN stays NaN
        const float gate =
            1 / (1 + std::exp(-sign * std::sqrt(std::max(std::abs(u), ngram_gate_floor))));
        float* value = c.row(op.value, t) + at;
        std::fill_n(value, hidden, 0.0f);
        c.k.axpy(gate, c.row(op.v, t), value, hidden);
        c.k.rms_norm(value, op.w_conv.data + at, c.row(op.n, t) + at, hidden, op.eps);
      }
  });
}

void run(const NgramConv& op, const Context& c) {
  const std::int64_t cols = c.cols(op.n), history = (op.kernel - 1) * op.dilation;
  c.over_rows(c.rows(op.n), cols, [&](std::int64_t t0, std::int64_t t1, int thread) {
    std::array<const float*, max_conv_kernel> taps;
    float* y = c.scratch(thread);
    for (std::int64_t t = t0; t < t1; ++t) {
      const Chunk& chunk = c.step.chunk_of(t);
      const float* tail = c.memory.state_at(chunk, op.state);
      for (std::int64_t j = 0; j < op.kernel; ++j)
        taps[static_cast<std::size_t>(j)] =
            chunk_row(c.row(op.n, chunk.row), tail, history, cols,
                      t - chunk.row - (op.kernel - 1 - j) * op.dilation);
      c.k.conv_silu(taps.data(), op.w.data, op.kernel, y, cols);
      c.k.axpy(1, c.row(op.value, t), y, cols);
      c.k.axpy(1, y, c.row(op.r, t), cols);
    }
  });
  for (const Chunk& chunk : c.step.chunks)
    advance_tail(c.row(op.n, chunk.row), c.memory.state_at(chunk, op.state), history, cols,
                 chunk.rows);
}

}  // namespace imp::cpu
