// The chosen experts and their weighted sum in rank order. NVFP4 goes to moe_mma.cu and moe_sum.cu;
// here is what any format can take.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/expert_cache.h"
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/moe.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

__device__ __forceinline__ Row expert_row(const Experts& b, std::int64_t at, std::int64_t row) {
  const Matrix& m = b.expert;
  return {m.data + at * b.bytes + row * m.row_bytes,
          m.scales + at * b.scale_bytes + row * m.scale_row_bytes};
}

// hidden = silu(gate x) * (up x) for a pair of rows of each matrix.
template <class F, int T, bool Whole>
__device__ void up_rows(const FfnArgs& a, const Work& work, std::int64_t n0) {
  const std::int64_t ff = a.gate.expert.rows, cols = a.gate.expert.cols;
  const int e = work.tile.expert;
  const std::int64_t gate_at = a.gate.place(e), up_at = a.up.place(e);
  constexpr int pairs = 2, R = 2 * pairs;
  Row w[R];
#pragma unroll
  for (int r = 0; r < pairs; ++r) {
    const std::int64_t n = min(n0 + r, ff - 1);
    w[r] = expert_row(a.gate, gate_at, n);
    w[pairs + r] = expert_row(a.up, up_at, n);
  }
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.x + work.slot(t) / a.k * cols;
  float acc[T][R] = {};
  dot_rows<F, T, R, Whole>(w, x, static_cast<int>(cols), lane_id(), 32, acc);
  const float sum = sum_rows(acc);
  const float other = __shfl_down_sync(all_lanes, sum, pairs);
  const int t = lane_id() / R, r = lane_id() % R;
  if (lane_id() >= T * R || r >= pairs || t >= work.tile.count || n0 + r >= ff) return;
  a.hidden[work.slot(t) * ff + n0 + r] =
      silu(expert_scale(a.gate, e) * sum) * (expert_scale(a.up, e) * other);
}

template <class F, int T, bool Whole>
__device__ void down_rows(const FfnArgs& a, const Work& work, std::int64_t n0) {
  const std::int64_t rows = a.down.expert.rows, ff = a.down.expert.cols;
  const int e = work.tile.expert;
  const std::int64_t at = a.down.place(e);
  constexpr int R = rows_at_once;
  Row w[R];
#pragma unroll
  for (int r = 0; r < R; ++r) w[r] = expert_row(a.down, at, min(n0 + r, rows - 1));
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.hidden + work.slot(t) * ff;
  float acc[T][R] = {};
  dot_rows<F, T, R, Whole>(w, x, static_cast<int>(ff), lane_id(), 32, acc);
  const float sum = sum_rows(acc);
  const int t = lane_id() / R;
  const std::int64_t n = n0 + lane_id() % R;
  if (lane_id() < T * R && t < work.tile.count && n < rows)
    a.y[work.slot(t) * rows + n] = expert_scale(a.down, e) * sum;
}

// Up: gate and up rows, else down. Most: slots of a tile at most; 1 = slots without groups.
template <class F, bool Up, int Most, bool Whole>
__global__ void __launch_bounds__(32 * matvec_warps, Most == 1 ? 4 : 3)
    ffn_kernel(const __grid_constant__ FfnArgs a) {
  begin();
  const int i = static_cast<int>(blockIdx.x) / a.n_blocks;
  Work work;
  if (!work.find(a, i)) return;
  constexpr int rows_of_warp = Up ? 2 : rows_at_once;
  const std::int64_t n0 = (static_cast<int>(blockIdx.x) % a.n_blocks * matvec_warps + warp_id()) *
                          static_cast<std::int64_t>(rows_of_warp);
  if (n0 >= (Up ? a.gate : a.down).expert.rows) return;
  const auto rows = [&]<int T>() {
    if constexpr (Up)
      up_rows<F, T, Whole>(a, work, n0);
    else
      down_rows<F, T, Whole>(a, work, n0);
  };
  if constexpr (Most == 1) {
    rows.template operator()<1>();
  } else {
    if (work.tile.count == 1) return rows.template operator()<1>();
    if (work.tile.count == 2) return rows.template operator()<2>();
    rows.template operator()<Most>();
  }
}

