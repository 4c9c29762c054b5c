// NVFP4 experts on tensor cores. Weights stream through rings of stages in shared memory, one a
// warp, and become bf16 in registers; activations are sums of two bf16 (hi, lo). Up to 4 slots
// share a product: their hi are its columns 0..3, their lo 4..7. A slot's bits depend neither on
// its neighbours nor on their number.
#include "cuda/check.h"
#include "cuda/common/bulk.cuh"
#include "cuda/common/matvec.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nvfp4_tiles.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/moe.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

namespace tiles = nvfp4_tiles;

// ---------------------------------------------------------------- activations

// A row of bf16 in shared memory, 8 numbers a word of 16 bytes: word 4w + c of a tile holds columns
// 32c + 8w .. + 7, so that lanes c read side by side. Rows are half a line off each other.
__host__ __device__ constexpr int row_words(int cols) { return cols / 8 + 4; }
__device__ __forceinline__ int word_of(int unit) {  // unit: columns 8 unit .. + 7
  return (unit & ~15) | (unit & 3) << 2 | (unit >> 2 & 3);
}

// Writes hi and lo of x[0 .. cols); threads `first` of `step` share the work.
__device__ __forceinline__ void stage(const float* x, int cols, uint4* hi, uint4* lo, int first,
                                      int step) {
  for (int u = first; u < cols / 8; u += step) {
    const float4 a = reinterpret_cast<const float4*>(x)[2 * u],
                 b = reinterpret_cast<const float4*>(x)[2 * u + 1];
    const SplitPair p[4] = {split_pair(a.x, a.y), split_pair(a.z, a.w), split_pair(b.x, b.y),
                            split_pair(b.z, b.w)};
    hi[word_of(u)] = make_uint4(p[0].hi, p[1].hi, p[2].hi, p[3].hi);
    lo[word_of(u)] = make_uint4(p[0].lo, p[1].lo, p[2].lo, p[3].lo);
  }
}

// A lane's view of its column g: hi rows first, then lo rows, `n` of each. Columns of no slot
// repeat another; nobody reads their results.
struct Column {
  const uint4* row;
  __device__ __forceinline__ Column(const uint4* rows, int n, int words) {
    const int g = lane_id() / 4, slot = min(g % tile_slots, n - 1);
    row = rows + (g < tile_slots ? slot : n + slot) * words + lane_id() % 4;
  }
  __device__ __forceinline__ uint4 word(int tile, int w) const { return row[16 * tile + 4 * w]; }
};

// ---------------------------------------------------------------- weights

// A stage: tiles of one group of 8 rows, those of another that goes below it in the products, then
// the scales of both.
constexpr int stage_tiles = 5;
constexpr int row_code_bytes = stage_tiles * tiles::code_bytes,
              row_scale_bytes = stage_tiles * tiles::scale_bytes,
              stage_bytes = 2 * (row_code_bytes + row_scale_bytes);
constexpr int copy_lanes = 4;  // a lane for each of the four parts of a stage

__device__ __forceinline__ tiles::Pair load_pair(const std::byte* stage, int i) {
  const auto codes = [&](int row) {
    return *reinterpret_cast<const uint4*>(stage + row * row_code_bytes + i * tiles::code_bytes +
                                           16 * lane_id());
  };
  const auto scales = [&](int row) -> std::uint32_t {
    return *reinterpret_cast<const std::uint16_t*>(stage + 2 * row_code_bytes +
                                                   row * row_scale_bytes + i * tiles::scale_bytes +
                                                   2 * lane_id());
  };
  return {codes(0), codes(1), scales(0), scales(1)};
}

// Where a copy lane finds its part of two row groups.
__device__ __forceinline__ const std::byte* part_of(const Experts& b, int expert,
                                                    std::int64_t row_group, int tiles_of_row) {
  const std::int64_t at = b.place(expert), first = row_group * tiles_of_row;
  return lane_id() < 2 ? b.expert.data + at * b.bytes + first * tiles::code_bytes
                       : b.expert.scales + at * b.scale_bytes + first * tiles::scale_bytes;
}

