// Dense linear maps of several activation rows on tensor cores. Weights and fp32 activations pass
// through shared memory in stages; there is a product of 16 weight rows, 8 activation rows and 16
// columns for each of the two bf16 (hi, lo) that an activation is the sum of.
//
// Which columns are added in which order depends on the weights alone: not on the number of
// activation rows, nor on the shape of the blocks that it leads to.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/linear.h"

namespace imp::cuda {
namespace {

constexpr int word_bytes = sizeof(uint4);
constexpr int group_cols = 32;  // of two products
constexpr int product_rows = 16, product_tokens = 8;
constexpr int most_ranks = 8;  // blocks of a cluster, on every device

// One side of a stage in shared memory: tiles of TileWords words (16 bytes) a row, side by side.
// Rows and words change places so that eight threads meet all banks when they read a word of as
// many rows, or write the words of one row to several tiles.
template <int Rows, int TileWords>
struct Tiles {
  static constexpr int rows = Rows, tile_words = TileWords;
  static __device__ __forceinline__ int at(int tile, int row, int word) {
    constexpr int line_rows = 8 / TileWords;  // that share 128 bytes
    return (tile * Rows + (row ^ tile % line_rows)) * TileWords +
           (word ^ row / line_rows % TileWords);
  }
};

// A block makes `Rows` outputs of `Tokens` activation rows. Its warps share the outputs, the tokens
// and, group by group in turn, the columns.
template <int Rows, int Tokens, int RowWarps, int TokenWarps, int ColumnWarps, int Stages,
          int Blocks>
struct Shape {
  static constexpr int rows = Rows, tokens = Tokens, stages = Stages, blocks = Blocks;
  static constexpr int row_warps = RowWarps, column_warps = ColumnWarps;
  static constexpr int threads = 32 * RowWarps * TokenWarps * ColumnWarps;
  static constexpr int cols = ColumnWarps * group_cols;  // of a stage
  // Products of a warp.
  static constexpr int m = Rows / RowWarps / product_rows;
  static constexpr int n = Tokens / TokenWarps / product_tokens;
  // Tiles of 32 weights and of 8 activations.
  using Weights = Tiles<Rows, 4>;
  using Tokens8 = Tiles<Tokens, 2>;
  static constexpr int weight_words = cols * 2 / word_bytes, x_words = cols * 4 / word_bytes;
  static constexpr int x_at = Rows * weight_words;  // in a stage
  static constexpr int stage_words = x_at + Tokens * x_words;
  // Sums of the warps that share columns: [column warps][tokens][pitch], without bank conflicts.
  static constexpr int pitch = Rows + 4;
  // Blocks of so many rows begin at the same column, see Place.
  static constexpr int phase_rows = 256 / ColumnWarps;
  static_assert(phase_rows % Rows == 0);
  static constexpr std::size_t shared =
      std::max(sizeof(uint4) * Stages * stage_words, sizeof(float) * ColumnWarps * Tokens * pitch);
};

struct Args : LinearArgs {
  int ranks;  // blocks that share the columns: a cluster
  // The gated mean of the streams (one part).
  const float* n;
  float* mixed;
  std::int64_t hidden;
};

// What a block does.
template <class S, bool Mix>
struct Place {
  const LinearPart& part;
  std::int64_t row0, token0;
  int rank, first, count, start;  // stages: `count` from `first` on, in turn from `start` on

  static __device__ __forceinline__ int part_of(const Args& a, int block) {
    int i = 0;
    while (i + 1 < a.n_parts && block >= a.parts[i + 1].first_block) ++i;
    return i;
  }
  __device__ __forceinline__ Place(const Args& a, int block)
      : part(a.parts[part_of(a, block / a.token_groups)]),
        row0((block / a.token_groups - part.first_block) * static_cast<std::int64_t>(slab)),
        token0(block % a.token_groups * static_cast<std::int64_t>(S::tokens)),
        rank(static_cast<int>(blockIdx.x) % a.ranks) {
    const int all = static_cast<int>(div_up(part.w.cols, S::cols));
    first = all * rank / a.ranks;
    count = all * (rank + 1) / a.ranks - first;
    // Blocks run in step. If they began at the same column, all would ask for the same few lines
    // of the activations at a time, and those lie in few slices of the second cache.
    start = Mix ? 0 : static_cast<int>(row0 / S::phase_rows % count);
  }
  // The i-th stage.
  __device__ __forceinline__ int stage(int i) const {
    return first + (start + i < count ? start + i : start + i - count);
  }
  // A block of the mixed streams has as many rows of each.
  static constexpr int slab = Mix ? S::rows / mix_streams : S::rows;
};

// What a thread copies of one side: a word of every `step`-th row.
template <class To, int Threads, int Words>
struct Copies {
  static constexpr int step = Threads / Words;
  static constexpr int turns = static_cast<int>(div_up(To::rows, step));
  const int row = static_cast<int>(threadIdx.x) / Words;
  const int word = static_cast<int>(threadIdx.x) % Words;
  const std::byte* from;  // in the first row
  std::int64_t stride;    // from a turn's row to the next one's
  int found;              // turns that find a row
  int bytes;              // up to the last column

