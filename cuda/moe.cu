// Routing, the chosen experts, and their weighted sum in rank order. Slots (token, rank) of one
// expert are served in tiles of up to 4, which read its weights once; the result of a slot does not
// depend on its tile.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

// Sorts like (logit, then the lower id); NaN comes below everything, so that ids stay distinct.
__device__ __forceinline__ unsigned long long rank_key(float logit, int id) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 is 0
  const std::uint32_t key = logit != logit              ? 0u
                            : (bits & 0x80000000u) != 0 ? ~bits
                                                        : bits | 0x80000000u;
  return static_cast<unsigned long long>(key) << 32 | ~static_cast<std::uint32_t>(id);
}

__device__ __forceinline__ float ranked_logit(unsigned long long key) {
  const auto bits = static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float((bits & 0x80000000u) != 0 ? bits ^ 0x80000000u : ~bits);
}

// A warp per token: k times the best logit below the one before. Each lane keeps `Keys` of them.
template <int Keys>
__global__ void __launch_bounds__(block_threads)
    route_kernel(const float* logits, std::int64_t rows, int experts, int k, bool renormalise,
                 std::int32_t* ids, float* weights) {
  begin();
  const std::int64_t t = blockIdx.x * static_cast<std::int64_t>(block_threads / 32) + warp_id();
  if (t >= rows) return;
  const float* row = logits + t * experts;
  unsigned long long keys[Keys];
#pragma unroll
  for (int i = 0; i < Keys; ++i) {
    const int e = lane_id() + 32 * i;
    keys[i] = e < experts ? rank_key(row[e], e) : 0;
  }
  unsigned long long last = ~0ull, mine = 0;  // the best of this lane below `last`
  float top = 0, total = 0;
  for (int j = 0; j < k; ++j) {
    if (mine == 0 || mine == last) {
      mine = 0;
#pragma unroll
      for (int i = 0; i < Keys; ++i)
        if (keys[i] < last && keys[i] > mine) mine = keys[i];
      for (int e = lane_id() + 32 * Keys; e < experts; e += 32) {  // more than the lanes keep
        const unsigned long long key = rank_key(row[e], e);
        if (key < last && key > mine) mine = key;
      }
    }
    unsigned long long best = mine;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) best = max(best, __shfl_xor_sync(all_lanes, best, d));
    last = best;
    const int id = static_cast<int>(~static_cast<std::uint32_t>(best));
    const float logit = ranked_logit(best);
    if (j == 0) top = logit;
    const float weight = expf(logit - top);
    total += weight;
    if (lane_id() == 0) {
      ids[t * k + j] = id;
      weights[t * k + j] = weight;
    }
  }
  if (!renormalise) {
    float sum = 0;
    for (int e = lane_id(); e < experts; e += 32) sum += expf(row[e] - top);
    total = warp_sum(sum);
  }
  __syncwarp();
  for (int j = lane_id(); j < k; j += 32) weights[t * k + j] /= total;
}

constexpr int tile_slots = 4;  // that share an expert's weights; more would leave fewer warps

struct Tile {
  std::int32_t expert, first, count;  // slots[first .. first + count)
};

// Device workspace of one call.
struct Groups {
  std::int32_t *counts, *starts;  // [experts]
  std::int32_t* slots;            // [n] sorted by expert
  Tile* tiles;                    // [most tiles]
  std::int32_t* n_tiles;          // [1]
};

// A warp per expert looks through all ids, 32 at a time: f(slot, how many came before).
template <class F>
__device__ int each_slot(const std::int32_t* ids, int n, int expert, F f) {
  int seen = 0;
  for (int i = 0; i < n; i += 32) {
    const int slot = i + lane_id();
    const bool mine = slot < n && ids[slot] == expert;
    const unsigned ballot = __ballot_sync(all_lanes, mine);
    if (mine) f(slot, seen + __popc(ballot & ((1u << lane_id()) - 1)));
    seen += __popc(ballot);
  }
  return seen;
}

__global__ void __launch_bounds__(block_threads)
    count_kernel(const std::int32_t* ids, int n, int experts, Groups g) {
  begin();
  const int expert = blockIdx.x * (block_threads / 32) + warp_id();
  if (expert >= experts) return;
  const int count = each_slot(ids, n, expert, [](int, int) {});
  if (lane_id() == 0) g.counts[expert] = count;
}

