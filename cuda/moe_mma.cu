// Gate, up and down of NVFP4 experts, by tiles of slots.
#include <algorithm>

#include "cuda/common/expert_tiles.cuh"
#include "cuda/common/math.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/moe.h"

namespace imp::cuda {
namespace {

// ---------------------------------------------------------------- up, down

// A block takes a contiguous share of all tiles' units. One warp copies their weights into a ring,
// pairs of warps write the activations of tiles into another, a slot at a time, and teams of warps
// multiply, a unit at a time:
//   up:    8 rows of gate above 8 of up, a quarter of a stage's columns a warp;
//          hidden = silu(gate x) * (up x)
//   down:  64 rows, 16 a warp
constexpr int team_warps = 4, teams = 4, multiply_warps = team_warps * teams;
constexpr int slot_threads = 64;  // that write a slot's activations
constexpr int other_threads = 32 * (multiply_warps + 1),
              tiles_threads = other_threads + 2 * slot_threads;
constexpr int up_rows = tiles::rows, down_rows = team_warps * product_rows;

// A stage: tiles of a unit's groups of 8 rows, one group after the other, then their scales.
template <bool Up>
struct Unit {
  static constexpr int groups = Up ? 2 : down_rows / tiles::rows;
  static constexpr int span = 2 * team_warps * stage_tiles / groups;  // tiles of a group
};
constexpr int stage_codes = 2 * team_warps * stage_tiles * tiles::code_bytes,
              stage_bytes = 2 * team_warps * stage_tiles * (tiles::code_bytes + tiles::scale_bytes);

// What a team's warps add up.
using Parts = float4[team_warps][32];

struct Stages {
  int weights, activations;
};

// Ahead of a tile's activations.
struct TileHead {
  int count;
  int slots[tile_slots];
  float scale, up_scale;  // of the expert's gate or down, and of its up
};
constexpr int head_words = 2;
static_assert(sizeof(TileHead) <= head_words * sizeof(uint4));

__host__ __device__ constexpr int activation_words(int cols, int slots) {
  return head_words + 2 * slots * row_words(cols);
}

// A block's shared memory in this order.
template <bool Up>
struct TilesMemory {
  std::byte* weights;
  Parts* parts;  // Up, of a stage
  uint4* activations;
  // Of weights. full [teams, stages]: a team does not see the phases of stages that others use, so
  // it counts its own. joined: Up, parts are there.
  Barrier *full, *empty, *joined;
  Barrier *ready, *used;  // of activations

