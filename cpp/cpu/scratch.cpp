// How much workspace a thread needs for each op.
#include "cpp/cpu/run.h"

namespace imp::cpu {
namespace {

struct Needs {
  const Graph& g;
  std::int64_t context;

  std::size_t of(std::int64_t floats) const { return static_cast<std::size_t>(floats); }
  std::size_t operator()(const Linear& o) const { return gemm_scratch_floats(o.w->cols); }
  std::size_t operator()(const ExpertFfn& o) const {
    return gemm_scratch_floats(std::max(o.gate->expert.cols, o.down->expert.cols));
  }
  std::size_t operator()(const Linears& o) const {
    return o.parts.empty() ? 0 : gemm_scratch_floats(o.parts.front().w->cols);
  }
  std::size_t operator()(const LinearMix& o) const { return gemm_scratch_floats(o.w->cols); }
  std::size_t operator()(const ResidualRead& o) const {
    return std::max((*this)(o.down_op()), (*this)(o.mix_op()));
  }
  std::size_t operator()(const MoeFfn& o) const {
    return std::max({o.logits ? (*this)(o.route()) : 0, (*this)(o.experts()),
                     (*this)(o.down_linear()), (*this)(o.combine())});
  }
  std::size_t operator()(const Route& o) const { return of(g.info(o.logits).cols); }
  std::size_t operator()(const Combine& o) const {
    return of(2 * g.info(o.weights).cols);
  }  // pointers
  std::size_t operator()(const NgramGate& o) const { return of(2 * g.info(o.v).cols); }
  std::size_t operator()(const NgramConv& o) const { return of(g.info(o.n).cols); }
  std::size_t operator()(const IndexKeys& o) const { return of(o.rotary_dim); }
  std::size_t operator()(const AttendInputs& o) const { return of(o.rotary_dim); }
  std::size_t operator()(const IndexSelect& o) const { return of(2 * (context / o.ratio + 16)); }
  std::size_t operator()(const Attend& o) const {
    const std::int64_t n =
        o.selected ? std::min(context + o.ratio, (o.blocks + 1) * o.ratio) : context;
    return of(4 * n + o.heads / o.kv_heads * (n + 16));  // key and value pointers, scores
  }
  template <class Other>
  std::size_t operator()(const Other&) const {
    return 0;
  }
};

}  // namespace

std::size_t scratch_floats(const Graph& g, const Op& op, std::int64_t context) {
  const std::size_t floats = std::visit(Needs{g, context}, op);
  return (floats + 15) / 16 * 16;
}

}  // namespace imp::cpu