// Exclusive sums of slots and tiles over all experts. One block.
constexpr int scan_threads = 1024;
__global__ void __launch_bounds__(scan_threads) tile_kernel(int experts, Groups g) {
  begin();
  __shared__ int2 warps[scan_threads / 32];
  int2 before = {0, 0};
  for (int base = 0; base < experts; base += scan_threads) {
    const int e = base + threadIdx.x, count = e < experts ? g.counts[e] : 0;
    int2 mine = {count, static_cast<int>(div_up(count, tile_slots))}, sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int a = __shfl_up_sync(all_lanes, sum.x, d), b = __shfl_up_sync(all_lanes, sum.y, d);
      if (lane_id() >= d) sum.x += a, sum.y += b;
    }
    __syncthreads();
    if (lane_id() == 31) warps[warp_id()] = sum;
    __syncthreads();
    int2 lower = before;
    for (int w = 0; w < scan_threads / 32; ++w) {
      if (w < warp_id()) lower.x += warps[w].x, lower.y += warps[w].y;
      before.x += warps[w].x, before.y += warps[w].y;
    }
    const int start = lower.x + sum.x - mine.x;
    if (e < experts) g.starts[e] = start;
    for (int i = 0; i < mine.y; ++i)
      g.tiles[lower.y + sum.y - mine.y + i] = {e, start + i * tile_slots,
                                               min(tile_slots, count - i * tile_slots)};
  }
  if (threadIdx.x == 0) *g.n_tiles = before.y;
}

__global__ void __launch_bounds__(block_threads)
    place_kernel(const std::int32_t* ids, int n, int experts, Groups g) {
  begin();
  const int expert = blockIdx.x * (block_threads / 32) + warp_id();
  if (expert >= experts || g.counts[expert] == 0) return;
  std::int32_t* to = g.slots + g.starts[expert];
  each_slot(ids, n, expert, [&](int slot, int rank) { to[rank] = slot; });
}

struct FfnArgs {
  Experts gate, up, down;
  const float* x;           // [T, hidden]
  const std::int32_t* ids;  // [slots]
  Groups groups;            // of tiles; unused if every slot is a tile of its own
  float *hidden, *y;        // [slots, ff], [slots, hidden]
  std::int64_t k, n_blocks;
  // The shared expert beside the others: blocks behind theirs make its hidden row too.
  const float *shared_gate, *shared_up;
  float* shared_hidden;
  std::int64_t shared_elements;  // [T * shared ff]; 0 = none
};

__device__ __forceinline__ Row expert_row(const Experts& b, int expert, std::int64_t row) {
  const Matrix& m = b.expert;
  return {m.data + expert * b.bytes + row * m.row_bytes,
          m.scales + expert * b.scale_bytes + row * m.scale_row_bytes};
}
__device__ __forceinline__ float expert_scale(const Experts& b, int expert) {
  return b.expert.scale * (b.factors != nullptr ? b.factors[expert] : 1.0f);
}

// The tile of this block and its slots. Without groups, tile i is slot i.
struct Work {
  Tile tile;
  bool grouped;
  __device__ std::int64_t slot(const FfnArgs& a, int i) const {
    return grouped ? a.groups.slots[tile.first + min(i, tile.count - 1)] : tile.first;
  }
};

// hidden = silu(gate x) * (up x) for a pair of rows of each matrix.
template <class F, int T, bool Whole>
__device__ void up_rows(const FfnArgs& a, const Work& work, std::int64_t n0) {
  const std::int64_t ff = a.gate.expert.rows, cols = a.gate.expert.cols;
  const int e = work.tile.expert;
  constexpr int pairs = 2, R = 2 * pairs;
  Row w[R];
#pragma unroll
  for (int r = 0; r < pairs; ++r) {
    const std::int64_t n = min(n0 + r, ff - 1);
    w[r] = expert_row(a.gate, e, n);
    w[pairs + r] = expert_row(a.up, e, n);
  }
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.x + work.slot(a, t) / a.k * cols;
  float acc[T][R] = {};
  dot_rows<F, T, R, Whole>(w, x, static_cast<int>(cols), lane_id(), 32, acc);
  const float sum = sum_rows(acc);
  const float other = __shfl_down_sync(all_lanes, sum, pairs);
  const int t = lane_id() / R, r = lane_id() % R;
  if (lane_id() >= T * R || r >= pairs || t >= work.tile.count || n0 + r >= ff) return;
  a.hidden[work.slot(a, t) * ff + n0 + r] =
      silu(expert_scale(a.gate, e) * sum) * (expert_scale(a.up, e) * other);
}