// A warp's weights on their way: tiles [first, end) of one pair of row groups after the other.
// next(from) finds the next pair, in each copy lane its part, or returns false.
class Pipe {
 public:
  __device__ __forceinline__ Pipe(std::byte* stages, Barrier* full, int ahead, int first, int end)
      : stages_(stages), full_(full), ahead_(ahead), first_(first), end_(end), at_(end) {
    if (lane_id() == 0) init_barriers(full, ahead);
    __syncwarp();
  }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int end() const { return end_; }

  // Starts the next stage, if there is one.
  template <class Next>
  __device__ __forceinline__ void put(Next& next) {
    if (at_ == end_) {
      if (first_ == end_ || !next(from_)) return;
      at_ = first_;
    }
    const int n = min(stage_tiles, end_ - at_), lane = lane_id();
    if (lane == 0) expect_bytes(full_ + put_, n * (stage_bytes / stage_tiles));
    __syncwarp();
    if (lane < copy_lanes) {
      const bool scales = lane >= 2;
      const int size = scales ? tiles::scale_bytes : tiles::code_bytes;
      const int place =
          scales ? 2 * row_code_bytes + (lane - 2) * row_scale_bytes : lane * row_code_bytes;
      bulk_copy(stages_ + put_ * stage_bytes + place, from_ + at_ * size, n * size, full_ + put_);
    }
    at_ += n;
    put_ = put_ + 1 == ahead_ ? 0 : put_ + 1;
  }
  template <class Next>
  __device__ __forceinline__ void fill(Next& next) {
#pragma unroll 1
    for (int i = 0; i < ahead_; ++i) put(next);
  }
  // The oldest stage once it is here.
  __device__ __forceinline__ const std::byte* take() const {
    await_phase(full_ + take_, phase_);
    return stages_ + take_ * stage_bytes;
  }
  // Gives its place to the next.
  template <class Next>
  __device__ __forceinline__ void release(Next& next) {
    __syncwarp();
    if (++take_ == ahead_) take_ = 0, phase_ ^= 1;
    put(next);
  }

 private:
  std::byte* stages_;
  Barrier* full_;
  const std::byte* from_ = nullptr;
  int ahead_, first_, end_, at_;
  int put_ = 0, take_ = 0;
  std::uint32_t phase_ = 0;
};

// sums += tile i of a stage, tile t of its rows, times x.
__device__ __forceinline__ void add_tile(const std::byte* stage, int i, const Column& x, int t,
                                         float (&sums)[2][4]) {
  uint4 words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = x.word(t, w);
  tiles::each_product(load_pair(stage, i), [&](const std::uint32_t (&a)[4], int w, int j) {
    const uint4& b = words[w];
    if (j == 0)
      mma_bf16(sums[0], a, {b.x, b.y});
    else
      mma_bf16(sums[1], a, {b.z, b.w});
  });
}

// acc = one pair of row groups times x. Two sums, so that products need not wait for each other.
template <class Next>
__device__ __forceinline__ void multiply(Pipe& pipe, Next& next, const Column& x, float (&acc)[4]) {
  float sums[2][4] = {};
  for (int t = pipe.first(); t < pipe.end(); t += stage_tiles) {
    const std::byte* stage = pipe.take();
    const int n = min(stage_tiles, pipe.end() - t);
    if (n == stage_tiles) {
#pragma unroll
      for (int i = 0; i < stage_tiles; ++i) add_tile(stage, i, x, t + i, sums);
    } else {
      for (int i = 0; i < n; ++i) add_tile(stage, i, x, t + i, sums);
    }
    pipe.release(next);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = sums[0][i] + sums[1][i];
}

// hi + lo: lanes c < 2 get row g of slots 2c, 2c + 1, then row g + 8.
__device__ __forceinline__ void join(float (&acc)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] += __shfl_xor_sync(all_lanes, acc[i], 2);
}

// ---------------------------------------------------------------- up, down