  static std::size_t bytes(const Stages& s, int words) {
    return static_cast<std::size_t>(s.weights) *
               (stage_bytes + (Up ? sizeof(Parts) : 0) + (teams + 2) * sizeof(Barrier)) +
           static_cast<std::size_t>(s.activations) *
               (static_cast<std::size_t>(words) * sizeof(uint4) + 2 * sizeof(Barrier));
  }
  __device__ __forceinline__ TilesMemory(uint4* memory, const Stages& s, int words) {
    weights = reinterpret_cast<std::byte*>(memory);
    parts = reinterpret_cast<Parts*>(weights + s.weights * stage_bytes);
    activations = reinterpret_cast<uint4*>(parts + (Up ? s.weights : 0));
    full = reinterpret_cast<Barrier*>(activations + s.activations * words);
    empty = full + teams * s.weights;
    joined = empty + s.weights;
    ready = joined + s.weights;
    used = ready + s.activations;
  }
  // By the first lanes of several warps.
  __device__ __forceinline__ void init(const Stages& s) const {
    if (lane_id() != 0) return;
    const int warp = warp_id();
    if (warp < teams) init_barriers(full + warp * s.weights, s.weights);
    if (warp == teams) init_barriers(empty, s.weights, Up ? 1 : team_warps);
    if (warp == teams + 1) init_barriers(joined, s.weights, team_warps - 1);
    if (warp == teams + 2)
      init_barriers(ready, s.activations, (static_cast<int>(blockDim.x) - other_threads) / 32);
    if (warp == teams + 3) init_barriers(used, s.activations, multiply_warps);
  }
};

// The first tile whose expert is at least `expert`; tiles are sorted by expert.
__device__ int first_tile(const FfnArgs& a, int n, int expert) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (a.groups.tiles[middle].expert < expert)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Units [begin, end) of this block, unit i being of tile i / of_tile.
struct Share {
  int begin, end, of_tile;
  __device__ Share(const FfnArgs& a, int units_of_tile) : of_tile(units_of_tile) {
    const int listed = a.grouped ? *a.groups.n_tiles : a.tiles;
    const int low = a.low > 0 ? first_tile(a, listed, a.low) : 0,
              high = a.high < a.gate.experts ? first_tile(a, listed, a.high) : listed;
    const std::int64_t units = static_cast<std::int64_t>(high - low) * of_tile;
    begin = low * of_tile + static_cast<int>(units * blockIdx.x / gridDim.x);
    end = low * of_tile + static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  }
};

// Share i of n, into the second cache.
__device__ void prefetch_share(const std::byte* p, std::int64_t bytes, int i, int n) {
  constexpr std::int64_t grain = 4096;
  const std::int64_t grains = div_up(bytes, grain), first = grains * i / n * grain,
                     end = min(bytes, grains * (i + 1) / n * grain);
  if (first < end) bulk_prefetch(p + first, static_cast<std::uint32_t>(end - first));
}

// This block's share of what the sum will read: the memory would rest from the last weights here to
// the first there.
__device__ void prefetch_down(const FfnArgs& a) {
  const int block = static_cast<int>(blockIdx.x);
  const int of_tile = static_cast<int>(gridDim.x) / a.tiles, tile = block / of_tile;
  if (tile >= a.tiles) return;
  const Experts& b = a.down;
  const int e = a.ids[tile];
  if (b.places != nullptr && b.places[e].miss >= 0) return;  // still on its way
  const std::int64_t at = b.place(e);
  prefetch_share(b.expert.data + at * b.bytes, b.expert.rows * b.expert.row_bytes, block % of_tile,
                 of_tile);
  prefetch_share(b.expert.scales + at * b.scale_bytes, b.expert.rows * b.expert.scale_row_bytes,
                 block % of_tile, of_tile);
}

template <bool Up>
__device__ __forceinline__ void copy_weights(const FfnArgs& a, const Share& share, const Stages& s,
                                             const TilesMemory<Up>& m, int n_tiles) {
  using U = Unit<Up>;
  // Row groups of down adjoin, so that a stage of whole rows is one copy.
  const bool whole = !Up && n_tiles <= U::span;
  const int at_once = whole ? U::groups : 1, copies = U::groups / at_once, lane = lane_id();
  const bool scales = lane >= copies;
  const int group = lane % copies, size = scales ? tiles::scale_bytes : tiles::code_bytes;
  const Experts& bank = !Up ? a.down : group == 0 ? a.gate : a.up;
  const std::byte* rows = nullptr;  // of the expert
  Ring ring(s.weights), of_team(s.weights);
  int tile = share.begin / share.of_tile, u = share.begin % share.of_tile, team = 0;
  Barrier *last = nullptr, *last_but_one = nullptr;
  for (int unit = share.begin; unit < share.end; ++unit) {
    if (rows == nullptr && lane < 2 * copies) {
      const std::int64_t at = bank.place(a.tile(tile).expert);
      rows =
          scales ? bank.expert.scales + at * bank.scale_bytes : bank.expert.data + at * bank.bytes;
    }
    Ring filled = of_team;
    for (int first = 0; first < n_tiles; first += U::span) {
      const int n = min(U::span, n_tiles - first);
      Barrier* full = m.full + team * s.weights + filled.at();
      await_phase(m.empty + ring.at(), ring.free_phase());
      if (lane == 0) expect_bytes(full, U::groups * n * (tiles::code_bytes + tiles::scale_bytes));
      __syncwarp();
      if (lane < 2 * copies) {
        std::byte* to = m.weights + ring.at() * stage_bytes + (scales ? stage_codes : 0);
        const std::int64_t from = (Up ? u : U::groups * u + group) * n_tiles + first;
        bulk_copy(to + group * n * size, rows + from * size, at_once * n * size, full);
      }
      last_but_one = last, last = full;
      ring.advance();
      filled.advance();
    }
    if (++team == teams) team = 0, of_team = filled;
    if (++u == share.of_tile) u = 0, ++tile, rows = nullptr;
  }
  if (!Up || a.shared_down == nullptr || lane != 0) return;
  // Not while weights that are needed sooner are on their way: but the last, they are here.
  const int chunks = (n_tiles + U::span - 1) / U::span;
  if (last_but_one != nullptr && (share.end - share.begin) * chunks <= s.weights)
    await_phase(last_but_one, 0);
  prefetch_down(a);
}

template <bool Up>
__device__ __forceinline__ void copy_activations(const FfnArgs& a, const Share& share,
                                                 const Stages& s, const TilesMemory<Up>& m,
                                                 int cols, int words, int thread, int threads) {
  const int row = row_words(cols), first = thread % slot_threads;
  Ring ring(s.activations);
  for (int i = share.begin / share.of_tile; i * share.of_tile < share.end; ++i) {
    Work work;
    work.take(a, i);
    const int count = work.tile.count, e = work.tile.expert, listed = work.slot(thread);
    const float scale = expert_scale(Up ? a.gate : a.down, e), up_scale = expert_scale(a.up, e);
    uint4* head = m.activations + ring.at() * words;
    bool free = false;
    const auto wait = [&] {
      if (!free) await_phase(m.used + ring.at(), ring.free_phase());
      free = true;
    };
    for (int j = thread / slot_threads; j < count; j += threads / slot_threads) {
      const std::int64_t slot = work.slot(j);
      uint4* to = head + head_words + j * row;
      stage<5>(Up ? a.x + slot / a.k * cols : a.hidden + slot * cols, cols, to, to + count * row,
               first, slot_threads, wait);
    }
    wait();
    auto& h = *reinterpret_cast<TileHead*>(head);
    if (thread < tile_slots) h.slots[thread] = listed;
    if (thread == 0) h.count = count, h.scale = scale, h.up_scale = up_scale;
    warp_arrive(m.ready + ring.at());
    ring.advance();
  }
}

template <bool Up>
__device__ __forceinline__ void multiply(const FfnArgs& a, const Share& share, const Stages& s,
                                         const TilesMemory<Up>& m, int n_tiles, int words) {
  using U = Unit<Up>;
  const int team = warp_id() / team_warps, part = warp_id() % team_warps;
  const int g = lane_id() / 4, c = lane_id() % 4;
  const int chunks = (n_tiles + U::span - 1) / U::span;
  const int row = row_words(n_tiles * tiles::cols);
  Ring weights(s.weights, team * chunks), of_team(s.weights), activations(s.activations);
  int joins = 0;  // the warp that adds a team's parts: each in turn
  int unit = share.begin + team;
  for (int i = share.begin / share.of_tile; i * share.of_tile < share.end; ++i) {
    const uint4* head = m.activations + activations.at() * words;
    const auto& h = *reinterpret_cast<const TileHead*>(head);
    await_phase(m.ready + activations.at(), activations.phase());
    const int count = h.count;
    const Column x(head + head_words, count, row);
    for (const int until = min(share.end, (i + 1) * share.of_tile); unit < until; unit += teams) {
      const int u = unit - i * share.of_tile;
      float sums[2][4] = {}, acc[4];
      int at = 0;
      std::uint32_t phase = 0;
      for (int first = 0; first < n_tiles; first += U::span) {
        const int n = min(U::span, n_tiles - first);
        at = weights.at(), phase = weights.phase();
        const std::byte* codes = m.weights + at * stage_bytes;
        const std::byte* scales = codes + stage_codes;
        const int begin = Up ? n * part / team_warps : 0,
                  end = Up ? n * (part + 1) / team_warps : n;
        const int upper = Up ? begin : 2 * part * n;
        await_phase(m.full + team * s.weights + of_team.at(), of_team.phase());
        add_pairs(codes + upper * tiles::code_bytes, scales + upper * tiles::scale_bytes, n, x,
                  first + begin, end - begin, sums);
        if (!Up) {
          warp_arrive(m.empty + at);
        } else if (first + U::span < n_tiles) {  // the last of the team gives the stage back
          if (part != joins) {
            warp_arrive(m.joined + at);
          } else {
            await_phase(m.joined + at, phase);
            warp_arrive(m.empty + at);
          }
        }
        weights.advance();
        of_team.advance();
      }
      weights.advance((teams - 1) * chunks);
      join_sums(sums, acc);
      if constexpr (Up) {
        auto& parts = m.parts[at];
        parts[part][lane_id()] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        const bool mine = part == joins;
        joins = (joins + 1) % team_warps;
        if (!mine) {
          warp_arrive(m.joined + at);
          continue;
        }
        await_phase(m.joined + at, phase);
        __syncwarp();
        static_assert(team_warps == 4);
        const float4 p0 = parts[0][lane_id()], p1 = parts[1][lane_id()], p2 = parts[2][lane_id()],
                     p3 = parts[3][lane_id()];
        warp_arrive(m.empty + at);
        acc[0] = (p0.x + p1.x) + (p2.x + p3.x);
        acc[1] = (p0.y + p1.y) + (p2.y + p3.y);
        acc[2] = (p0.z + p1.z) + (p2.z + p3.z);
        acc[3] = (p0.w + p1.w) + (p2.w + p3.w);
        join(acc);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (2 * c + j < count)
            a.hidden[h.slots[2 * c + j] * a.gate.expert.rows + up_rows * u + g] =
                silu(h.scale * acc[j]) * (h.up_scale * acc[2 + j]);
      } else {
        join(acc);
        const std::int64_t n0 = down_rows * u + product_rows * part + g;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (2 * c + j % 2 < count)
            a.y[h.slots[2 * c + j % 2] * a.down.expert.rows + n0 + 8 * (j / 2)] = h.scale * acc[j];
      }
    }
    warp_arrive(m.used + activations.at());
    activations.advance();
  }
}

template <bool Up>
__device__ __forceinline__ void tiles_block(const FfnArgs& a, const Stages& s) {
  extern __shared__ uint4 memory[];
  const Experts& bank = Up ? a.gate : a.down;
  const int cols = static_cast<int>(bank.expert.cols), n_tiles = cols / tiles::cols;
  const int words = activation_words(cols, a.grouped ? tile_slots : 1);
  const TilesMemory<Up> m(memory, s, words);
  m.init(s);
  if (Up && threadIdx.x == other_threads && a.shared_down != nullptr)
    prefetch_share(a.shared_down, a.shared_down_bytes, static_cast<int>(blockIdx.x),
                   static_cast<int>(gridDim.x));
  __syncthreads();

  // Beside a gather this kernel starts when everything before the gather is complete. The next one
  // starts later still: it may read the ids and load weights before it waits for this one.
  if (!Up || !a.gathers) await_previous();
  allow_next();

  const Share share(a, static_cast<int>(bank.expert.rows) / (Up ? up_rows : down_rows));
  const int warp = warp_id();
  if (warp < multiply_warps) {
    multiply<Up>(a, share, s, m, n_tiles, words);
  } else if (warp == multiply_warps) {
    copy_weights<Up>(a, share, s, m, n_tiles);
  } else {
    const int thread = static_cast<int>(threadIdx.x) - other_threads,
              threads = static_cast<int>(blockDim.x) - other_threads;
    copy_activations<Up>(a, share, s, m, cols, words, thread, threads);
    if constexpr (Up) {
      for (std::int64_t i = blockIdx.x * threads + thread; i < a.shared_elements;
           i += static_cast<std::int64_t>(gridDim.x) * threads)
        a.shared_hidden[i] = silu(a.shared_gate[i]) * a.shared_up[i];
    }
  }
}

__global__ void __launch_bounds__(tiles_threads, 1)
    up_tiles_kernel(const __grid_constant__ FfnArgs a, const Stages s) {
  tiles_block<true>(a, s);
}
__global__ void __launch_bounds__(tiles_threads, 1)
    down_tiles_kernel(const __grid_constant__ FfnArgs a, const Stages s) {
  tiles_block<false>(a, s);
}

// ---------------------------------------------------------------- launches

template <bool Up>
void launch_tiles(const FfnArgs& a, cudaStream_t stream) {
  const int slots = a.grouped ? tile_slots : 1,
            words = activation_words(static_cast<int>((Up ? a.gate : a.down).expert.cols), slots);
  const std::size_t room = limits().block_shared;
  // One token's choice of experts may still run on a multiprocessor: its block would start late.
  const bool behind_choice = Up && a.shared_down != nullptr && !a.gathers;
  const std::int64_t blocks = std::max(1, limits().processors - (behind_choice ? 1 : 0));
  Stages s{0, 2};  // activations of the next tile, unless they would displace too many weights
  if (slots > 1 && TilesMemory<Up>::bytes({2 * teams, 2}, words) > room) s.activations = 1;
  while (TilesMemory<Up>::bytes({s.weights + 1, s.activations}, words) <= room) ++s.weights;
  if (s.weights == 0)
    fail(ErrorCode::internal, str("experts of ", words, " words of activations leave no stage"));
  // No more than what a block takes: the next kernel's blocks may find room beside.
  using U = Unit<Up>;
  const Matrix& w = (Up ? a.gate : a.down).expert;
  const std::int64_t units = a.tiles * (w.rows / (Up ? up_rows : down_rows)),
                     chunks = div_up(w.cols / tiles::cols, std::int64_t{U::span});
  s.weights = static_cast<int>(std::min<std::int64_t>(s.weights, div_up(units, blocks) * chunks));
  const std::size_t shared = TilesMemory<Up>::bytes(s, words);
  const auto kernel = Up ? up_tiles_kernel : down_tiles_kernel;
  allow_shared(kernel, shared);
  launch(kernel, static_cast<unsigned>(blocks), tiles_threads, shared, stream, a, s);
}

}  // namespace

bool has_mma(const FfnArgs& a) { return a.gate.tiled && a.up.tiled && a.down.tiled; }

void run_up_mma(const FfnArgs& a, cudaStream_t stream) { launch_tiles<true>(a, stream); }

void run_mma(const FfnArgs& a, cudaStream_t stream) {
  run_up_mma(a, stream);
  launch_tiles<false>(a, stream);
}

}  // namespace imp::cuda