template <bool Up>
void launch_ffn(FfnArgs a, cudaStream_t stream) {
  const Matrix& m = (Up ? a.gate : a.down).expert;
  a.n_blocks = static_cast<int>(div_up(m.rows, matvec_warps * (Up ? 2 : rows_at_once)));
  constexpr int threads = 32 * matvec_warps;
  const auto blocks = static_cast<unsigned>(a.tiles) * a.n_blocks;
  with_format(m.type, [&]<class F>(F) {
    if (a.grouped)
      return launch(ffn_kernel<F, Up, tile_slots, true>, blocks, threads, 0, stream, a);
    if constexpr (!F::blocks)
      if (!whole_units(m))
        return launch(ffn_kernel<F, Up, 1, false>, blocks, threads, 0, stream, a);
    launch(ffn_kernel<F, Up, 1, true>, blocks, threads, 0, stream, a);
  });
}

__global__ void combine_kernel(const float* slots, const float* weights, const float* shared,
                               const float* shared_gate, float* y, std::int64_t k,
                               std::int64_t cols, std::int64_t elements) {
  begin();
  const std::int64_t i = global_thread();
  if (i >= elements) return;
  const std::int64_t t = i / cols, c = i % cols;
  float sum = 0;
  for (std::int64_t j = 0; j < k; ++j)
    sum = fmaf(weights[t * k + j], slots[(t * k + j) * cols + c], sum);
  y[i] = fmaf(shared_gate[t], shared[i], sum);
}

FfnArgs ffn_args(const ExpertFfn& op, const Context& c) {
  const std::int64_t slots = c.rows(op.y), rows = c.rows(op.x);
  FfnArgs a{};
  a.gate = c.experts(op.gate);
  a.up = c.experts(op.up);
  a.down = c.experts(op.down);
  a.x = c.f32(op.x);
  a.ids = c.i32(op.ids);
  a.slots = slots;
  a.tiles = static_cast<int>(slots);
  a.gathers = a.gate.cache != nullptr;
  a.hidden = c.f32(op.hidden);
  a.y = c.f32(op.y);
  a.k = static_cast<int>(slots / std::max<std::int64_t>(1, rows));
  return a;
}

constexpr std::int64_t most_sum_rows = 4;  // tokens whose slots are summed without storing them

// Whether a cache takes all experts that so many slots can choose.
bool one_wave(const FfnArgs& a) {
  const Experts& e = a.gate;
  return e.cache == nullptr || std::min(a.slots, e.experts) <= e.wave;
}

// Groups the slots where that saves weights: a token's experts differ, so one has nothing to share.
void group(FfnArgs& a, std::int64_t rows, const Context& c) {
  a.grouped = has_mma(a)
                  ? rows > 1 || !one_wave(a)
                  : rows > direct_rows && whole_units(a.gate.expert) && whole_units(a.down.expert);
  if (!a.grouped) return;
  a.tiles = static_cast<int>(most_tiles(a.slots, a.gate.experts));
  auto* p = reinterpret_cast<std::int32_t*>(c.scratch);
  a.groups = {p, p + a.slots, reinterpret_cast<Tile*>(p + a.slots + 1)};
  group_slots(a.ids, a.slots, a.gate.experts, a.groups, c.stream);
}

