// The block indexer: keys of finished blocks, scores, and the exact choice of the best blocks.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/rope.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

struct KeysArgs {
  StepView step;
  const float* raw;  // [T, dim]
  const float* w;    // [dim]
  float* keys;       // [pages, page_tokens / ratio, dim]
  std::int64_t state;
  int dim, ratio, rotary_dim;
  double theta;
  float eps;
};

// A block per token; those that finish a block of tokens compute its key.
__global__ void __launch_bounds__(block_threads) index_keys_kernel(const KeysArgs a) {
  begin();
  const std::int64_t t = blockIdx.x;
  const ChunkView& chunk = a.step.chunk_of(t);
  if (chunk.padding()) return;
  const std::int64_t position = chunk.position + t - chunk.row;
  if ((position + 1) % a.ratio != 0) return;
  const std::int64_t first = position + 1 - a.ratio;
  const float* tail = a.step.state_at(chunk, a.state);
  // Mean of the block's raw keys: this step's rows, before them the tail's.
  const auto mean = [&](int d) {
    float sum = 0;
    for (int r = 0; r < a.ratio; ++r) {
      const std::int64_t row = t - a.ratio + 1 + r;
      sum += row >= chunk.row ? a.raw[row * a.dim + d]
                              : tail[static_cast<std::int64_t>(r) * a.dim + d];
    }
    return sum / static_cast<float>(a.ratio);
  };
  float squares = 0;
  for (int d = threadIdx.x; d < a.dim; d += block_threads)
    squares = fmaf(mean(d), mean(d), squares);
  const float scale =
      1.0f / sqrtf(block_sum<block_threads>(squares) / static_cast<float>(a.dim) + a.eps);
  float* key = a.keys + a.step.slot(chunk, first) / a.ratio * a.dim;
  const int half = a.rotary_dim / 2;
  for (int d = threadIdx.x; d < a.dim; d += block_threads) {
    if (d >= half && d < 2 * half) continue;
    const float x = mean(d) * scale * a.w[d];
    if (d >= half) {
      key[d] = x;
      continue;
    }
    const float y = mean(half + d) * scale * a.w[half + d];
    const float angle = rope_angle(first, d, a.rotary_dim, a.theta);
    const float cos = cosf(angle), sin = sinf(angle);
    key[d] = x * cos - y * sin;
    key[half + d] = y * cos + x * sin;
  }
}

// Afterwards: the last `ratio` rows of each chunk go to their places in the tail. A block per
// token.
__global__ void __launch_bounds__(block_threads) index_tail_kernel(const KeysArgs a) {
  begin();
  const std::int64_t t = blockIdx.x;
  const ChunkView& chunk = a.step.chunk_of(t);
  if (chunk.padding()) return;
  if (t + a.ratio < chunk.row + chunk.rows) return;
  const std::int64_t position = chunk.position + t - chunk.row;
  float* tail = a.step.state_at(chunk, a.state) + position % a.ratio * a.dim;
  for (int d = threadIdx.x; d < a.dim; d += block_threads) tail[d] = a.raw[t * a.dim + d];
}

struct SelectArgs {
  StepView step;
  const float* q;          // [T, heads * dim]
  const float* keys;       // [pages, page_tokens / ratio, dim]
  float* scores;           // [rows of this launch, most_blocks]
  std::int32_t* selected;  // [T, blocks]
  std::int64_t most_blocks, first_row;
  int heads, dim, ratio, blocks;

  __device__ int complete_blocks(const ChunkView& chunk, std::int64_t t) const {
    return (chunk.position + (static_cast<int>(t) - chunk.row) + 1) / ratio;
  }
};

