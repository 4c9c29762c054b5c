// Down of NVFP4 experts and the weighted sum of a token's slots, for few tokens.
#include <algorithm>

#include "cuda/common/expert_tiles.cuh"
#include "cuda/common/matvec.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/moe.h"

namespace imp::cuda {
namespace {

// A stage of a warp: tiles of one group of 8 rows, those of the next, then the scales of both.
constexpr int pair_codes = stage_tiles * tiles::code_bytes,
              pair_scales = stage_tiles * tiles::scale_bytes,
              pair_bytes = 2 * (pair_codes + pair_scales);
constexpr int pair_copies = 4;  // lanes that copy a part each

// A pair of row groups on its way to a warp; `rows`: in each lane that copies, its part of it.
class Pipe {
 public:
  __device__ __forceinline__ Pipe(std::byte* stages, Barrier* full, int ahead, int n_tiles,
                                  const std::byte* rows)
      : stages_(stages), full_(full), rows_(rows), n_tiles_(n_tiles), put_(ahead), take_(ahead) {
    if (lane_id() == 0) init_barriers(full, ahead);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) put();
  }
  // acc = the pair times x
  __device__ __forceinline__ void multiply(const Column& x, float (&acc)[4]) {
    float sums[2][4] = {};
    for (int t = 0; t < n_tiles_; t += stage_tiles) {
      await_phase(full_ + take_.at(), take_.phase());
      const std::byte* codes = stages_ + take_.at() * pair_bytes;
      add_pairs(codes, codes + 2 * pair_codes, stage_tiles, x, t, min(stage_tiles, n_tiles_ - t),
                sums);
      take_.advance();
      __syncwarp();
      put();
    }
    join_sums(sums, acc);
  }

 private:
  __device__ __forceinline__ void put() {  // starts the next stage, if there is one
    if (at_ == n_tiles_) return;
    const int n = min(stage_tiles, n_tiles_ - at_), lane = lane_id();
    Barrier* full = full_ + put_.at();
    if (lane == 0) expect_bytes(full, 2 * n * (tiles::code_bytes + tiles::scale_bytes));
    __syncwarp();
    if (lane < pair_copies) {
      const bool scales = lane >= 2;
      const int size = scales ? tiles::scale_bytes : tiles::code_bytes;
      std::byte* to = stages_ + put_.at() * pair_bytes + (scales ? 2 * pair_codes : 0);
      bulk_copy(to + lane % 2 * stage_tiles * size, rows_ + at_ * size, n * size, full);
    }
    at_ += n;
    put_.advance();
  }

  std::byte* stages_;
  Barrier* full_;
  const std::byte* rows_;
  int n_tiles_, at_ = 0;
  Ring put_, take_;
};

constexpr int shared_warps = product_rows / rows_at_once;
constexpr int few_sum_warps = 14, most_sum_warps = 32;

// Stages, activations and barriers of a slot's warp.
__host__ __device__ constexpr int sum_bytes(int cols, int ahead) {
  return ahead * pair_bytes + 2 * row_words(cols) * static_cast<int>(sizeof(uint4)) +
         (ahead + 1) / 2 * static_cast<int>(2 * sizeof(Barrier));
}

// Down rows of all slots of a token, a warp each, and of the shared expert, then their sum in rank
// order: the bits of the separate kernels. grid (T, groups of rows)
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
    with_format(m.type, [&]<class F>(F) {
      for (int part = 0; part < a.split; ++part) {  // as the linear map does it
        float acc[1][R] = {};
        dot_rows<F, 1, R, true>(w, x, static_cast<int>(m.cols), part * 32 + lane_id(), a.split * 32,
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
    std::byte* stages = reinterpret_cast<std::byte*>(memory) + warp_id() * sum_bytes(cols, a.ahead);
    auto* hi = reinterpret_cast<uint4*>(stages + a.ahead * pair_bytes);
    const int words = row_words(cols);
    const std::byte* rows_of_lane = nullptr;
    if (lane_id() < pair_copies) {
      const Experts& b = a.down;
      const std::int64_t at = b.place(e), first = (n0 / tiles::rows + lane_id() % 2) * n_tiles;
      rows_of_lane = lane_id() < 2
                         ? b.expert.data + at * b.bytes + first * tiles::code_bytes
                         : b.expert.scales + at * b.scale_bytes + first * tiles::scale_bytes;
    }
    Pipe pipe(stages, reinterpret_cast<Barrier*>(hi + 2 * words), a.ahead, n_tiles, rows_of_lane);
    const float scale = expert_scale(a.down, e);
    await_previous();
    stage<3>(a.hidden + slot * cols, cols, hi, hi + words, lane_id(), 32, [] {});
    __syncwarp();
    float acc[4];
    pipe.multiply(Column(hi, 1, words), acc);
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

// Stages of a warp: one is enough for rows that it holds.
int sum_ahead(const Experts& down) { return down.expert.cols <= stage_tiles * tiles::cols ? 1 : 2; }

std::size_t sum_shared(const SumArgs& s) {
  const auto cols = static_cast<int>(s.down.expert.cols);
  return static_cast<std::size_t>(s.k) *
         static_cast<std::size_t>(sum_bytes(cols, sum_ahead(s.down)));
}

}  // namespace

bool has_sum_mma(const FfnArgs& a, const SumArgs& s) {
  constexpr std::size_t own_shared = most_sum_warps * product_rows * sizeof(float);
  return has_mma(a) && whole_units(s.shared_down) && s.k + shared_warps <= most_sum_warps &&
         sum_shared(s) + own_shared <= limits().block_shared;
}

void run_sum_mma(FfnArgs a, SumArgs s, cudaStream_t stream) {
  constexpr std::int64_t most_prefetched = std::int64_t{16} << 20;  // what the cache surely keeps
  const std::int64_t down_bytes =
      a.tiles * a.down.expert.rows * (a.down.expert.row_bytes + a.down.expert.scale_row_bytes);
  if (!a.grouped && a.tiles < limits().processors && down_bytes <= most_prefetched) {
    a.shared_down = s.shared_down.data;
    a.shared_down_bytes = s.shared_down.rows * s.shared_down.row_bytes;
  }
  run_up_mma(a, stream);
  s.ahead = sum_ahead(s.down);
  const dim3 grid(static_cast<unsigned>(a.slots / a.k),
                  static_cast<unsigned>(s.down.expert.rows / product_rows));
  const std::size_t shared = sum_shared(s);
  const auto with = [&](auto kernel) {
    allow_shared(kernel, shared);
    launch(kernel, grid, static_cast<unsigned>(32 * (s.k + shared_warps)), shared, stream, s);
  };
  s.k + shared_warps <= few_sum_warps ? with(sum_mma_kernel<few_sum_warps>)
                                      : with(sum_mma_kernel<most_sum_warps>);
}

}  // namespace imp::cuda