  __device__ __forceinline__ void copy(uint4* to, int stage) const {
    const int at = stage * (Words * word_bytes);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      const int r = row + turn * step;
      if (To::rows % step == 0 || r < To::rows)
        copy_async(to + To::at(word / To::tile_words, r, word % To::tile_words),
                   from + at + turn * stride, at < bytes && turn < found);
    }
  }

 protected:
  __device__ __forceinline__ void begin_at(const std::byte* row_data, std::int64_t row_bytes) {
    from = row_data + word * word_bytes;
    bytes = static_cast<int>(row_bytes) - word * word_bytes;
  }
};

template <class S, bool Mix>
struct WeightCopies : Copies<typename S::Weights, S::threads, S::weight_words> {
  __device__ __forceinline__ WeightCopies(const Args& a, const Place<S, Mix>& at) {
    const Matrix& w = at.part.w;
    constexpr int slab = Place<S, Mix>::slab, step = WeightCopies::step;
    const int row = this->row;
    if constexpr (Mix) {
      static_assert(step % slab == 0);
      this->begin_at(w.data + (row / slab * a.hidden + at.row0 + row % slab) * w.row_bytes,
                     w.row_bytes);
      this->stride = step / slab * a.hidden * w.row_bytes;
      this->found = at.row0 + row % slab < a.hidden ? WeightCopies::turns : 0;
    } else {
      this->begin_at(w.data + (at.row0 + row) * w.row_bytes, w.row_bytes);
      this->stride = step * w.row_bytes;
      this->found = static_cast<int>(div_up(w.rows - at.row0 - row, step));
    }
  }
};

template <class S, bool Mix>
struct TokenCopies : Copies<typename S::Tokens8, S::threads, S::x_words> {
  __device__ __forceinline__ TokenCopies(const Args& a, const Place<S, Mix>& at) {
    const std::int64_t bytes = at.part.w.cols * 4;
    this->begin_at(reinterpret_cast<const std::byte*>(a.x) + (at.token0 + this->row) * bytes,
                   bytes);
    this->stride = TokenCopies::step * bytes;
    this->found = static_cast<int>(div_up(a.rows - at.token0 - this->row, TokenCopies::step));
  }
};

// A warp's part of a block, and its lanes' of the products.
template <class S>
struct Warp {
  const int g = lane_id() / 4, c = lane_id() % 4;
  const int group = warp_id() % S::column_warps;
  const int row0 = warp_id() / S::column_warps % S::row_warps * (S::m * product_rows);
  const int token0 = warp_id() / (S::column_warps * S::row_warps) * (S::n * product_tokens);

  // acc += the products of half of the group's columns
  template <int Half>
  __device__ __forceinline__ void multiply(const uint4* stage, float (&acc)[S::m][S::n][4]) const {
    std::uint32_t weights[S::m][4];
    const int row = row0 + lane_id() % 16, word = 2 * Half + lane_id() / 16;
#pragma unroll
    for (int i = 0; i < S::m; ++i)
      load_a(weights[i], stage + S::Weights::at(group, row, word) + i * product_rows * 4);
#pragma unroll
    for (int j = 0; j < S::n; ++j) {
      SplitPair x[2];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint4* at = stage + S::x_at + j * product_tokens * 2 +
                          S::Tokens8::at(4 * group + 2 * Half + p, token0 + g, c / 2);
        const float2 v = reinterpret_cast<const float2*>(at)[c % 2];
        x[p] = split_pair(v.x, v.y);
      }
#pragma unroll
      for (int i = 0; i < S::m; ++i) mma_bf16(acc[i][j], weights[i], {x[0].hi, x[1].hi});
#pragma unroll
      for (int i = 0; i < S::m; ++i) mma_bf16(acc[i][j], weights[i], {x[0].lo, x[1].lo});
    }
  }

