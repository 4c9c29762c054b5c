// NVFP4 experts on tensor cores: weights go from memory into registers and become bf16 there;
// activations are sums of two bf16 (hi, lo). Up to 4 slots share a product: their hi are its
// columns 0..3, their lo 4..7. A slot's bits depend neither on its neighbours nor on their number.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nvfp4_tiles.cuh"
#include "cuda/launch.h"
#include "cuda/moe.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

namespace tiles = nvfp4_tiles;

constexpr int up_parts = 4;    // warps that share the columns of an up row
constexpr int few_tiles = 40;  // so many get a block for each row group, to fill the device

// Where an expert's rows are.
__device__ __forceinline__ Row expert_rows(const Experts& b, int expert) {
  const std::int64_t at = b.place(expert);
  return {b.expert.data + at * b.bytes, b.expert.scales + at * b.scale_bytes};
}

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

// A lane's view of its column g: hi rows first, then lo rows, `n` of each; others are 0.
struct Column {
  const uint4* row;
  bool used;
  __device__ __forceinline__ Column(const uint4* rows, int n, int words) {
    const int g = lane_id() / 4, slot = g % tile_slots;
    used = slot < n;
    row = rows + (g < tile_slots ? slot : n + slot) * words + lane_id() % 4;
  }
  __device__ __forceinline__ uint4 word(int tile, int w) const {
    return used ? row[16 * tile + 4 * w] : make_uint4(0, 0, 0, 0);
  }
};

// ---------------------------------------------------------------- products

// The weights of `groups` row groups, tiles first .. last of each, `step` row groups apart. Some
// are in flight while others are multiplied, and the first before the activations are there.
template <int Ahead>
struct Stream {
  tiles::Source from;
  int first, last, groups;
  int at = 0, next = 0, left, jump;  // of what to load: bytes, tile, tiles, bytes to the next group
  tiles::Pair pairs[Ahead];

  __device__ __forceinline__ Stream(const tiles::Source& s, int first_tile, int last_tile,
                                    int row_groups, int step_tiles)
      : from(s),
        first(first_tile),
        last(last_tile),
        groups(row_groups),
        left(row_groups * (last_tile - first_tile)),
        jump((step_tiles - (last_tile - first_tile)) * tiles::code_bytes) {
#pragma unroll
    for (int i = 0; i < Ahead; ++i) load(i);
  }
  __device__ __forceinline__ void load(int i) {
    if (left == 0) return;
    pairs[i] = from.load(at);
    --left;
    at += tiles::code_bytes;
    if (++next == last - first) next = 0, at += jump;
  }
  // done(r, sums) for each row group: its products with x.
  template <class F>
  __device__ __forceinline__ void multiply(const Column& x, F done) {
    const int steps = groups * (last - first);
    if (steps == 0) {
      float zero[4] = {};
      for (int r = 0; r < groups; ++r) done(r, zero);
    }
    float acc[2][4] = {};
    int tile = first, r = 0;
    for (int step = 0; step < steps; step += Ahead) {
#pragma unroll
      for (int i = 0; i < Ahead; ++i) {
        if (step + i >= steps) break;
        uint4 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = x.word(tile, w);
        tiles::each_product(pairs[i], [&](const std::uint32_t(&a)[4], int w, int j) {
          const uint4& b = words[w];
          if (j == 0)
            mma_bf16(acc[0], a, {b.x, b.y});
          else
            mma_bf16(acc[1], a, {b.z, b.w});
        });
        load(i);
        if (++tile == last) {
          float sums[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) sums[n] = acc[0][n] + acc[1][n], acc[0][n] = acc[1][n] = 0;
          done(r++, sums);
          tile = first;
        }
      }
    }
  }
};

// hi + lo: lanes c < 2 get row g of slots 2c, 2c + 1, then row g + 8.
__device__ __forceinline__ void join(float (&acc)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] += __shfl_xor_sync(all_lanes, acc[i], 2);
}

// ---------------------------------------------------------------- up

// hidden = silu(gate x) * (up x). `up_parts` warps share 8 rows of both matrices, one above the
// other in the products.
constexpr int up_groups = 2, up_threads = 32 * up_parts * up_groups;