// A block takes a contiguous share of all tiles' units, a team of warps a unit at a time.
//   up:    8 rows of gate above 8 of up, a quarter of the columns a warp;
//          hidden = silu(gate x) * (up x)
//   down:  64 rows, 16 a warp
constexpr int team_warps = 4, most_teams = 4;
constexpr int up_rows = 8, product_rows = 16, down_rows = team_warps * product_rows;

struct Team {
  int teams, ahead;  // of a block; stages of a warp
};

// A team's sums of an up unit: of all warps but the first, twice, so that one barrier does.
struct Sums {
  float4 parts[2][team_warps - 1][32];
};

__device__ __forceinline__ void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * team_warps) : "memory");
}

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

// This block's share of what the down kernel will read, into the second cache: the memory would
// rest from the last weights here to the first there.
__device__ void prefetch_down(const FfnArgs& a) {
  constexpr std::int64_t grain = 4096;
  const auto share = [&](const std::byte* p, std::int64_t bytes, int i, int n) {
    const std::int64_t grains = div_up(bytes, grain), first = grains * i / n * grain,
                       end = min(bytes, grains * (i + 1) / n * grain);
    if (first < end) bulk_prefetch(p + first, static_cast<std::uint32_t>(end - first));
  };
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  share(a.shared_down, a.shared_down_bytes, block, blocks);
  const int of_tile = blocks / a.tiles, tile = block / of_tile;
  if (tile >= a.tiles) return;
  const Experts& b = a.down;
  const int e = a.ids[tile];
  if (b.places != nullptr && b.places[e].miss >= 0) return;  // still on its way
  const std::int64_t at = b.place(e);
  share(b.expert.data + at * b.bytes, b.expert.rows * b.expert.row_bytes, block % of_tile, of_tile);
  share(b.expert.scales + at * b.scale_bytes, b.expert.rows * b.expert.scale_row_bytes,
        block % of_tile, of_tile);
}

