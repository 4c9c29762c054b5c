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

constexpr int up_parts = 4;  // warps that share the columns of an up row

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

// Weights in flight: the first loads can start before the activations are there.
template <int Ahead>
struct Stream {
  tiles::Source from;
  int next, last;
  tiles::Pair pairs[Ahead];

  __device__ __forceinline__ Stream(const tiles::Source& s, int first, int end)
      : from(s), next(first), last(end) {
#pragma unroll
    for (int i = 0; i < Ahead; ++i)  // a warp may have none of a narrow matrix's tiles
      pairs[i] = from.load(max(0, min(first + i, end - 1)));
  }
  // acc += the tiles' products with x
  __device__ __forceinline__ void multiply(const Column& x, float (&acc)[4]) {
    for (; next < last; next += Ahead) {
#pragma unroll
      for (int i = 0; i < Ahead; ++i) {
        const int t = next + i;
        if (t >= last) break;
        uint4 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = x.word(t, w);
        tiles::each_product(pairs[i], [&](const std::uint32_t(&a)[4], int w, int j) {
          const uint4& b = words[w];
          if (j == 0)
            mma_bf16(acc, a, {b.x, b.y});
          else
            mma_bf16(acc, a, {b.z, b.w});
        });
        if (t + Ahead < last) pairs[i] = from.load(t + Ahead);
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
template <int RowGroups>
constexpr int up_threads = 32 * up_parts* RowGroups;

template <int RowGroups, int Ahead, int Blocks>
__global__ void __launch_bounds__(up_threads<RowGroups>, Blocks)
    up_mma_kernel(const __grid_constant__ FfnArgs a) {
  begin();
  extern __shared__ uint4 memory[];
  const int i = static_cast<int>(blockIdx.x) / a.n_blocks;
  if (i >= a.tiles) return a.shared_block(static_cast<int>(blockIdx.x) - a.tiles * a.n_blocks);
  Work work;
  if (!work.find(a, i)) return;
  const int cols = static_cast<int>(a.gate.expert.cols), n_tiles = cols / tiles::cols;
  const int group = warp_id() / up_parts, part = warp_id() % up_parts;
  const int rows = static_cast<int>(blockIdx.x) % a.n_blocks * RowGroups + group;  // eights
  const int e = work.tile.expert;
  Stream<Ahead> w(tiles::source(expert_rows(a.gate, e), rows, expert_rows(a.up, e), rows, n_tiles),
                  n_tiles * part / up_parts, n_tiles * (part + 1) / up_parts);

  const int words = row_words(cols), count = work.tile.count;
  for (int s = 0; s < count; ++s)
    stage(a.x + static_cast<std::int64_t>(work.slot(s) / a.k) * cols, cols, memory + s * words,
          memory + (count + s) * words, static_cast<int>(threadIdx.x), up_threads<RowGroups>);
  __syncthreads();
  float acc[4] = {};
  w.multiply(Column(memory, count, words), acc);

  __shared__ float4 sums[RowGroups][up_parts][32];
  sums[group][part][lane_id()] = make_float4(acc[0], acc[1], acc[2], acc[3]);
  __syncthreads();
  if (part != 0) return;
  const float4* p = &sums[group][0][lane_id()];
  static_assert(up_parts == 4);
  const float4 p0 = p[0], p1 = p[32], p2 = p[64], p3 = p[96];
  acc[0] = (p0.x + p1.x) + (p2.x + p3.x);
  acc[1] = (p0.y + p1.y) + (p2.y + p3.y);
  acc[2] = (p0.z + p1.z) + (p2.z + p3.z);
  acc[3] = (p0.w + p1.w) + (p2.w + p3.w);
  join(acc);
  const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (2 * c + j < count)
      a.hidden[work.slot(2 * c + j) * a.gate.expert.rows + 8 * rows + g] =
          silu(expert_scale(a.gate, e) * acc[j]) * (expert_scale(a.up, e) * acc[2 + j]);
}

// ---------------------------------------------------------------- down

constexpr int down_warps = 8, product_rows = 16;

__global__ void __launch_bounds__(32 * down_warps, 3)
    down_mma_kernel(const __grid_constant__ FfnArgs a) {
  begin();
  extern __shared__ uint4 memory[];
  Work work;
  if (!work.find(a, static_cast<int>(blockIdx.x) / a.n_blocks)) return;
  const int cols = static_cast<int>(a.down.expert.cols), n_tiles = cols / tiles::cols;
  const int rows = static_cast<int>(blockIdx.x) % a.n_blocks * down_warps + warp_id();  // sixteens
  const int e = work.tile.expert;
  const Row w_rows = expert_rows(a.down, e);
  Stream<3> w(tiles::source(w_rows, 2 * rows, w_rows, 2 * rows + 1, n_tiles), 0, n_tiles);

  const int words = row_words(cols), count = work.tile.count;
  for (int s = 0; s < count; ++s)
    stage(a.hidden + static_cast<std::int64_t>(work.slot(s)) * cols, cols, memory + s * words,
          memory + (count + s) * words, static_cast<int>(threadIdx.x), 32 * down_warps);
  __syncthreads();
  float acc[4] = {};
  w.multiply(Column(memory, count, words), acc);
  join(acc);
  const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (2 * c + j % 2 < count)
      a.y[work.slot(2 * c + j % 2) * a.down.expert.rows + product_rows * rows + 8 * (j / 2) + g] =
          expert_scale(a.down, e) * acc[j];
}

// ---------------------------------------------------------------- down and sum

constexpr int shared_warps = product_rows / rows_at_once;
constexpr int few_sum_warps = 14, most_sum_warps = 32;
constexpr std::size_t most_sum_shared = std::size_t{90} << 10;

// Down rows of all slots of a token, a warp each, and of the shared expert, then their sum in rank
// order: the bits of the separate kernels. grid (T, row groups)
constexpr int sum_ahead = 3;
template <int Warps>
__global__ void __launch_bounds__(32 * Warps, Warps == few_sum_warps ? 2 : 1)
    sum_mma_kernel(const __grid_constant__ SumArgs a) {
  extern __shared__ uint4 memory[];
  __shared__ float sums[Warps][product_rows];
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
    begin();
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
    begin();
    const int cols = static_cast<int>(a.down.expert.cols), n_tiles = cols / tiles::cols;
    const std::int64_t slot = t * a.k + warp_id();
    const int e = a.ids[slot];
    const Row w_rows = expert_rows(a.down, e);
    Stream<sum_ahead> w(tiles::source(w_rows, n0 / 8, w_rows, n0 / 8 + 1, n_tiles), 0, n_tiles);
    const int words = row_words(cols);
    uint4* row = memory + warp_id() * 2 * words;
    stage(a.hidden + slot * cols, cols, row, row + words, lane_id(), 32);
    __syncwarp();
    float acc[4] = {};
    w.multiply(Column(row, 1, words), acc);
    join(acc);
    if (c == 0) {
      sums[warp_id()][g] = expert_scale(a.down, e) * acc[0];
      sums[warp_id()][g + 8] = expert_scale(a.down, e) * acc[2];
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= product_rows) return;
  float sum = 0;
  for (int j = 0; j < a.k; ++j) sum = fmaf(a.weights[t * a.k + j], sums[j][r], sum);
  a.y[t * rows + n0 + r] = fmaf(a.share[t], sums[a.k][r], sum);
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

template <int RowGroups, int Ahead, int Blocks>
void launch_up(FfnArgs a, cudaStream_t stream) {
  constexpr int threads = up_threads<RowGroups>;
  a.n_blocks = static_cast<int>(a.gate.expert.rows / (8 * RowGroups));
  const std::size_t shared = slot_bytes(a.gate) * (a.grouped ? tile_slots : 1);
  const auto blocks = static_cast<unsigned>(a.tiles) * a.n_blocks +
                      static_cast<unsigned>(div_up(a.shared_elements, threads));
  const auto kernel = up_mma_kernel<RowGroups, Ahead, Blocks>;
  allow_shared(kernel, shared);
  launch(kernel, blocks, threads, shared, stream, a);
}

void run_up(const FfnArgs& a, cudaStream_t stream) {
  a.grouped ? launch_up<4, 2, 2>(a, stream) : launch_up<2, 3, 4>(a, stream);
}

}  // namespace

bool has_mma(const FfnArgs& a) { return a.gate.tiled && a.up.tiled && a.down.tiled; }

void run_mma(const FfnArgs& args, cudaStream_t stream) {
  run_up(args, stream);
  FfnArgs a = args;
  a.n_blocks = static_cast<int>(a.down.expert.rows / (product_rows * down_warps));
  const std::size_t shared = slot_bytes(a.down) * (a.grouped ? tile_slots : 1);
  allow_shared(down_mma_kernel, shared);
  launch(down_mma_kernel, static_cast<unsigned>(a.tiles) * a.n_blocks, 32 * down_warps, shared,
         stream, a);
}

bool has_sum_mma(const FfnArgs& a, const SumArgs& s) {
  return has_mma(a) && whole_units(s.shared_down) && s.k + shared_warps <= most_sum_warps &&
         slot_bytes(a.down) * static_cast<std::size_t>(s.k) <= most_sum_shared;
}

void run_sum_mma(const FfnArgs& a, const SumArgs& s, cudaStream_t stream) {
  run_up(a, stream);
  const std::int64_t tokens = a.tiles / a.k;
  const std::size_t shared = slot_bytes(a.down) * static_cast<std::size_t>(s.k);
  const dim3 grid(static_cast<unsigned>(tokens),
                  static_cast<unsigned>(a.down.expert.rows / product_rows));
  const auto with = [&](auto kernel) {
    allow_shared(kernel, shared);
    launch(kernel, grid, static_cast<unsigned>(32 * (s.k + shared_warps)), shared, stream, s);
  };
  s.k + shared_warps <= few_sum_warps ? with(sum_mma_kernel<few_sum_warps>)
                                      : with(sum_mma_kernel<most_sum_warps>);
}

}  // namespace imp::cuda