template <class F, int T, bool Whole>
__device__ void down_rows(const FfnArgs& a, const Work& work, std::int64_t n0) {
  const std::int64_t rows = a.down.expert.rows, ff = a.down.expert.cols;
  const int e = work.tile.expert;
  constexpr int R = rows_at_once;
  Row w[R];
#pragma unroll
  for (int r = 0; r < R; ++r) w[r] = expert_row(a.down, e, min(n0 + r, rows - 1));
  const float* x[T];
#pragma unroll
  for (int t = 0; t < T; ++t) x[t] = a.hidden + work.slot(a, t) * ff;
  float acc[T][R] = {};
  dot_rows<F, T, R, Whole>(w, x, static_cast<int>(ff), lane_id(), 32, acc);
  const float sum = sum_rows(acc);
  const int t = lane_id() / R;
  const std::int64_t n = n0 + lane_id() % R;
  if (lane_id() < T * R && t < work.tile.count && n < rows)
    a.y[work.slot(a, t) * rows + n] = expert_scale(a.down, e) * sum;
}

// Up: gate and up rows, else down. Most: slots of a tile at most; 1 = slots without groups.
template <class F, bool Up, int Most, bool Whole>
__global__ void __launch_bounds__(32 * matvec_warps, Most == 1 ? 4 : 3)
    ffn_kernel(const FfnArgs a, std::int64_t tiles) {
  begin();
  const std::int64_t i = blockIdx.x / a.n_blocks;
  if (i >= tiles) {
    const std::int64_t at = (blockIdx.x - tiles * a.n_blocks) * blockDim.x + threadIdx.x;
    if (at < a.shared_elements) a.shared_hidden[at] = silu(a.shared_gate[at]) * a.shared_up[at];
    return;
  }
  Work work;
  work.grouped = Most > 1;
  if constexpr (Most > 1) {
    if (i >= *a.groups.n_tiles) return;
    work.tile = a.groups.tiles[i];
  } else {
    work.tile = {a.ids[i], static_cast<std::int32_t>(i), 1};
  }
  constexpr int rows_of_warp = Up ? 2 : rows_at_once;
  const std::int64_t n0 = (blockIdx.x % a.n_blocks * matvec_warps + warp_id()) *
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

constexpr std::int64_t direct_rows = 4;  // tokens; so few rarely share an expert

std::int64_t most_tiles(std::int64_t slots, std::int64_t experts) {
  return (slots + (tile_slots - 1) * std::min(slots, experts)) / tile_slots + 1;
}

template <bool Up>
void launch_ffn(FfnArgs a, std::int64_t tiles, bool grouped, cudaStream_t stream) {
  const Matrix& m = (Up ? a.gate : a.down).expert;
  a.n_blocks = div_up(m.rows, matvec_warps * (Up ? 2 : rows_at_once));
  constexpr int threads = 32 * matvec_warps;
  const auto blocks =
      static_cast<unsigned>(tiles * a.n_blocks + (Up ? div_up(a.shared_elements, threads) : 0));
  with_format(m.type, [&]<class F>(F) {
    if (grouped) {
      launch(ffn_kernel<F, Up, tile_slots, true>, blocks, threads, 0, stream, a, tiles);
      return;
    }
    if constexpr (!F::blocks)
      if (!whole_units(m)) {
        launch(ffn_kernel<F, Up, 1, false>, blocks, threads, 0, stream, a, tiles);
        return;
      }
    launch(ffn_kernel<F, Up, 1, true>, blocks, threads, 0, stream, a, tiles);
  });
}

// Down rows of all slots of a token and of the shared expert, a warp each, then their sum in rank
// order. Bit for bit what the separate kernels give. grid (T, row groups)
constexpr int sum_rows_at_once = 4;  // weight rows of a warp
constexpr int few_warps = 12, most_warps = 32;
struct SumArgs {
  Experts down;
  Matrix shared_down;
  const std::int32_t* ids;
  const float *hidden, *shared_hidden, *weights, *share;
  float* y;
  int k, split;  // split: of the shared expert's rows in linear_kernel, whose sums these are
};

template <class F, int R>
__device__ float row_sums(const Row (&w)[R], const float* x, int cols, int start, int step) {
  const float* const rows[1] = {x};
  float acc[1][R] = {};
  dot_rows<F, 1, R, true>(w, rows, cols, start, step, acc);
  return sum_rows(acc);
}

template <class F, int Warps>
__global__ void __launch_bounds__(32 * Warps, Warps == few_warps ? 2 : 1)
    down_sum_kernel(const SumArgs a) {
  constexpr int R = sum_rows_at_once;
  extern __shared__ float sums[];  // [k + 1][R]
  const std::int64_t t = blockIdx.x, n0 = blockIdx.y * static_cast<std::int64_t>(R);
  const std::int64_t rows = a.down.expert.rows;
  Row w[R];
  if (warp_id() == a.k) {
    const Matrix& m = a.shared_down;
#pragma unroll
    for (int r = 0; r < R; ++r) w[r] = row_of(m, min(n0 + r, rows - 1));
    prefetch_rows(w, m.row_bytes, lane_id(), 32);
    begin();
    const float* x = a.shared_hidden + t * m.cols;
    float sum = 0;
    with_format(m.type, [&]<class G>(G) {
      for (int part = 0; part < a.split; ++part)
        sum += row_sums<G>(w, x, static_cast<int>(m.cols), part * 32 + lane_id(), a.split * 32);
    });
    if (lane_id() < R) sums[a.k * R + lane_id()] = m.scale * sum;
  } else {
    begin();
    const std::int64_t slot = t * a.k + warp_id(), ff = a.down.expert.cols;
    const int e = a.ids[slot];
#pragma unroll
    for (int r = 0; r < R; ++r) w[r] = expert_row(a.down, e, min(n0 + r, rows - 1));
    const float sum = row_sums<F>(w, a.hidden + slot * ff, static_cast<int>(ff), lane_id(), 32);
    if (lane_id() < R) sums[warp_id() * R + lane_id()] = expert_scale(a.down, e) * sum;
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= R || n0 + r >= rows) return;
  float sum = 0;
  for (int j = 0; j < a.k; ++j) sum = fmaf(a.weights[t * a.k + j], sums[j * R + r], sum);
  a.y[t * rows + n0 + r] = fmaf(a.share[t], sums[a.k * R + r], sum);
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

}  // namespace

void run(const Route& op, const Context& c) {
  const std::int64_t rows = c.rows(op.logits);
  if (rows == 0) return;
  const auto with = [&]<int Keys>() {
    launch(route_kernel<Keys>, static_cast<unsigned>(div_up(rows, block_threads / 32)),
           block_threads, 0, c.stream, c.f32(op.logits), rows, static_cast<int>(c.cols(op.logits)),
           static_cast<int>(op.k), op.renormalise, c.i32(op.ids), c.f32(op.weights));
  };
  c.cols(op.logits) <= 32 * 16 ? with.template operator()<16>() : with.template operator()<32>();
}

std::size_t scratch_bytes(const ExpertFfn& op, std::int64_t slots) {
  const std::int64_t experts = op.gate->experts;
  if (op.gate->expert.dtype != op.up->expert.dtype)
    fail(ErrorCode::unsupported, str("gate experts of type ", type_info(op.gate->expert.dtype).name,
                                     " with up experts of type ",
                                     type_info(op.up->expert.dtype).name, ", CUDA takes one type"));
  return static_cast<std::size_t>(2 * experts + slots + 1) * sizeof(std::int32_t) +
         static_cast<std::size_t>(most_tiles(slots, experts)) * sizeof(Tile);
}

namespace {

FfnArgs ffn_args(const ExpertFfn& op, const Context& c) {
  const std::int64_t slots = c.rows(op.y), rows = c.rows(op.x);
  return {c.experts(op.gate),
          c.experts(op.up),
          c.experts(op.down),
          c.f32(op.x),
          c.i32(op.ids),
          {},
          c.f32(op.hidden),
          c.f32(op.y),
          slots / std::max<std::int64_t>(1, rows),
          0,
          nullptr,
          nullptr,
          nullptr,
          0};
}

}  // namespace

void run(const ExpertFfn& op, const Context& c) {
  const std::int64_t slots = c.rows(op.y), rows = c.rows(op.x);
  if (slots == 0) return;
  const std::int64_t experts = op.gate->experts;
  FfnArgs a = ffn_args(op, c);
  const bool grouped =
      rows > direct_rows && whole_units(a.gate.expert) && whole_units(a.down.expert);
  std::int64_t tiles = slots;
  if (grouped) {
    tiles = most_tiles(slots, experts);
    auto* p = reinterpret_cast<std::int32_t*>(c.scratch);
    a.groups = {p, p + experts, p + 2 * experts,
                reinterpret_cast<Tile*>(p + 2 * experts + slots + 1), p + 2 * experts + slots};
    const auto blocks = static_cast<unsigned>(div_up(experts, block_threads / 32));
    const int n = static_cast<int>(slots), e = static_cast<int>(experts);
    launch(count_kernel, blocks, block_threads, 0, c.stream, a.ids, n, e, a.groups);
    launch(tile_kernel, 1, scan_threads, 0, c.stream, e, a.groups);
    launch(place_kernel, blocks, block_threads, 0, c.stream, a.ids, n, e, a.groups);
  }
  launch_ffn<true>(a, tiles, grouped, c.stream);
  launch_ffn<false>(a, tiles, grouped, c.stream);
}

void run(const MoeFfn& op, const Context& c) {
  const ExpertFfn experts = op.experts();
  const std::int64_t slots = c.rows(op.slots), rows = c.rows(op.x);
  if (rows == 0) return;
  FfnArgs a = ffn_args(experts, c);
  SumArgs s{a.down,
            c.matrix(op.shared_down),
            a.ids,
            a.hidden,
            c.f32(op.shared_hidden),
            c.f32(op.weights),
            c.f32(op.share),
            c.f32(op.y),
            static_cast<int>(a.k),
            1};
  const bool whole =
      whole_units(a.gate.expert) && whole_units(a.down.expert) && whole_units(s.shared_down);
  if (rows > direct_rows || s.k + 1 > most_warps || !whole) {
    run(experts, c);
    run(op.swiglu(), c);
    run(op.down_linear(), c);
    return run(op.combine(), c);
  }
  a.shared_gate = c.f32(op.shared_gate);
  a.shared_up = c.f32(op.shared_up);
  a.shared_hidden = c.f32(op.shared_hidden);
  a.shared_elements = rows * c.cols(op.shared_hidden);
  launch_ffn<true>(a, slots, false, c.stream);
  s.split = warps_per_row(s.shared_down);
  const dim3 grid(static_cast<unsigned>(rows),
                  static_cast<unsigned>(div_up(a.down.expert.rows, sum_rows_at_once)));
  const auto threads = static_cast<unsigned>(32 * (s.k + 1));
  const std::size_t shared = sizeof(float) * sum_rows_at_once * static_cast<std::size_t>(s.k + 1);
  with_format(a.down.expert.type, [&]<class F>(F) {
    if (s.k + 1 <= few_warps)
      launch(down_sum_kernel<F, few_warps>, grid, threads, shared, c.stream, s);
    else
      launch(down_sum_kernel<F, most_warps>, grid, threads, shared, c.stream, s);
  });
}

void run(const Combine& op, const Context& c) {
  const std::int64_t n = c.rows(op.y) * c.cols(op.y);
  if (n == 0) return;
  launch(combine_kernel, blocks_for(n), block_threads, 0, c.stream, c.f32(op.slots),
         c.f32(op.weights), c.f32(op.shared), c.f32(op.shared_gate), c.f32(op.y),
         c.cols(op.weights), c.cols(op.y), n);
}

}  // namespace imp::cuda
