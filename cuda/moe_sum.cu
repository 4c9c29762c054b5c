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

// A warp's pairs of row groups on their way. next(rows) finds the next pair, in each lane that
// copies its part of it, or returns false.
template <class Next>
class Pipe {
 public:
  __device__ __forceinline__ Pipe(std::byte* stages, Barrier* full, int ahead, int n_tiles,
                                  Next next)
      : stages_(stages),
        full_(full),
        n_tiles_(n_tiles),
        at_(n_tiles),
        put_(ahead),
        take_(ahead),
        next_(next) {
    if (lane_id() == 0) init_barriers(full, ahead);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) put();
  }
  // acc = the next pair times x
  __device__ __forceinline__ void multiply(const Column& x, float (&acc)[4]) {
    float sums[2][4] = {};
#pragma unroll 1
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
    if (at_ == n_tiles_) {
      if (!next_(rows_)) return;
      at_ = 0;
    }
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
  const std::byte* rows_ = nullptr;
  int n_tiles_, at_;
  Ring put_, take_;
  Next next_;
};

constexpr int most_sum_warps = 32;
constexpr int shared_warps = product_rows / rows_at_once, few_shared_warps = 2;
constexpr int usual_sum_threads = 32 * 14;  // of 10 slots; more have fewer registers

// What a term of a token's sum adds to a group of rows.
struct Term {
  float weight, rows[product_rows];
};

// Stages, activations and barriers of a slot's warp.
__host__ __device__ constexpr int sum_bytes(int cols, int ahead) {
  return ahead * pair_bytes + 2 * row_words(cols) * static_cast<int>(sizeof(uint4)) +
         (ahead + 1) / 2 * static_cast<int>(2 * sizeof(Barrier));
}

// Down rows of all slots of a token, a warp each, and of the shared expert, then their sum in rank
// order: the bits of the separate kernels. A block takes a contiguous share of all tokens' groups
// of rows.
template <class F, int Threads>
__global__ void __launch_bounds__(Threads, 1) sum_mma_kernel(const __grid_constant__ SumArgs a) {
  extern __shared__ uint4 memory[];
  __shared__ Term terms[2][most_sum_warps];
  allow_next();
  const std::int64_t rows = a.down.expert.rows;
  const int warp = warp_id(), g = lane_id() / 4, c = lane_id() % 4;
  const int groups = static_cast<int>(rows) / product_rows, items = a.tokens * groups,
            begin = static_cast<int>(static_cast<std::int64_t>(items) * blockIdx.x / gridDim.x),
            end = static_cast<int>(static_cast<std::int64_t>(items) * (blockIdx.x + 1) / gridDim.x);
  // At the end of a group's turn.
  const auto sum = [&](int item) {
    __syncthreads();
    if (warp != a.k || lane_id() >= product_rows) return;
    const Term* term = terms[(item - begin) % 2];
    const int r = lane_id();
    float y = 0;
    for (int j = 0; j <= a.k; ++j) y = fmaf(term[j].weight, term[j].rows[r], y);
    a.y[item / groups * rows + item % groups * product_rows + r] = y;
  };
  if (warp < a.k) {
    const int cols = static_cast<int>(a.down.expert.cols), n_tiles = cols / tiles::cols;
    auto* stages = reinterpret_cast<std::byte*>(memory) + warp * sum_bytes(cols, a.ahead);
    auto* hi = reinterpret_cast<uint4*>(stages + a.ahead * pair_bytes);
    const int words = row_words(cols);
    // The up kernel lets this one start when the ids are there.
    int coming = begin;
    const auto next = [&](const std::byte*& from) {
      if (coming == end) return false;
      if (lane_id() < pair_copies) {
        const Experts& b = a.down;
        const std::int64_t at = b.place(a.ids[coming / groups * a.k + warp]),
                           first = (2 * (coming % groups) + lane_id() % 2) * n_tiles;
        from = lane_id() < 2 ? b.expert.data + at * b.bytes + first * tiles::code_bytes
                             : b.expert.scales + at * b.scale_bytes + first * tiles::scale_bytes;
      }
      ++coming;
      return true;
    };
    Pipe pipe(stages, reinterpret_cast<Barrier*>(hi + 2 * words), a.ahead, n_tiles, next);
    await_previous();
    float scale = 0, weight = 0;
#pragma unroll 1
    for (int item = begin, token = -1; item < end; ++item) {
      if (const int t = item / groups; t != token) {
        const std::int64_t slot = t * a.k + warp;
        __syncwarp();
        stage<3>(a.hidden + slot * cols, cols, hi, hi + words, lane_id(), 32, [] {});
        scale = expert_scale(a.down, a.ids[slot]);
        weight = a.weights[slot];
        __syncwarp();
        token = t;
      }
      float acc[4];
      pipe.multiply(Column(hi, 1, words), acc);
      join(acc);
      if (c == 0) {
        Term& term = terms[(item - begin) % 2][warp];
        term.rows[g] = scale * acc[0];
        term.rows[g + 8] = scale * acc[2];
        term.weight = weight;
      }
      sum(item);
    }
  } else {
    constexpr int R = rows_at_once;
    const Matrix& m = a.shared_down;
    const int step = (static_cast<int>(blockDim.x) / 32 - a.k) * R;
    const auto each_row = [&](int item, auto f) {  // Row[R] of this warp
#pragma unroll 1
      for (int first = (warp - a.k) * R; first < product_rows; first += step) {
        Row w[R];
#pragma unroll
        for (int r = 0; r < R; ++r) w[r] = row_of(m, item % groups * product_rows + first + r);
        f(w, first);
      }
    };
    const auto coming = [&](int item) {
      if (item < end)
        each_row(item,
                 [&](const Row(&w)[R], int) { prefetch_rows(w, m.row_bytes, lane_id(), 32); });
    };
    coming(begin);
    await_previous();
#pragma unroll 1
    for (int item = begin; item < end; ++item) {
      coming(item + 1);
      Term& term = terms[(item - begin) % 2][a.k];
      const float* const x[1] = {a.shared_hidden + item / groups * m.cols};
      each_row(item, [&](const Row(&w)[R], int first) {
        float total = 0;
#pragma unroll 1
        for (int part = 0; part < a.split; ++part) {  // as the linear map does it
          float acc[1][R] = {};
          dot_rows<F, 1, R, true>(w, x, static_cast<int>(m.cols), part * 32 + lane_id(),
                                  a.split * 32, acc);
          total += sum_rows(acc);
        }
        if (lane_id() < R) term.rows[first + lane_id()] = m.scale * total;
      });
      if (warp == a.k) term.weight = a.share[item / groups];
      sum(item);
    }
  }
}

