// Routing, and the experts grouped so that each weight row is decoded once for all tokens that
// chose it.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpp/cpu/linear.h"
#include "cpp/cpu/run.h"

namespace imp::cpu {

void run(const Route& op, const Context& c) {
  const std::int64_t experts = c.cols(op.logits);
  c.over_rows(c.rows(op.logits), experts * 8, [&](std::int64_t t0, std::int64_t t1, int thread) {
    auto* order = reinterpret_cast<std::int32_t*>(c.scratch(thread));
    for (std::int64_t t = t0; t < t1; ++t) {
      const float* logits = c.row(op.logits, t);
      std::iota(order, order + experts, 0);
      std::partial_sort(order, order + op.k, order + experts, [&](std::int32_t a, std::int32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
      });
      const float top = logits[order[0]];
      float* w = c.row(op.weights, t);
      float total = 0;
      for (std::int64_t j = 0; j < op.k; ++j) {
        c.i32(op.ids)[t * op.k + j] = order[j];
        w[j] = std::exp(logits[order[j]] - top);
        total += w[j];
      }
      if (!op.renormalise) total = static_cast<float>(c.k.sum_exp(logits, experts, top));
      for (std::int64_t j = 0; j < op.k; ++j) w[j] /= total;
      if (op.planted >= 0)
        std::copy_n(c.step.expert_ids[static_cast<std::size_t>(op.planted)].data() + t * op.k, op.k,
                    c.i32(op.ids) + t * op.k);
    }
  });
}

namespace {

// Slots (token * k + rank) sorted by expert; only experts that were chosen.
struct Groups {
  struct Group {
    std::int64_t expert, first, count;  // slots[first .. first + count)
  };
  std::vector<Group> groups;
  std::vector<std::int32_t> slots;
};

Groups group_by_expert(const std::int32_t* ids, std::int64_t n, std::int64_t experts) {
  std::vector<std::int32_t> start(static_cast<std::size_t>(experts) + 1, 0);
  for (std::int64_t i = 0; i < n; ++i) ++start[static_cast<std::size_t>(ids[i]) + 1];
  Groups g;
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto i = static_cast<std::size_t>(e);
    const std::int64_t count = start[i + 1];
    for (std::int64_t first = 0; first < count; first += max_rows_per_task)
      g.groups.push_back({e, start[i] + first, std::min(max_rows_per_task, count - first)});
    start[i + 1] += start[i];
  }
  g.slots.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i)
    g.slots[static_cast<std::size_t>(start[static_cast<std::size_t>(ids[i])]++)] =
        static_cast<std::int32_t>(i);
  return g;
}

// One expert's rows of y for its slots: y[slot] = w x(slot), columns n0..n1.
template <class X>
void expert_rows(const Context& c, const ExpertBank& bank, const Groups& g,
                 const Groups::Group& group, X x_of, Tensor y, std::int64_t n0, std::int64_t n1,
                 float* scratch) {
  std::array<const float*, max_rows_per_task> x;
  std::array<float*, max_rows_per_task> rows;
  for (std::int64_t i = 0; i < group.count; ++i) {
    const std::int64_t slot = g.slots[static_cast<std::size_t>(group.first + i)];
    x[static_cast<std::size_t>(i)] = x_of(slot);
    rows[static_cast<std::size_t>(i)] = c.row(y, slot);
  }
  const Weight& w = bank.expert;
  const float scale = w.scale * (bank.scales != nullptr ? bank.scales[group.expert] : 1.0f);
  c.k.gemm({w.dtype, w.data + static_cast<std::size_t>(group.expert) * bank.expert_bytes,
            w.row_bytes, w.cols, x.data(), rows.data(), group.count, scale},
           n0, n1, scratch);
}

}  // namespace

void run(const ExpertFfn& op, const Context& c) {
  const std::int64_t slots = c.rows(op.y), k = slots / std::max<std::int64_t>(1, c.rows(op.x));
  const std::int64_t ff = op.gate->expert.rows, hidden = op.down->expert.rows;
  const Groups g = group_by_expert(c.i32(op.ids), slots, op.gate->experts);
  const auto n_groups = static_cast<std::int64_t>(g.groups.size());
  const std::int64_t mean_rows =
      std::max<std::int64_t>(1, slots / std::max<std::int64_t>(1, n_groups));

  const Tiling up = tile(ff, op.gate->expert.cols * 2, mean_rows, c.pool.size());
  c.pool.parallel_for(n_groups * up.n_blocks, [&](std::int64_t task, int thread) {
    const Groups::Group& group = g.groups[static_cast<std::size_t>(task / up.n_blocks)];
    const std::int64_t n0 = task % up.n_blocks * up.n_block, n1 = std::min(ff, n0 + up.n_block);
    const auto x_of = [&](std::int64_t slot) { return c.row(op.x, slot / k); };
    expert_rows(c, *op.gate, g, group, x_of, op.hidden, n0, n1, c.scratch(thread));
    expert_rows(c, *op.up, g, group, x_of, op.up_out, n0, n1, c.scratch(thread));
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t slot = g.slots[static_cast<std::size_t>(group.first + i)];
      float* h = c.row(op.hidden, slot) + n0;
      c.k.silu_mul(h, c.row(op.up_out, slot) + n0, h, n1 - n0);
    }
  });

  const Tiling down = tile(hidden, op.down->expert.cols, mean_rows, c.pool.size());
  c.pool.parallel_for(n_groups * down.n_blocks, [&](std::int64_t task, int thread) {
    const Groups::Group& group = g.groups[static_cast<std::size_t>(task / down.n_blocks)];
    const std::int64_t n0 = task % down.n_blocks * down.n_block,
                       n1 = std::min(hidden, n0 + down.n_block);
    const auto x_of = [&](std::int64_t slot) { return c.row(op.hidden, slot); };
    expert_rows(c, *op.down, g, group, x_of, op.y, n0, n1, c.scratch(thread));
  });
}

void run(const Combine& op, const Context& c) {
  const std::int64_t k = c.cols(op.weights);
  c.over_rows(c.rows(op.y), c.cols(op.y) * k, [&](std::int64_t t0, std::int64_t t1, int thread) {
    auto** slots = reinterpret_cast<const float**>(c.scratch(thread));
    for (std::int64_t t = t0; t < t1; ++t) {
      for (std::int64_t j = 0; j < k; ++j) slots[j] = c.row(op.slots, t * k + j);
      c.k.combine(slots, c.row(op.weights, t), k, c.row(op.shared, t), c.row(op.shared_gate, t)[0],
                  c.row(op.y, t), c.cols(op.y));
    }
  });
}

void run(const MoeFfn& op, const Context& c) {
  if (op.logits) run(op.route(), c);
  run(op.experts(), c);
  run(op.swiglu(), c);
  run(op.down_linear(), c);
  run(op.combine(), c);
}

}  // namespace imp::cpu