__global__ void __launch_bounds__(up_threads, 4) up_mma_kernel(const __grid_constant__ FfnArgs a) {
  begin();
  extern __shared__ uint4 memory[];
  const int i = static_cast<int>(blockIdx.x) / a.n_blocks;
  if (i >= a.tiles) return a.shared_block(static_cast<int>(blockIdx.x) - a.tiles * a.n_blocks);
  Work work;
  if (!work.find(a, i)) return;
  const int cols = static_cast<int>(a.gate.expert.cols), n_tiles = cols / tiles::cols;
  const int group = warp_id() / up_parts, part = warp_id() % up_parts;
  const int rows =
      static_cast<int>(blockIdx.x) % a.n_blocks * up_groups * a.loops + group;  // eights
  const int e = work.tile.expert;
  const int first = n_tiles * part / up_parts, last = n_tiles * (part + 1) / up_parts;
  Stream<2> w(
      tiles::source(expert_rows(a.gate, e), rows, expert_rows(a.up, e), rows, n_tiles, first),
      first, last, a.loops, up_groups * n_tiles);

  const float gate_scale = expert_scale(a.gate, e), up_scale = expert_scale(a.up, e);
  const int words = row_words(cols), count = work.tile.count;
  for (int s = 0; s < count; ++s)
    stage(a.x + static_cast<std::int64_t>(work.slot(s) / a.k) * cols, cols, memory + s * words,
          memory + (count + s) * words, static_cast<int>(threadIdx.x), up_threads);
  __syncthreads();
  __shared__ float4 parts[2][up_groups][up_parts][32];
  w.multiply(Column(memory, count, words), [&](int r, const float(&acc)[4]) {
    parts[r % 2][group][part][lane_id()] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __syncthreads();
    if (part != r % up_parts) return;  // they take turns
    const float4* p = &parts[r % 2][group][0][lane_id()];
    static_assert(up_parts == 4);
    const float4 p0 = p[0], p1 = p[32], p2 = p[64], p3 = p[96];
    float sums[4] = {(p0.x + p1.x) + (p2.x + p3.x), (p0.y + p1.y) + (p2.y + p3.y),
                     (p0.z + p1.z) + (p2.z + p3.z), (p0.w + p1.w) + (p2.w + p3.w)};
    join(sums);
    const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (2 * c + j < count)
        a.hidden[work.slot(2 * c + j) * a.gate.expert.rows + 8 * (rows + up_groups * r) + g] =
            silu(gate_scale * sums[j]) * (up_scale * sums[2 + j]);
  });
}

// ---------------------------------------------------------------- down

constexpr int down_warps = 8, product_rows = 16;

__global__ void __launch_bounds__(32 * down_warps, 4)
    down_mma_kernel(const __grid_constant__ FfnArgs a) {
  begin();
  extern __shared__ uint4 memory[];
  Work work;
  if (!work.find(a, static_cast<int>(blockIdx.x) / a.n_blocks)) return;
  const int cols = static_cast<int>(a.down.expert.cols), n_tiles = cols / tiles::cols;
  const int rows = static_cast<int>(blockIdx.x) % a.n_blocks * down_warps * a.loops + warp_id();
  const int e = work.tile.expert;
  const Row w_rows = expert_rows(a.down, e);
  Stream<2> w(tiles::source(w_rows, 2 * rows, w_rows, 2 * rows + 1, n_tiles, 0), 0, n_tiles,
              a.loops, 2 * down_warps * n_tiles);

  const float scale = expert_scale(a.down, e);
  const int words = row_words(cols), count = work.tile.count;
  for (int s = 0; s < count; ++s)
    stage(a.hidden + static_cast<std::int64_t>(work.slot(s)) * cols, cols, memory + s * words,
          memory + (count + s) * words, static_cast<int>(threadIdx.x), 32 * down_warps);
  __syncthreads();
  w.multiply(Column(memory, count, words), [&](int r, float(&acc)[4]) {
    join(acc);
    const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (2 * c + j % 2 < count)
        a.y[work.slot(2 * c + j % 2) * a.down.expert.rows + product_rows * (rows + down_warps * r) +
            8 * (j / 2) + g] = scale * acc[j];
  });
}

// ---------------------------------------------------------------- down and sum

constexpr int shared_warps = product_rows / rows_at_once;
constexpr int most_sum_warps = 14;
constexpr std::size_t most_sum_shared = std::size_t{90} << 10;