// Warps take 4 blocks of a token at a time, 4 heads at once. grid (blocks of the grid, rows)
constexpr int score_keys = 4, score_heads = 4, score_warps = block_threads / 32;
constexpr int score_blocks = 4;  // of a multiprocessor
__global__ void __launch_bounds__(block_threads, score_blocks) score_kernel(const SelectArgs a) {
  const std::int64_t t = a.first_row + blockIdx.y;
  const ChunkView chunk = a.step.chunk_of(t);
  const int blocks = a.complete_blocks(chunk, t);
  if (chunk.padding() || blocks <= a.blocks) return begin();
  const unsigned of_page =
      static_cast<unsigned>(a.step.page_tokens) / static_cast<unsigned>(a.ratio);
  const auto key_of = [&](int b) {
    const auto at = static_cast<unsigned>(min(b, blocks - 1));
    const std::int64_t page = a.step.pages[chunk.first_page + at / of_page];
    return a.keys + (page * of_page + at % of_page) * a.dim;
  };
  const int first = (static_cast<int>(blockIdx.x) * score_warps + warp_id()) * score_keys;
  constexpr int line = 32;  // floats
  const int lines = static_cast<int>(div_up(a.dim, line));
  if (first < blocks)  // all but the newest key are older than the step
    for (int i = lane_id(); i < score_keys * lines; i += 32)
      prefetch(key_of(first + i / lines) + i % lines * line);
  begin();
  const float* q = a.q + t * a.heads * a.dim;
  const int stride = static_cast<int>(gridDim.x) * score_warps * score_keys;
  const float* next[score_keys];  // found a step ahead
#pragma unroll
  for (int j = 0; j < score_keys; ++j) next[j] = key_of(first + j);
  for (int b0 = first; b0 < blocks; b0 += stride) {
    const float* key[score_keys];
#pragma unroll
    for (int j = 0; j < score_keys; ++j) {
      key[j] = next[j];
      next[j] = key_of(b0 + stride + j);
    }
    float score = 0;
    for (int h0 = 0; h0 < a.heads; h0 += score_heads) {
      float dots[score_heads * score_keys] = {};
      for (int d = lane_id(); d < a.dim; d += 32) {
        float k[score_keys];
#pragma unroll
        for (int j = 0; j < score_keys; ++j) k[j] = key[j][d];
#pragma unroll
        for (int h = 0; h < score_heads; ++h) {
          const float x = h0 + h < a.heads ? q[(h0 + h) * a.dim + d] : 0.0f;
#pragma unroll
          for (int j = 0; j < score_keys; ++j)
            dots[h * score_keys + j] = fmaf(x, k[j], dots[h * score_keys + j]);
        }
      }
      // Lane l holds head l / 4 % 4 of key l % 4.
      float relu = fmaxf(0.0f, warp_sums(dots));
      relu += __shfl_xor_sync(all_lanes, relu, score_keys);
      relu += __shfl_xor_sync(all_lanes, relu, 2 * score_keys);
      score += relu;
    }
    if (lane_id() < score_keys && b0 + lane_id() < blocks)
      a.scores[blockIdx.y * a.most_blocks + b0 + lane_id()] = score;
  }
}

constexpr int select_threads = 1024;

// How many blocks of lower threads are above the threshold and how many are its equals; `total` is
// the block's.
struct Ranks {
  int above, equal;
};
__device__ Ranks ranks_of(bool above, bool equal, Ranks* total) {
  constexpr int warps = select_threads / 32;
  __shared__ Ranks counts[warps];
  const unsigned above_lanes = __ballot_sync(all_lanes, above),
                 equal_lanes = __ballot_sync(all_lanes, equal), lower = (1u << lane_id()) - 1;
  __syncthreads();
  if (lane_id() == 0) counts[warp_id()] = {__popc(above_lanes), __popc(equal_lanes)};
  __syncthreads();
  static_assert(warps == 32);  // a lane's
  const Ranks mine = counts[lane_id()];
  const bool before = lane_id() < warp_id();
  *total = {__reduce_add_sync(all_lanes, mine.above), __reduce_add_sync(all_lanes, mine.equal)};
  return {__reduce_add_sync(all_lanes, before ? mine.above : 0) + __popc(above_lanes & lower),
          __reduce_add_sync(all_lanes, before ? mine.equal : 0) + __popc(equal_lanes & lower)};
}

// The bits of the k-th largest of n scores, and how many of its equals belong to the k largest.
// Scores are not negative, so their bits sort like they do.
struct Threshold {
  std::uint32_t bits;
  int equals;
};

constexpr int held = 4;  // scores of a thread: of blocks thread, thread + select_threads, ...

// Digit by digit, from the highest bit in which scores differ. The histograms are integer counts:
// the order of their additions does not show. `each(f)` calls f with the bits of every score.
template <class Each>
__device__ Threshold threshold_of(Each each, int k) {
  __shared__ unsigned histogram[256];
  __shared__ unsigned digit, needed_shared, least, most;
  if (threadIdx.x == 0) least = ~0u, most = 0;
  __syncthreads();
  unsigned low = ~0u, high = 0;
  each([&](std::uint32_t bits) {
    low = min(low, bits);
    high = max(high, bits);
  });
  low = __reduce_min_sync(all_lanes, low);
  high = __reduce_max_sync(all_lanes, high);
  if (lane_id() == 0) {
    atomicMin(&least, low);
    atomicMax(&most, high);
  }
  __syncthreads();
  int shift = 32 - __clz(static_cast<int>(least ^ most));
  std::uint32_t prefix = shift == 32 ? 0 : most >> shift << shift;
  std::uint32_t mask = shift == 32 ? 0 : ~0u << shift;
  unsigned needed = static_cast<unsigned>(k);  // of the scores that share the prefix
  while (shift > 0) {
    const int bits_now = min(shift, 8);
    shift -= bits_now;
    const std::uint32_t digits = (1u << bits_now) - 1;
    if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
    __syncthreads();
    each([&](std::uint32_t bits) {
      if ((bits & mask) == prefix) atomicAdd(&histogram[bits >> shift & digits], 1u);
    });
    __syncthreads();
    if (threadIdx.x < 32) {  // lane l looks at digits 255 - 8l downwards
      unsigned mine = 0;
      for (int i = 0; i < 8; ++i) mine += histogram[255 - 8 * lane_id() - i];
      unsigned above = mine;
      for (int d = 1; d < 32; d <<= 1) {
        const unsigned other = __shfl_up_sync(all_lanes, above, d);
        if (lane_id() >= d) above += other;
      }
      above -= mine;
      if (above < needed && needed <= above + mine) {
        int at = 255 - 8 * lane_id();
        while (above + histogram[at] < needed) above += histogram[at--];
        digit = static_cast<unsigned>(at);
        needed_shared = needed - above;
      }
    }
    __syncthreads();
    prefix |= digit << shift;
    mask |= digits << shift;
    needed = needed_shared;
  }
  return {prefix, static_cast<int>(needed)};
}