constexpr std::size_t sum_static_shared = 2 * most_sum_warps * sizeof(Term);

std::size_t sum_shared(const SumArgs& s, int ahead) {
  return static_cast<std::size_t>(s.k) *
         static_cast<std::size_t>(sum_bytes(static_cast<int>(s.down.expert.cols), ahead));
}

}  // namespace

bool has_sum_mma(const FfnArgs& a, const SumArgs& s) {
  return has_mma(a) && whole_units(s.shared_down) && s.k < most_sum_warps &&
         sum_shared(s, 1) + sum_static_shared <= limits().block_shared;
}

void run_sum_mma(const FfnArgs& a, SumArgs s, cudaStream_t stream) {
  const auto items = static_cast<unsigned>(s.tokens * (s.down.expert.rows / product_rows)),
             processors = static_cast<unsigned>(limits().processors);
  // Blocks of few groups have one each, and start beside the up kernel.
  const bool few = items <= 2 * processors;
  s.ahead = 1;
  if (!few) {
    constexpr int most_ahead = 3;
    while (s.ahead < most_ahead &&
           sum_shared(s, s.ahead + 1) + sum_static_shared <= limits().block_shared)
      ++s.ahead;
  }
  const std::size_t shared = sum_shared(s, s.ahead);
  run_up_mma(a, few ? shared + sum_static_shared : 0, stream);
  const int warps = std::min(s.k + (few ? few_shared_warps : shared_warps), most_sum_warps);
  const auto with = [&](auto kernel) {
    allow_shared(kernel, shared);
    launch(kernel, few ? items : processors, static_cast<unsigned>(32 * warps), shared, stream, s);
  };
  with_format(s.shared_down.type, [&]<class F>(F) {
    few || 32 * warps > usual_sum_threads ? with(sum_mma_kernel<F, threads_of_64_registers>)
                                          : with(sum_mma_kernel<F, usual_sum_threads>);
  });
}

}  // namespace imp::cuda