// Down rows of all slots of a token, a warp each, and of the shared expert, then their sum in rank
// order: the bits of the separate kernels. grid (T, row groups / loops)
template <class Shared>
__global__ void __launch_bounds__(32 * most_sum_warps, 2)
    sum_mma_kernel(const __grid_constant__ SumArgs a) {
  extern __shared__ uint4 memory[];
  __shared__ float parts[2][most_sum_warps][product_rows];
  const int g = lane_id() / 4, c = lane_id() % 4;
  const std::int64_t t = blockIdx.x;
  const int group = static_cast<int>(blockIdx.y) * a.loops;  // of product_rows
  const auto finish = [&](int r) {
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) - 32 * (r % shared_warps);  // they take turns
    if (row < 0 || row >= product_rows) return;
    float sum = 0;
    for (int j = 0; j < a.k; ++j) sum = fmaf(a.weights[t * a.k + j], parts[r % 2][j][row], sum);
    a.y[t * a.down.expert.rows + (group + r) * product_rows + row] =
        fmaf(a.share[t], parts[r % 2][a.k][row], sum);
  };
  if (warp_id() >= a.k) {
    constexpr int R = rows_at_once;
    const Matrix& m = a.shared_down;
    const int first = (warp_id() - a.k) * R;
    for (int r = 0; r < a.loops; ++r) {
      Row w[R];
#pragma unroll
      for (int i = 0; i < R; ++i) w[i] = row_of(m, (group + r) * product_rows + first + i);
      if (r == 0) {
        prefetch_rows(w, m.row_bytes, lane_id(), 32);
        begin();
      }
      const float* const x[1] = {a.shared_hidden + t * m.cols};
      float sum = 0;
      for (int part = 0; part < a.split; ++part) {  // as the linear map does it
        float acc[1][R] = {};
        dot_rows<Shared, 1, R, true>(w, x, static_cast<int>(m.cols), part * 32 + lane_id(),
                                     a.split * 32, acc);
        sum += sum_rows(acc);
      }
      if (lane_id() < R) parts[r % 2][a.k][first + lane_id()] = m.scale * sum;
      finish(r);
    }
    return;
  }
  begin();
  const int cols = static_cast<int>(a.down.expert.cols), n_tiles = cols / tiles::cols;
  const std::int64_t slot = t * a.k + warp_id();
  const int e = a.ids[slot];
  const Row w_rows = expert_rows(a.down, e);
  Stream<3> w(tiles::source(w_rows, 2 * group, w_rows, 2 * group + 1, n_tiles, 0), 0, n_tiles,
              a.loops, 2 * n_tiles);
  const float scale = expert_scale(a.down, e);
  const int words = row_words(cols);
  uint4* row = memory + warp_id() * 2 * words;
  stage(a.hidden + slot * cols, cols, row, row + words, lane_id(), 32);
  __syncwarp();
  w.multiply(Column(row, 1, words), [&](int r, float(&acc)[4]) {
    join(acc);
    if (c == 0) {
      parts[r % 2][warp_id()][g] = scale * acc[0];
      parts[r % 2][warp_id()][g + 8] = scale * acc[2];
    }
    finish(r);
  });
}

// Shared memory beyond what a kernel may take without asking.
template <class... Arguments>
void allow_shared(void (*kernel)(Arguments...), std::size_t bytes) {
  constexpr std::size_t unasked = std::size_t{40} << 10;  // with the static part
  if (bytes > unasked)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "cudaFuncSetAttribute");
}

std::size_t slot_bytes(const Experts& b) {  // of the activations of a slot
  return 2 * sizeof(uint4) * static_cast<std::size_t>(row_words(static_cast<int>(b.expert.cols)));
}

// Row groups of a block, one after the other: no more than divide `groups`.
int loops_of(int groups, int most) {
  while (groups % most != 0) --most;
  return most;
}

void run_up(FfnArgs a, cudaStream_t stream) {
  const int groups = static_cast<int>(a.gate.expert.rows) / (8 * up_groups);
  a.loops = a.tiles <= few_tiles ? 1 : loops_of(groups, 4);
  a.n_blocks = groups / a.loops;
  const std::size_t shared = slot_bytes(a.gate) * (a.grouped ? tile_slots : 1);
  const auto blocks = static_cast<unsigned>(a.tiles) * a.n_blocks +
                      static_cast<unsigned>(div_up(a.shared_elements, up_threads));
  allow_shared(up_mma_kernel, shared);
  launch(up_mma_kernel, blocks, up_threads, shared, stream, a);
}

}  // namespace

bool has_mma(const FfnArgs& a) { return a.gate.tiled && a.up.tiled && a.down.tiled; }

void run_mma(const FfnArgs& args, cudaStream_t stream) {
  run_up(args, stream);
  FfnArgs a = args;
  const int row_blocks = static_cast<int>(a.down.expert.rows) / (product_rows * down_warps);
  a.loops = loops_of(row_blocks, 2);
  a.n_blocks = row_blocks / a.loops;
  const std::size_t shared = slot_bytes(a.down) * (a.grouped ? tile_slots : 1);
  allow_shared(down_mma_kernel, shared);
  launch(down_mma_kernel, static_cast<unsigned>(a.tiles) * a.n_blocks, 32 * down_warps, shared,
         stream, a);
}

bool has_sum_mma(const FfnArgs& a, const SumArgs& s) {
  return has_mma(a) && whole_units(s.shared_down) && s.k + shared_warps <= most_sum_warps &&
         slot_bytes(a.down) * static_cast<std::size_t>(s.k) <= most_sum_shared;
}

void run_sum_mma(const FfnArgs& a, const SumArgs& args, cudaStream_t stream) {
  run_up(a, stream);
  SumArgs s = args;
  const int groups = static_cast<int>(a.down.expert.rows) / product_rows;
  s.loops = a.tiles <= few_tiles ? 1 : loops_of(groups, 5);
  const std::int64_t tokens = a.tiles / a.k;
  const std::size_t shared = slot_bytes(a.down) * static_cast<std::size_t>(s.k);
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>(groups / s.loops));
  with_format(s.shared_down.type, [&]<class Shared>(Shared) {
    allow_shared(sum_mma_kernel<Shared>, shared);
    launch(sum_mma_kernel<Shared>, grid, static_cast<unsigned>(32 * (s.k + shared_warps)), shared,
           stream, s);
  });
}

}  // namespace imp::cuda