  __device__ __forceinline__ void store(const float (&acc)[S::m][S::n][4], float* sums) const {
    float* to = sums + (group * S::tokens + token0 + 2 * c) * S::pitch + row0 + g;
#pragma unroll
    for (int i = 0; i < S::m; ++i)
#pragma unroll
      for (int j = 0; j < S::n; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          to[(j * product_tokens + e % 2) * S::pitch + i * product_rows + e / 2 * 8] = acc[i][j][e];
  }
};

// f(i, turn) for i < N, shared by the threads of a block; in `turn` each of them has its turn-th.
template <int Threads, int N, class F>
__device__ __forceinline__ void share(F f) {
#pragma unroll
  for (int turn = 0; turn < div_up(N, Threads); ++turn) {
    const int i = turn * Threads + static_cast<int>(threadIdx.x);
    if (N % Threads == 0 || i < N) f(i, turn);
  }
}

template <class S>
__device__ __forceinline__ float sum_of(const float* sums, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < S::column_warps; ++w) sum += sums[(w * S::tokens + token) * S::pitch + row];
  return sum;
}

template <class S, bool Mix>
__global__ void __launch_bounds__(S::threads, S::blocks)
    linear_mma_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 memory[];
  const Place<S, Mix> at(a, static_cast<int>(blockIdx.x) / a.ranks);
  const auto slot = [&](int i) { return memory + i * S::stage_words; };
  const auto load = [&](const auto& side, uint4* to, int i) {
    if (i < at.count) side.copy(to, at.stage(i));
  };
  const WeightCopies<S, Mix> weights(a, at);
  for (int i = 0; i < S::stages - 1; ++i) load(weights, slot(i), i);
  begin();
  const TokenCopies<S, Mix> x(a, at);
  for (int i = 0; i < S::stages - 1; ++i) {
    load(x, slot(i) + S::x_at, i);
    end_group();
  }
  // Streams of the elements that a thread will mix.
  constexpr int slab = Place<S, Mix>::slab, elements = Mix ? slab * S::tokens : S::threads;
  float n[div_up(elements, S::threads)][mix_streams];
  if constexpr (Mix)
    share<S::threads, elements>([&](int e, int turn) {
      const std::int64_t t = at.token0 + e / slab, i = at.row0 + e % slab;
#pragma unroll
      for (int s = 0; s < mix_streams; ++s)
        n[turn][s] = t < a.rows && i < a.hidden ? a.n[(t * mix_streams + s) * a.hidden + i] : 0.0f;
    });

  const Warp<S> warp;
  float acc[S::m][S::n][4] = {};
  int full = 0;
  for (int i = 0; i < at.count; ++i) {
    wait_groups<S::stages - 2>();
    __syncthreads();  // all threads' copies are there, and all are done with the slot before
    const int free = full == 0 ? S::stages - 1 : full - 1;
    warp.template multiply<0>(slot(full), acc);
    load(weights, slot(free), i + S::stages - 1);
    load(x, slot(free) + S::x_at, i + S::stages - 1);
    end_group();
    warp.template multiply<1>(slot(full), acc);
    full = full == S::stages - 1 ? 0 : full + 1;
  }
  wait_groups<0>();
  __syncthreads();
  auto* sums = reinterpret_cast<float*>(memory);
  warp.store(acc, sums);
  __syncthreads();

  if constexpr (Mix) {
    share<S::threads, elements>([&](int e, int turn) {
      const std::int64_t t = at.token0 + e / slab, i = at.row0 + e % slab;
      float mean = 0;
#pragma unroll
      for (int s = 0; s < mix_streams; ++s)
        mean = fmaf(sigmoid(at.part.alpha * sum_of<S>(sums, e / slab, s * slab + e % slab)),
                    n[turn][s], mean);
      if (t < a.rows && i < a.hidden) a.mixed[t * a.hidden + i] = mean * (1.0f / mix_streams);
    });
    return;
  }
  const auto store = [&](int e, float sum) {
    const std::int64_t t = at.token0 + e / S::rows, r = at.row0 + e % S::rows;
    if (t < a.rows && r < at.part.w.rows)
      at.part.y[t * at.part.w.rows + r] = activate(at.part.act, at.part.alpha * sum);
  };
  constexpr int outputs = S::rows * S::tokens;
  if (a.ranks == 1)
    return share<S::threads, outputs>(
        [&](int e, int) { store(e, sum_of<S>(sums, e / S::rows, e % S::rows)); });
  share<S::threads, outputs>([&](int e, int) {
    sums[e / S::rows * S::pitch + e % S::rows] = sum_of<S>(sums, e / S::rows, e % S::rows);
  });
  cluster_arrive();
  cluster_wait();
  for (int e = at.rank * S::threads + static_cast<int>(threadIdx.x); e < outputs;
       e += a.ranks * S::threads) {
    float sum = 0;
    for (int rank = 0; rank < a.ranks; ++rank)
      sum += load_remote(sums + e / S::rows * S::pitch + e % S::rows, rank);
    store(e, sum);
  }
  cluster_arrive();  // nobody leaves while its sums are read
  cluster_wait();
}

