// Row look-ups. The n-gram table is read straight from the mapped file.
#include <cstring>

#include "cpp/cpu/run.h"

namespace imp::cpu {

void run(const Feed& op, const Context& c) {
  std::memcpy(c.f32(op.y), op.values, c.info(op.y).bytes());
}

void run(const EmbedStreams& op, const Context& c) {
  const std::int64_t hidden = op.table->cols;
  c.over_rows(c.rows(op.y), c.cols(op.y), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t) {
      float* y = c.row(op.y, t);
      const auto token = static_cast<std::size_t>(c.step.tokens[static_cast<std::size_t>(t)]);
      c.k.decode(op.table->dtype, op.table->data + token * op.table->row_bytes, hidden,
                 op.table->scale, y);
      for (std::int64_t s = 1; s < op.streams; ++s)
        std::memcpy(y + s * hidden, y, static_cast<std::size_t>(hidden) * sizeof(float));
    }
  });
}

void run(const NgramRows& op, const Context& c) {
  const std::vector<std::int32_t>& rows = c.step.ngram_rows[static_cast<std::size_t>(op.index)];
  const std::int64_t dim = op.table->cols;
  c.over_rows(c.rows(op.y), c.cols(op.y), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t)
      for (std::int64_t h = 0; h < op.heads; ++h) {
        const auto row = static_cast<std::size_t>(rows[static_cast<std::size_t>(t * op.heads + h)]);
        c.k.decode(op.table->dtype, op.table->data + row * op.table->row_bytes, dim,
                   op.table->scale, c.row(op.y, t) + h * dim);
      }
  });
}

void run(const GatherOutputs& op, const Context& c) {
  const auto bytes = static_cast<std::size_t>(c.cols(op.x)) * sizeof(float);
  for (std::int64_t i = 0; i < c.rows(op.y); ++i)
    std::memcpy(c.row(op.y, i), c.row(op.x, c.step.outputs[static_cast<std::size_t>(i)]), bytes);
}

}  // namespace imp::cpu
