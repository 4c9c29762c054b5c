// Dense linear maps and the gate of the shared expert.
#include "cpp/cpu/linear.h"

#include <array>

#include "cpp/cpu/run.h"

namespace imp::cpu {

Tiling tile(std::int64_t n, std::int64_t k, std::int64_t rows, int threads) {
  constexpr std::int64_t worth_a_task = 1 << 17;  // multiply-adds: some 10 us
  Tiling t;
  t.t_blocks = (rows + max_rows_per_task - 1) / max_rows_per_task;
  t.t_block = (rows + t.t_blocks - 1) / t.t_blocks;
  constexpr std::int64_t panel = 16;  // weight rows that a kernel takes at once
  std::int64_t per_task = worth_a_task / std::max<std::int64_t>(1, k * t.t_block);
  per_task = std::max(per_task, n / (64 * threads));
  t.n_block = std::max(panel, (per_task + panel - 1) / panel * panel);
  t.n_blocks = (n + t.n_block - 1) / t.n_block;
  return t;
}

void run(const Linear& op, const Context& c) {
  const Weight& w = *op.w;
  const std::int64_t rows = c.rows(op.x), n = w.rows, k = w.cols;
  const Tiling tiling = tile(n, k, rows, c.pool.size());
  c.pool.parallel_for(tiling.tasks(), [&](std::int64_t task, int thread) {
    const std::int64_t t0 = task % tiling.t_blocks * tiling.t_block,
                       t1 = std::min(rows, t0 + tiling.t_block);
    const std::int64_t n0 = task / tiling.t_blocks * tiling.n_block,
                       n1 = std::min(n, n0 + tiling.n_block);
    std::array<const float*, max_rows_per_task> x;
    std::array<float*, max_rows_per_task> y;
    for (std::int64_t t = t0; t < t1; ++t) {
      x[static_cast<std::size_t>(t - t0)] = c.row(op.x, t);
      y[static_cast<std::size_t>(t - t0)] = c.row(op.y, t);
    }
    c.k.gemm({w.dtype, w.data, w.row_bytes, k, x.data(), y.data(), t1 - t0, op.alpha * w.scale}, n0,
             n1, c.scratch(thread));
    if (op.act != Act::none)
      for (std::int64_t t = t0; t < t1; ++t)
        c.k.activate(op.act, c.row(op.y, t) + n0, c.row(op.y, t) + n0, n1 - n0);
  });
}

void run(const Linears& op, const Context& c) {
  for (const Linears::Part& p : op.parts) run(Linear{op.x, p.w, p.y, p.alpha, p.act}, c);
}

void run(const SwiGlu& op, const Context& c) {
  c.over_rows(c.rows(op.y), c.cols(op.y), [&](std::int64_t t0, std::int64_t t1, int) {
    c.k.silu_mul(c.row(op.gate, t0), c.row(op.up, t0), c.row(op.y, t0), (t1 - t0) * c.cols(op.y));
  });
}

}  // namespace imp::cpu