template <class S, bool Mix>
void launch_shape(Args a, cudaStream_t stream) {
  std::int64_t blocks = 0;
  for (int i = 0; i < a.n_parts; ++i) {
    a.parts[i].first_block = static_cast<int>(blocks);
    blocks += div_up(Mix ? a.hidden : a.parts[i].w.rows, Place<S, Mix>::slab);
  }
  a.token_groups = static_cast<int>(div_up(a.rows, S::tokens));
  const auto kernel = linear_mma_kernel<S, Mix>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(S::shared)),
        "cudaFuncSetAttribute");
  launch_clusters(kernel, static_cast<unsigned>(blocks * a.token_groups * a.ranks), S::threads,
                  static_cast<unsigned>(a.ranks), S::shared, stream, a);
}

// The first shape that the device has room for.
template <bool Mix, class S, class... Smaller>
void launch_first(const Args& a, cudaStream_t stream) {
  if constexpr (sizeof...(Smaller) > 0)
    if (S::shared > limits().block_shared) return launch_first<Mix, Smaller...>(a, stream);
  launch_shape<S, Mix>(a, stream);
}

// Rows, tokens, warps for each and for the columns, stages, blocks of a multiprocessor.
using Wide8 = Shape<64, 8, 4, 1, 2, 7, 3>;
using Wide16 = Shape<64, 16, 4, 1, 2, 6, 3>;
using Wide32 = Shape<128, 32, 2, 2, 2, 4, 2>;
using Wide64 = Shape<128, 64, 2, 2, 2, 4, 1>;
using Wide128 = Shape<128, 128, 2, 2, 2, 4, 1>;
using Narrow8 = Shape<16, 8, 1, 1, 4, 11, 2>;
using Narrower32 = Shape<32, 32, 1, 2, 4, 8, 1>;
using Narrow32 = Shape<64, 32, 1, 2, 4, 6, 1>;
using Narrow64 = Shape<64, 64, 1, 2, 4, 4, 1>;
using Mix64 = Shape<128, 64, 2, 2, 2, 6, 1>;
// Within 99 KiB, as consumer devices have.
using SmallWide = Shape<128, 64, 2, 2, 2, 3, 1>;
using SmallNarrow = Shape<64, 32, 1, 2, 4, 3, 1>;
static_assert(std::max({Wide8::shared, Wide16::shared, Wide32::shared, Narrow8::shared,
                        SmallWide::shared, SmallNarrow::shared}) <= std::size_t{99} << 10);

}  // namespace

bool has_mma(const Matrix& w) { return w.type == DType::bf16 && w.cols % 8 == 0; }

void run_mma(const LinearArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.n_parts == 0) return;
  Args a{args};
  // Enough blocks to fill a large device, but each with a few stages.
  constexpr int enough = 100, few = 64, least_cols = 160;
  const std::int64_t cols = a.parts[0].w.cols;
  std::int64_t tiles = 0;
  for (int i = 0; i < a.n_parts; ++i) tiles += div_up(a.parts[i].w.rows, Wide128::rows);
  a.ranks = 1;
  if (overlaps_launches())  // and so has clusters
    while (a.ranks < most_ranks && tiles * a.ranks < enough && cols >= 2 * a.ranks * least_cols)
      a.ranks *= 2;
  if (tiles * a.ranks < few) {
    if (a.rows <= 8) return launch_first<false, Narrow8>(a, stream);
    if (a.rows <= 32) return launch_first<false, Narrower32, SmallNarrow>(a, stream);
    if (a.rows <= 64) return launch_first<false, Narrow32, SmallNarrow>(a, stream);
    return launch_first<false, Narrow64, SmallNarrow>(a, stream);
  }
  if (a.rows <= 8) return launch_first<false, Wide8>(a, stream);
  if (a.rows <= 16) return launch_first<false, Wide16>(a, stream);
  if (a.rows <= 32) return launch_first<false, Wide32>(a, stream);
  if (a.rows <= 64) return launch_first<false, Wide64, SmallWide>(a, stream);
  launch_first<false, Wide128, SmallWide>(a, stream);
}

void run_mma(const MixArgs& m, cudaStream_t stream) {
  if (m.rows == 0) return;
  const Args a{
      {m.low, m.rows, 0, 1, {{m.w, nullptr, m.w.scale, Act::none, 0, 1}}}, 1, m.n, m.x, m.hidden};
  if (a.rows <= 8) return launch_first<true, Wide8>(a, stream);
  if (a.rows <= 16) return launch_first<true, Wide16>(a, stream);
  launch_first<true, Mix64, SmallWide>(a, stream);
}

}  // namespace imp::cuda
