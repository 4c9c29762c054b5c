// Gated residual streams.
#include "cpp/cpu/run.h"

namespace imp::cpu {

void run(const GroupNorm& op, const Context& c) {
  const std::int64_t n = c.cols(op.x) / op.groups;
  c.over_rows(c.rows(op.x), c.cols(op.x), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t)
      for (std::int64_t g = 0; g < op.groups; ++g)
        c.k.rms_norm(c.row(op.x, t) + g * n, op.w.data + g * n, c.row(op.y, t) + g * n, n, op.eps);
  });
}

void run(const ResidualMix& op, const Context& c) {
  c.over_rows(c.rows(op.x), c.cols(op.n), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t)
      c.k.residual_mix(c.row(op.n, t), c.row(op.gate, t), c.row(op.x, t), op.streams, c.cols(op.x));
  });
}

void run(const ResidualInject& op, const Context& c) {
  const std::int64_t hidden = c.cols(op.y), streams = c.cols(op.s);
  c.over_rows(c.rows(op.r), c.cols(op.r), [&](std::int64_t t0, std::int64_t t1, int) {
    for (std::int64_t t = t0; t < t1; ++t)
      for (std::int64_t s = 0; s < streams; ++s)
        c.k.axpy(2 * c.row(op.s, t)[s], c.row(op.y, t), c.row(op.r, t) + s * hidden, hidden);
  });
}

void run(const LinearMix& op, const Context& c) {
  run(Linear{op.low, op.w, op.gate, 1, Act::none}, c);
  run(ResidualMix{op.n, op.gate, op.streams, op.x}, c);
}

void run(const InjectNorm& op, const Context& c) {
  run(ResidualInject{op.r, op.y, op.s, op.out}, c);
  run(GroupNorm{op.r, op.w, c.cols(op.s), op.eps, op.n}, c);
}

void run(const ResidualRead& op, const Context& c) {
  run(op.inject_op(), c);
  run(op.down_op(), c);
  run(op.mix_op(), c);
}

}  // namespace imp::cpu
