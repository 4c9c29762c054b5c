// Routing: the k best experts of a token and their weights.
#include "cuda/common/route.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

constexpr int route_threads = 128, route_warps = route_threads / 32;

// A warp per token.
__global__ void __launch_bounds__(route_threads) route_kernel(const RouteArgs a) {
  __shared__ Candidates found[route_warps];
  begin();
  const std::int64_t t = blockIdx.x * static_cast<std::int64_t>(route_warps) + warp_id();
  if (t >= a.rows) return;
  // Padding goes where row 0 goes, so that no expert is read for it.
  const std::int64_t from = t > 0 && t >= a.rows - *a.n_padding ? 0 : t;
  choose_experts(a, a.logits + from * a.experts, found[warp_id()], a.ids + t * a.k,
                 a.weights + t * a.k, a.planted == nullptr ? nullptr : a.planted + t * a.k);
}

}  // namespace

RouteArgs route_args(const Route& op, const Context& c) {
  const std::int64_t rows = c.rows(op.logits);
  return {c.step.n_padding,
          c.f32(op.logits),
          rows,
          static_cast<int>(c.cols(op.logits)),
          static_cast<int>(op.k),
          op.renormalise,
          c.i32(op.ids),
          c.f32(op.weights),
          op.planted < 0 ? nullptr : c.step.expert_ids + op.planted * rows * op.k};
}

void run(const Route& op, const Context& c) {
  const RouteArgs a = route_args(op, c);
  if (a.rows == 0) return;
  launch(route_kernel, static_cast<unsigned>(div_up(a.rows, route_warps)), route_threads, 0,
         c.stream, a);
}

}  // namespace imp::cuda