// Calls f for ranges of experts that are here while it runs, or on their way. `route`: see
// resolve_experts().
template <class F>
void each_wave(FfnArgs& a, const RouteArgs& route, const Context& c, F f) {
  const Experts& e = a.gate;
  const auto experts = static_cast<std::int32_t>(e.experts);
  const std::int32_t size = one_wave(a) ? experts : static_cast<std::int32_t>(e.wave);
  for (a.low = 0; a.low < experts; a.low = a.high) {
    a.high = std::min(experts, a.low + size);
    if (e.cache != nullptr) {
      const bool first = e.layer == 0 && a.low == 0;
      resolve_experts(*e.cache, e.layer, a.ids, a.slots, a.low, a.high, first, route, c.stream);
      gather_experts(*e.cache, e.layer, c.stream);
    }
    f();
  }
}

// y of every slot.
void run_slots(FfnArgs a, std::int64_t rows, const Context& c) {
  group(a, rows, c);
  each_wave(a, {}, c, [&] {
    if (has_mma(a)) return run_mma(a, c.stream);
    launch_ffn<true>(a, c.stream);
    launch_ffn<false>(a, c.stream);
  });
}

}  // namespace

std::size_t scratch_bytes(const ExpertFfn& op, std::int64_t slots) {
  const std::int64_t experts = op.gate->experts;
  if (op.gate->expert.dtype != op.up->expert.dtype)
    fail(ErrorCode::unsupported, str("gate experts of type ", type_info(op.gate->expert.dtype).name,
                                     " with up experts of type ",
                                     type_info(op.up->expert.dtype).name, ", CUDA takes one type"));
  if (experts > most_experts)
    fail(ErrorCode::unsupported,
         str(experts, " experts in a layer, CUDA takes at most ", most_experts));
  return static_cast<std::size_t>(slots + 1) * sizeof(std::int32_t) +
         static_cast<std::size_t>(most_tiles(slots, experts)) * sizeof(Tile);
}

void run(const ExpertFfn& op, const Context& c) {
  if (c.rows(op.y) == 0) return;
  run_slots(ffn_args(op, c), c.rows(op.x), c);
}

void run(const MoeFfn& op, const Context& c) {
  const std::int64_t rows = c.rows(op.x);
  if (rows == 0) return;
  FfnArgs a = ffn_args(op.experts(), c);
  const Matrix& shared = c.matrix(op.shared_down);
  const SumArgs s{a.down,
                  shared,
                  a.ids,
                  a.hidden,
                  c.f32(op.shared_hidden),
                  c.f32(op.weights),
                  c.f32(op.share),
                  c.f32(op.y),
                  a.k,
                  warps_per_row(shared),
                  0};
  // The sum takes the shared expert's down map in the order of one row.
  const bool sum = rows <= most_sum_rows && !c.batch_invariant && has_sum_mma(a, s);
  if (has_mma(a)) {
    a.shared_gate = c.f32(op.shared_gate);
    a.shared_up = c.f32(op.shared_up);
    a.shared_hidden = c.f32(op.shared_hidden);
    a.shared_elements = rows * c.cols(op.shared_hidden);
  }
  const bool at_once = sum && one_wave(a);
  // A cache chooses a single token's experts itself.
  const bool cache_chooses = op.logits && at_once && rows == 1 && a.gathers;
  if (op.logits && !cache_chooses) run(op.route(), c);
  if (!at_once) {
    run_slots(a, rows, c);
    if (!has_mma(a)) run(op.swiglu(), c);
    sum ? run_matvec(op.down_linear(), c) : run(op.down_linear(), c);
    return run(op.combine(), c);
  }
  group(a, rows, c);
  const RouteArgs route = cache_chooses ? route_args(op.route(), c) : RouteArgs{};
  each_wave(a, route, c, [&] { run_sum_mma(a, s, c.stream); });
}

void run(const Combine& op, const Context& c) {
  const std::int64_t n = c.rows(op.y) * c.cols(op.y);
  if (n == 0) return;
  launch(combine_kernel, blocks_for(n), block_threads, 0, c.stream, c.f32(op.slots),
         c.f32(op.weights), c.f32(op.shared), c.f32(op.shared_gate), c.f32(op.y),
         c.cols(op.weights), c.cols(op.y), n);
}

}  // namespace imp::cuda