// Emits in index order every block above the threshold and the first of its equals. A block per
// token.
__global__ void __launch_bounds__(select_threads) select_kernel(const SelectArgs a) {
  const std::int64_t t = a.first_row + blockIdx.x;
  const ChunkView chunk = a.step.chunk_of(t);
  const int blocks = a.complete_blocks(chunk, t);
  begin();
  if (chunk.padding()) return;
  std::int32_t* selected = a.selected + t * a.blocks;
  if (blocks <= a.blocks) {
    if (threadIdx.x == 0) selected[0] = -1;
    return;
  }
  const auto* bits = reinterpret_cast<const std::uint32_t*>(a.scores + blockIdx.x * a.most_blocks);
  Threshold least;
  if (blocks <= held * select_threads) {
    std::uint32_t mine[held];
#pragma unroll
    for (int i = 0; i < held; ++i)
      if (threadIdx.x + i * select_threads < blocks)
        mine[i] = bits[threadIdx.x + i * select_threads];
    least = threshold_of(
        [&](auto f) {
#pragma unroll
          for (int i = 0; i < held; ++i)
            if (threadIdx.x + i * select_threads < blocks) f(mine[i]);
        },
        a.blocks);
  } else {
    least = threshold_of(
        [&](auto f) {
          for (int b = static_cast<int>(threadIdx.x); b < blocks; b += select_threads) f(bits[b]);
        },
        a.blocks);
  }
  Ranks passed{0, 0};
  for (int first = 0; first < blocks; first += select_threads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const std::uint32_t score = b < blocks ? bits[b] : 0;
    const bool above = b < blocks && score > least.bits, equal = b < blocks && score == least.bits;
    Ranks total;
    const Ranks rank = ranks_of(above, equal, &total);
    const int equals = passed.equal + rank.equal;
    if (above || (equal && equals < least.equals))
      selected[passed.above + rank.above + min(equals, least.equals)] =
          static_cast<std::int32_t>(b);
    passed = {passed.above + total.above, passed.equal + total.equal};
  }
}

constexpr std::size_t most_score_bytes = std::size_t{256} << 20;

// Rows whose scores fit into the workspace at once.
std::int64_t rows_at_once_of(std::int64_t rows, std::int64_t most_blocks) {
  const auto fitting = static_cast<std::int64_t>(most_score_bytes / sizeof(float)) / most_blocks;
  constexpr std::int64_t most_grid_rows = 65535;
  return std::max<std::int64_t>(1, std::min({rows, fitting, most_grid_rows}));
}

}  // namespace

void run(const IndexKeys& op, const Context& c) {
  const auto rows = static_cast<unsigned>(c.rows(op.raw));
  if (rows == 0) return;
  const KeysArgs a{c.step,
                   c.f32(op.raw),
                   c.vector(op.w),
                   c.kv[op.layer].index,
                   op.state,
                   static_cast<int>(op.dim),
                   static_cast<int>(op.ratio),
                   static_cast<int>(op.rotary_dim),
                   op.theta,
                   op.eps};
  launch(index_keys_kernel, rows, block_threads, 0, c.stream, a);
  launch(index_tail_kernel, rows, block_threads, 0, c.stream, a);
}

std::size_t scratch_bytes(const IndexSelect& op, std::int64_t rows, std::int64_t context) {
  const std::int64_t most_blocks = context / op.ratio + 1;
  return static_cast<std::size_t>(rows_at_once_of(rows, most_blocks) * most_blocks) * sizeof(float);
}

void run(const IndexSelect& op, const Context& c) {
  const std::int64_t rows = c.rows(op.q), most_blocks = c.context / op.ratio + 1;
  const std::int64_t step = rows_at_once_of(rows, most_blocks);
  // Warps take blocks in turn, where more of them than run at once would only start and end.
  const std::int64_t at_once = static_cast<std::int64_t>(score_blocks) * limits().processors;
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(
      at_once / std::min(rows, step), 1, div_up(most_blocks, score_warps * score_keys)));
  SelectArgs a{c.step,
               c.f32(op.q),
               c.kv[op.layer].index,
               reinterpret_cast<float*>(c.scratch),
               c.i32(op.selected),
               most_blocks,
               0,
               static_cast<int>(op.heads),
               static_cast<int>(op.dim),
               static_cast<int>(op.ratio),
               static_cast<int>(op.blocks)};
  for (; a.first_row < rows; a.first_row += step) {
    const auto n = static_cast<unsigned>(std::min(step, rows - a.first_row));
    launch(score_kernel, dim3(grid, n), block_threads, 0, c.stream, a);
    launch(select_kernel, n, select_threads, 0, c.stream, a);
  }
}

}  // namespace imp::cuda
