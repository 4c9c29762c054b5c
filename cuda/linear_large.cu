// Large BF16 maps of many activation rows. fp32 activations become the two bf16 (hi, lo) that they
// are the sum of, one below the other, so that a product reads its weights once. Products are those
// of linear_wgmma.cu or else cuBLASLt's, for whose halves rows and outputs are taken in pieces that
// the second cache holds; they are added where alpha and activation are applied.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/common/math.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/cublas_lt.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/linear.h"

namespace imp::cuda {
namespace {

constexpr std::int64_t least_results = 81920;  // rows * outputs: fewer leave the device idle

// The op's workspace: halves of activations, a product of them, cuBLASLt's own.
constexpr std::int64_t halves_bytes = std::int64_t{20} << 20;
constexpr std::int64_t product_bytes = std::int64_t{33} << 20;
constexpr std::int64_t piece_outputs = 128;  // pieces of outputs are so many, but the last

bool takes_cublas(std::int64_t outputs, std::int64_t rows, const Context& c) {
  return c.cublas != nullptr && rows >= least_large_rows && outputs * rows >= least_results;
}

// x [elements] to the hi of all elements, then their lo.
__global__ void split_kernel(const float4* x, uint2* hi, std::int64_t quads) {
  begin();
  const std::int64_t i = global_thread();
  if (i >= quads) return;
  const float4 v = x[i];
  const SplitPair a = split_pair(v.x, v.y), b = split_pair(v.z, v.w);
  hi[i] = {a.hi, b.hi};
  hi[quads + i] = {a.lo, b.lo};
}

// Sums of hi and of lo: [2 * rows, pitch]
struct Halves {
  const float* sums;
  std::int64_t rows, pitch;
  __device__ __forceinline__ float at(std::int64_t row, std::int64_t output) const {
    return sums[row * pitch + output] + sums[(rows + row) * pitch + output];
  }
};

// Outputs [first, first + count) of maps whose weights lie one after the other.
struct JoinArgs {
  Halves halves;
  std::int64_t row0, first, count;
  int n_parts;
  LinearPart parts[max_linear_parts];
};

constexpr int join_outputs = 4, mix_elements = 2;  // of a thread

// grid (pieces of outputs, rows)
__global__ void __launch_bounds__(block_threads) join_kernel(const __grid_constant__ JoinArgs a) {
  begin();
  const std::int64_t row = blockIdx.y;
  const std::int64_t begin_at =
      blockIdx.x * static_cast<std::int64_t>(join_outputs * block_threads) + threadIdx.x;
  float sums[join_outputs];
#pragma unroll
  for (int j = 0; j < join_outputs; ++j) {
    const std::int64_t i = begin_at + j * block_threads;
    sums[j] = i < a.count ? a.halves.at(row, i) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < join_outputs; ++j) {
    std::int64_t i = begin_at + j * block_threads;
    if (i >= a.count) return;
    i += a.first;
    int p = 0;
    while (i >= a.parts[p].w.rows) i -= a.parts[p++].w.rows;
    const LinearPart& part = a.parts[p];
    part.y[(a.row0 + row) * part.w.rows + i] = activate(part.act, part.alpha * sums[j]);
  }
}

// The gated mean of the streams, see MixArgs. grid (pieces of the hidden, rows)
__global__ void __launch_bounds__(block_threads)
    join_mix_kernel(const __grid_constant__ MixArgs a, Halves halves, std::int64_t row0) {
  begin();
  const std::int64_t row = blockIdx.y;
  const std::int64_t begin_at =
      blockIdx.x * static_cast<std::int64_t>(mix_elements * block_threads) + threadIdx.x;
  const float* n = a.n + (row0 + row) * mix_streams * a.hidden;
  float gate[mix_elements][mix_streams], stream[mix_elements][mix_streams];
#pragma unroll
  for (int j = 0; j < mix_elements; ++j) {
    const std::int64_t i = begin_at + j * block_threads;
#pragma unroll
    for (int s = 0; s < mix_streams; ++s) {
      const std::int64_t at = s * a.hidden + i;
      gate[j][s] = i < a.hidden ? halves.at(row, at) : 0.0f;
      stream[j][s] = i < a.hidden ? n[at] : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < mix_elements; ++j) {
    const std::int64_t i = begin_at + j * block_threads;
    if (i >= a.hidden) return;
    float mean = 0;
#pragma unroll
    for (int s = 0; s < mix_streams; ++s)
      mean = fmaf(sigmoid(a.w.scale * gate[j][s]), stream[j][s], mean);
    a.x[(row0 + row) * a.hidden + i] = mean * (1.0f / mix_streams);
  }
}

// f(first, count) for pieces of about the same size, at most `most` and multiples of `unit` but
// for the last.
template <class F>
void each_piece(std::int64_t n, std::int64_t most, std::int64_t unit, F f) {
  const std::int64_t pieces = div_up(n, most / unit * unit);
  const std::int64_t size = div_up(div_up(n, pieces), unit) * unit;
  for (std::int64_t first = 0; first < n; first += size) f(first, std::min(size, n - first));
}

// One op's way through its workspace.
class Large {
 public:
  explicit Large(const Context& c) : c_(c) {}

  static constexpr std::int64_t most_rows(std::int64_t cols) {
    return std::min(halves_bytes / (4 * cols), product_bytes / (8 * piece_outputs));
  }
  static constexpr std::int64_t most_outputs(std::int64_t rows) {
    return product_bytes / (8 * rows);
  }

  // Rows of x [rows, cols].
  void split(const float* x, std::int64_t rows, std::int64_t cols) {
    rows_ = rows;
    cols_ = cols;
    const std::int64_t quads = rows * cols / 4;
    launch(split_kernel, blocks_for(quads), block_threads, 0, c_.stream,
           reinterpret_cast<const float4*>(x), reinterpret_cast<uint2*>(c_.scratch), quads);
  }
  const std::byte* halves() const { return c_.scratch; }
  // Of the rows that were split, by cuBLASLt.
  Halves multiply(const std::byte* w, std::int64_t outputs) const {
    auto* sums = reinterpret_cast<float*>(c_.scratch + halves_bytes);
    c_.cublas->run(
        {outputs, 2 * rows_, cols_, w, c_.scratch, sums, c_.scratch + halves_bytes + product_bytes},
        c_.stream);
    return {sums, rows_, CublasLt::pitch(outputs)};
  }

 private:
  const Context& c_;
  std::int64_t rows_ = 0, cols_ = 0;
};

// Maps whose weights lie one after the other: one product.
struct Group : LinearArgs {
  std::int64_t outputs = 0;

  bool continues(const LinearPart& p) const {
    const Matrix& last = parts[n_parts - 1].w;
    return last.data + last.rows * last.row_bytes == p.w.data;
  }
  void add(const LinearPart& p) {
    parts[n_parts++] = p;
    outputs += p.w.rows;
  }
};

}  // namespace

std::size_t large_scratch_bytes(std::int64_t rows, bool cublas) {
  if (rows < least_large_rows || !(cublas || limits().group_products)) return 0;
  return halves_bytes + (cublas ? product_bytes + CublasLt::workspace_bytes : 0);
}

LinearArgs run_large(const LinearArgs& args, const Context& c) {
  if (c.batch_invariant || args.rows < least_large_rows || args.n_parts == 0) return args;
  const std::int64_t cols = args.parts[0].w.cols;
  const LinearArgs none{args.x, args.rows, 0, 0, {}};
  Group groups[max_linear_parts];
  int n_groups = 0;
  for (int i = 0; i < args.n_parts; ++i) {
    const LinearPart& p = args.parts[i];
    if (n_groups == 0 || !groups[n_groups - 1].continues(p)) groups[n_groups++] = {none};
    groups[n_groups - 1].add(p);
  }
  LinearArgs rest = none;
  int n_large = 0;
  for (int g = 0; g < n_groups; ++g) {
    const Group group = groups[g];
    if (has_wgmma(group.outputs, args.rows) || takes_cublas(group.outputs, args.rows, c)) {
      groups[n_large++] = group;
    } else {
      for (int i = 0; i < group.n_parts; ++i) rest.parts[rest.n_parts++] = group.parts[i];
    }
  }
  if (n_large == 0) return args;
  Large large(c);
  const auto by_cublas = [&](const Group& group, std::int64_t row0, std::int64_t rows) {
    JoinArgs join{{}, row0, 0, 0, group.n_parts, {}};
    std::copy_n(group.parts, group.n_parts, join.parts);
    each_piece(group.outputs, Large::most_outputs(rows), piece_outputs,
               [&](std::int64_t first, std::int64_t count) {
                 const Matrix& w = group.parts[0].w;
                 join.halves = large.multiply(w.data + first * w.row_bytes, count);
                 join.first = first;
                 join.count = count;
                 const dim3 grid(static_cast<unsigned>(div_up(count, join_outputs * block_threads)),
                                 static_cast<unsigned>(rows));
                 launch(join_kernel, grid, block_threads, 0, c.stream, join);
               });
  };
  each_piece(args.rows, Large::most_rows(cols), 1, [&](std::int64_t row0, std::int64_t rows) {
    large.split(args.x + row0 * cols, rows, cols);
    for (int g = 0; g < n_large; ++g) {
      if (!has_wgmma(groups[g].outputs, args.rows)) {
        by_cublas(groups[g], row0, rows);
        continue;
      }
      LinearArgs piece = groups[g];
      piece.rows = rows;
      for (LinearPart& p : piece.parts) p.y += row0 * p.w.rows;
      run_wgmma(piece, large.halves(), c.stream);
    }
  });
  return rest;
}

bool run_large(const MixArgs& m, const Context& c) {
  const std::int64_t outputs = m.w.rows, cols = m.w.cols;
  if (c.batch_invariant || m.rows < least_large_rows) return false;
  const bool own = has_wgmma(m) && m.rows <= Large::most_rows(cols);
  if (!own && !takes_cublas(outputs, m.rows, c)) return false;
  Large large(c);
  if (own) {
    large.split(m.low, m.rows, cols);
    run_wgmma(m, large.halves(), c.stream);
    return true;
  }
  const std::int64_t most =
      std::min(Large::most_rows(cols), product_bytes / (8 * CublasLt::pitch(outputs)));
  each_piece(m.rows, most, 1, [&](std::int64_t row0, std::int64_t rows) {
    large.split(m.low + row0 * cols, rows, cols);
    const Halves halves = large.multiply(m.w.data, outputs);
    const dim3 grid(static_cast<unsigned>(div_up(m.hidden, mix_elements * block_threads)),
                    static_cast<unsigned>(rows));
    launch(join_mix_kernel, grid, block_threads, 0, c.stream, m, halves, row0);
  });
  return true;
}

}  // namespace imp::cuda
