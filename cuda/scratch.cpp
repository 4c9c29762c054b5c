// Which nodes need device memory while they run, and how much.
#include <algorithm>

#include "cuda/executable.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

struct Needs {
  const Graph& g;
  std::int64_t context;
  bool cublas;

  std::size_t operator()(const IndexSelect& o) const {
    return scratch_bytes(o, g.info(o.q).rows, context);
  }
  std::size_t operator()(const Attend& o) const { return scratch_bytes(o, g.info(o.q).rows); }
  std::size_t operator()(const ExpertFfn& o) const { return scratch_bytes(o, g.info(o.y).rows); }
  std::size_t operator()(const Sample& o) const {
    return scratch_bytes(o, g.info(o.logits).rows, g.info(o.logits).cols);
  }
  std::size_t operator()(const MoeFfn& o) const { return std::max((*this)(o.experts()), map(o.x)); }
  std::size_t operator()(const Linear& o) const { return map(o.x); }
  std::size_t operator()(const Linears& o) const { return map(o.x); }
  std::size_t operator()(const LinearMix& o) const { return map(o.low); }
  std::size_t operator()(const ResidualRead& o) const { return map(o.low); }
  template <class Other>
  std::size_t operator()(const Other&) const {
    return 0;
  }
  std::size_t map(Tensor x) const { return large_scratch_bytes(g.info(x).rows, cublas); }
};

}  // namespace

std::size_t node_scratch_bytes(const Graph& g, const Op& op, std::int64_t context, bool cublas) {
  return std::visit(Needs{g, context, cublas}, op);
}

}  // namespace imp::cuda