template <bool Up>
__device__ __forceinline__ void tiles_block(const FfnArgs& a, const Team s) {
  extern __shared__ uint4 memory[];
  const Experts& bank = Up ? a.gate : a.down;
  const int cols = static_cast<int>(bank.expert.cols), n_tiles = cols / tiles::cols;
  const int units_of_tile = static_cast<int>(bank.expert.rows) / (Up ? up_rows : down_rows);
  const int team = warp_id() / team_warps, part = warp_id() % team_warps;

  // Shared memory: all warps' stages, the teams' sums, barriers, then activations.
  const int warps = s.teams * team_warps;
  auto* stages = reinterpret_cast<std::byte*>(memory) + warp_id() * s.ahead * stage_bytes;
  auto* sums =
      reinterpret_cast<Sums*>(reinterpret_cast<std::byte*>(memory) + warps * s.ahead * stage_bytes);
  auto* barriers = reinterpret_cast<Barrier*>(sums + (Up ? s.teams : 0));
  auto* activations = reinterpret_cast<uint4*>(barriers + warps * s.ahead);
  Pipe pipe(stages, barriers + warp_id() * s.ahead, s.ahead, Up ? n_tiles * part / team_warps : 0,
            Up ? n_tiles * (part + 1) / team_warps : n_tiles);

  // Beside a gather this kernel starts when everything before the gather is complete. The next one
  // starts later still: it may read the ids and load weights before it waits for this one.
  if (!Up || !a.gathers) await_previous();
  allow_next();

  const int listed = a.grouped ? *a.groups.n_tiles : a.tiles;
  const int low = a.low > 0 ? first_tile(a, listed, a.low) : 0,
            high = a.high < bank.experts ? first_tile(a, listed, a.high) : listed;
  const std::int64_t units = static_cast<std::int64_t>(high - low) * units_of_tile;
  const int begin = low * units_of_tile + static_cast<int>(units * blockIdx.x / gridDim.x),
            end = low * units_of_tile + static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);

  int coming = begin + team;  // unit
  int coming_tile = begin / units_of_tile, coming_rows = begin % units_of_tile + team;
  const auto next = [&](const std::byte*& from) {
    if (coming >= end) return false;
    while (coming_rows >= units_of_tile) coming_rows -= units_of_tile, ++coming_tile;
    const int e = a.tile(coming_tile).expert, u = coming_rows;
    coming += s.teams;
    coming_rows += s.teams;
    const bool lower = lane_id() % 2 == 1;  // of the two row groups
    if constexpr (Up)
      from = part_of(lower ? a.up : a.gate, e, u, n_tiles);
    else
      from = part_of(a.down, e, 2 * (u * team_warps + part) + (lower ? 1 : 0), n_tiles);
    return true;
  };
  pipe.fill(next);
  if constexpr (Up) {
    for (std::int64_t i = global_thread(); i < a.shared_elements;
         i += static_cast<std::int64_t>(gridDim.x) * blockDim.x)
      a.shared_hidden[i] = silu(a.shared_gate[i]) * a.shared_up[i];
    if (a.shared_down != nullptr && threadIdx.x + 1 == blockDim.x) prefetch_down(a);
  }

  const int words = row_words(cols);
  int turn = 0;
  std::int64_t staged = -1;  // row of x, where a tile is one slot
  for (int i = begin / units_of_tile, unit = begin + team, from = begin; from < end; ++i) {
    const int until = min(end, (i + 1) * units_of_tile);
    from = until;
    Work work;
    work.take(a, i);
    const int count = work.tile.count, e = work.tile.expert;
    const auto row = [&](int slot) -> std::int64_t { return Up ? slot / a.k : slot; };
    if (a.grouped || row(i) != staged) {
      __syncthreads();
      for (int j = 0; j < count; ++j)
        stage((Up ? a.x : a.hidden) + row(work.slot(j)) * cols, cols, activations + j * words,
              activations + (count + j) * words, static_cast<int>(threadIdx.x),
              static_cast<int>(blockDim.x));
      __syncthreads();
      staged = a.grouped ? -1 : row(i);
    }
    const Column x(activations, count, words);
    const int g = lane_id() / 4, c = lane_id() % 4;
    for (; unit < until; unit += s.teams) {
      const int u = unit - i * units_of_tile;
      float acc[4];
      if constexpr (Up) {
        const float gate_scale = expert_scale(a.gate, e), up_scale = expert_scale(a.up, e);
        multiply(pipe, next, x, acc);
        auto& parts = sums[team].parts[turn];
        turn ^= 1;
        if (part > 0) parts[part - 1][lane_id()] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        team_barrier(team);
        if (part > 0) continue;
        static_assert(team_warps == 4);
        const float4 p1 = parts[0][lane_id()], p2 = parts[1][lane_id()], p3 = parts[2][lane_id()];
        acc[0] = (acc[0] + p1.x) + (p2.x + p3.x);
        acc[1] = (acc[1] + p1.y) + (p2.y + p3.y);
        acc[2] = (acc[2] + p1.z) + (p2.z + p3.z);
        acc[3] = (acc[3] + p1.w) + (p2.w + p3.w);
        join(acc);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (2 * c + j < count)
            a.hidden[work.slot(2 * c + j) * a.gate.expert.rows + up_rows * u + g] =
                silu(gate_scale * acc[j]) * (up_scale * acc[2 + j]);
      } else {
        const float scale = expert_scale(a.down, e);
        multiply(pipe, next, x, acc);
        join(acc);
        const std::int64_t n0 = product_rows * (u * team_warps + part) + g;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (2 * c + j % 2 < count)
            a.y[work.slot(2 * c + j % 2) * a.down.expert.rows + n0 + 8 * (j / 2)] = scale * acc[j];
      }
    }
  }
}

__global__ void __launch_bounds__(32 * team_warps * most_teams, 1)
    up_tiles_kernel(const __grid_constant__ FfnArgs a, const Team s) {
  tiles_block<true>(a, s);
}
__global__ void __launch_bounds__(32 * team_warps * most_teams, 1)
    down_tiles_kernel(const __grid_constant__ FfnArgs a, const Team s) {
  tiles_block<false>(a, s);
}

// ---------------------------------------------------------------- down and sum

constexpr int shared_warps = product_rows / rows_at_once;
constexpr int few_sum_warps = 14, most_sum_warps = 32;

// An even number, so that rows behind them start on whole words.
__host__ __device__ constexpr int sum_barriers(int warps, int ahead) {
  return (warps * ahead + 1) / 2 * 2;
}

// Down rows of all slots of a token, a warp each, and of the shared expert, then their sum in rank
// order: the bits of the separate kernels. grid (T, row groups)
template <int Warps>
__global__ void __launch_bounds__(32 * Warps, Warps == few_sum_warps ? 2 : 1)
    sum_mma_kernel(const __grid_constant__ SumArgs a) {
  extern __shared__ uint4 memory[];
  __shared__ float sums[Warps][product_rows];
  allow_next();
  const int g = lane_id() / 4, c = lane_id() % 4;
  const std::int64_t t = blockIdx.x, n0 = blockIdx.y * static_cast<std::int64_t>(product_rows);
  const std::int64_t rows = a.down.expert.rows;
  if (warp_id() >= a.k) {
    constexpr int R = rows_at_once;
    const Matrix& m = a.shared_down;
    const int first = (warp_id() - a.k) * R;
    Row w[R];
#pragma unroll
    for (int r = 0; r < R; ++r) w[r] = row_of(m, n0 + first + r);
    prefetch_rows(w, m.row_bytes, lane_id(), 32);
    await_previous();
    const float* const x[1] = {a.shared_hidden + t * m.cols};
    float sum = 0;
    with_format(m.type, [&]<class G>(G) {
      for (int part = 0; part < a.split; ++part) {  // as the linear map does it
        float acc[1][R] = {};
        dot_rows<G, 1, R, true>(w, x, static_cast<int>(m.cols), part * 32 + lane_id(), a.split * 32,
                                acc);
        sum += sum_rows(acc);
      }
    });
    if (lane_id() < R) sums[a.k][first + lane_id()] = m.scale * sum;
  } else {
    // The up kernel lets this one start when the ids are there.
    const int cols = static_cast<int>(a.down.expert.cols), n_tiles = cols / tiles::cols;
    const std::int64_t slot = t * a.k + warp_id();
    const int e = a.ids[slot];
    auto* stages = reinterpret_cast<std::byte*>(memory) + warp_id() * a.ahead * stage_bytes;
    auto* barriers = reinterpret_cast<Barrier*>(reinterpret_cast<std::byte*>(memory) +
                                                a.k * a.ahead * stage_bytes);
    Pipe pipe(stages, barriers + warp_id() * a.ahead, a.ahead, 0, n_tiles);
    bool found = false;
    const auto next = [&](const std::byte*& from) {
      if (found) return false;
      found = true;
      from = part_of(a.down, e, n0 / 8 + lane_id() % 2, n_tiles);
      return true;
    };
    pipe.fill(next);
    const float scale = expert_scale(a.down, e);
    await_previous();
    const int words = row_words(cols);
    uint4* row =
        reinterpret_cast<uint4*>(barriers + sum_barriers(a.k, a.ahead)) + warp_id() * 2 * words;
    stage(a.hidden + slot * cols, cols, row, row + words, lane_id(), 32);
    __syncwarp();
    float acc[4];
    multiply(pipe, next, Column(row, 1, words), acc);
    join(acc);
    if (c == 0) {
      sums[warp_id()][g] = scale * acc[0];
      sums[warp_id()][g + 8] = scale * acc[2];
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= product_rows) return;
  float sum = 0;
  for (int j = 0; j < a.k; ++j) sum = fmaf(a.weights[t * a.k + j], sums[j][r], sum);
  a.y[t * rows + n0 + r] = fmaf(a.share[t], sums[a.k][r], sum);
}

// ---------------------------------------------------------------- launches

// Shared memory beyond what a kernel may take without asking.
template <class... Arguments>
void allow_shared(void (*kernel)(Arguments...), std::size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

std::size_t slot_bytes(const Experts& b) {  // of the activations of a slot
  return 2 * sizeof(uint4) * static_cast<std::size_t>(row_words(static_cast<int>(b.expert.cols)));
}

void launch_tiles(bool up, const FfnArgs& a, cudaStream_t stream) {
  const std::size_t rows = slot_bytes(up ? a.gate : a.down) * (a.grouped ? tile_slots : 1);
  const auto bytes_of_team = [up](int ahead) {
    return team_warps * static_cast<std::size_t>(ahead) * (stage_bytes + sizeof(Barrier)) +
           (up ? sizeof(Sums) : 0);
  };
  const std::size_t room = limits().block_shared - rows;
  Team s{0, 2};
  if (room < bytes_of_team(s.ahead)) s.ahead = 1;
  s.teams = static_cast<int>(std::min<std::size_t>(most_teams, room / bytes_of_team(s.ahead)));
  const std::size_t shared = rows + bytes_of_team(s.ahead) * static_cast<std::size_t>(s.teams);
  const auto kernel = up ? up_tiles_kernel : down_tiles_kernel;
  allow_shared(kernel, shared);
  launch(kernel, static_cast<unsigned>(limits().processors),
         static_cast<unsigned>(32 * team_warps * s.teams), shared, stream, a, s);
}

// Stages of a warp that sums a token's slots.
int sum_ahead(const Experts& down) { return down.expert.cols <= stage_tiles * tiles::cols ? 1 : 2; }
std::size_t sum_shared(const Experts& down, int k) {
  const int ahead = sum_ahead(down);
  return static_cast<std::size_t>(k) *
             (static_cast<std::size_t>(ahead) * stage_bytes + slot_bytes(down)) +
         static_cast<std::size_t>(sum_barriers(k, ahead)) * sizeof(Barrier);
}

}  // namespace

bool has_mma(const FfnArgs& a) { return a.gate.tiled && a.up.tiled && a.down.tiled; }

void run_mma(const FfnArgs& a, cudaStream_t stream) {
  launch_tiles(true, a, stream);
  launch_tiles(false, a, stream);
}

bool has_sum_mma(const FfnArgs& a, const SumArgs& s) {
  constexpr std::size_t own_shared = std::size_t{4} << 10;  // of the kernel, beside
  return has_mma(a) && whole_units(s.shared_down) && s.k + shared_warps <= most_sum_warps &&
         sum_shared(a.down, s.k) + own_shared <= limits().block_shared;
}

void run_sum_mma(FfnArgs a, SumArgs s, cudaStream_t stream) {
  constexpr std::int64_t most_prefetched = std::int64_t{16} << 20;  // what the cache surely keeps
  const std::int64_t down_bytes =
      a.tiles * a.down.expert.rows * (a.down.expert.row_bytes + a.down.expert.scale_row_bytes);
  if (!a.grouped && a.tiles <= limits().processors && down_bytes <= most_prefetched) {
    a.shared_down = s.shared_down.data;
    a.shared_down_bytes = s.shared_down.rows * s.shared_down.row_bytes;
  }
  launch_tiles(true, a, stream);
  s.ahead = sum_ahead(a.down);
  const std::size_t shared = sum_shared(a.down, s.k);
  const dim3 grid(static_cast<unsigned>(a.slots / a.k),
                  static_cast<unsigned>(a.down.expert.rows / product_rows));
  const auto with = [&](auto kernel) {
    allow_shared(kernel, shared);
    launch(kernel, grid, static_cast<unsigned>(32 * (s.k + shared_warps)), shared, stream, s);
  };
  s.k + shared_warps <= few_sum_warps ? with(sum_mma_kernel<few_sum_warps>)
                                      : with(sum_mma_kernel<most_sum_warps>);
}

}  // namespace imp::cuda
