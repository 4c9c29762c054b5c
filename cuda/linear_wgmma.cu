// BF16 maps of many outputs and up to 128 activation rows by products of warp groups. One thread
// copies weights into a ring of stages, from before the kernel in front has ended, another one
// activations: the two bf16 (hi, lo) that each is the sum of are columns of the same product. A
// block makes tiles of 128 outputs of all rows, one after the other.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/common/bulk.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/tensor_map.h"

namespace imp::cuda {
namespace {

constexpr int stage_cols = line_bytes / 2;
constexpr int groups = 2, tile_outputs = groups * group_rows;
constexpr int mix_outputs = tile_outputs / mix_streams;  // of each stream, in a tile
constexpr int multiply_threads = groups * group_threads, multiply_warps = multiply_threads / 32;
constexpr int threads = multiply_threads + 2 * 32;  // and two warps that copy
constexpr int weight_bytes = tile_outputs * line_bytes;
constexpr int shared_bytes = 227 << 10;
constexpr int most_mix_rows = 64;  // with more of them cuBLASLt is faster

template <int Tokens, bool Mix>
struct Shape {
  static constexpr int tokens = Tokens;
  static constexpr bool mix = Mix;
  static constexpr int outputs = Mix ? mix_outputs : tile_outputs;  // that tiles are apart
  static constexpr int x_bytes = 2 * Tokens * line_bytes, x_stages = Tokens > 64 ? 3 : 4;
  static constexpr int n_bytes = Mix ? Tokens * tile_outputs * 4 : 0;  // [tokens, streams, outputs]
  static constexpr int barrier_bytes = 1024;
  static constexpr int w_stages =
      (shared_bytes - barrier_bytes - n_bytes - x_stages * x_bytes) / weight_bytes;
  // Mix: gates [tokens][pitch] where the stages were, without bank conflicts.
  static constexpr int pitch = tile_outputs + 4;
  static_assert(Tokens * pitch * 4 <= w_stages * weight_bytes + x_stages * x_bytes);
  static_assert((2 * (w_stages + x_stages) + 1) * sizeof(Barrier) <= barrier_bytes);
};

struct Args {
  CUtensorMap w;  // [outputs, cols]; Mix: [streams, hidden, cols]
  CUtensorMap x;  // [hi or lo, rows, cols]
  int rows, tiles, stages;
  int n_parts;
  LinearPart parts[max_linear_parts];
  // Mix.
  CUtensorMap n;  // [rows, streams, hidden]
  float scale;
  float* mixed;
  std::int64_t hidden;
};

template <class S>
struct Memory {
  std::byte *w, *x, *n;
  Barrier *w_full, *w_empty, *x_full, *x_empty, *n_full;
  __device__ __forceinline__ explicit Memory(std::byte* memory) {
    w = memory;
    x = w + S::w_stages * weight_bytes;
    n = x + S::x_stages * S::x_bytes;
    w_full = reinterpret_cast<Barrier*>(n + S::n_bytes);
    w_empty = w_full + S::w_stages;
    x_full = w_empty + S::w_stages;
    x_empty = x_full + S::x_stages;
    n_full = x_empty + S::x_stages;
  }
  __device__ __forceinline__ void init() const {
    init_barriers(w_full, S::w_stages);
    init_barriers(w_empty, S::w_stages, multiply_warps);
    init_barriers(x_full, S::x_stages);
    init_barriers(x_empty, S::x_stages, multiply_warps);
    init_barriers(n_full, 1);
  }
};

// Copies the stages of a block's tiles.
template <class S>
class WeightCopies {
 public:
  __device__ __forceinline__ WeightCopies(const Args& a, const Memory<S>& m) : a_(a), m_(m) {}
  __device__ __forceinline__ void copy() {
    Barrier* full = m_.w_full + ring_.at();
    await_phase(m_.w_empty + ring_.at(), ring_.free_phase());
    expect_bytes(full, weight_bytes);
    tensor_copy<true>(m_.w + ring_.at() * weight_bytes, a_.w, stage_ * stage_cols,
                      tile_ * S::outputs, 0, full);
    ring_.advance();
    if (++stage_ < a_.stages) return;
    stage_ = 0;
    tile_ += static_cast<int>(gridDim.x);
  }

 private:
  const Args& a_;
  const Memory<S>& m_;
  Ring ring_{S::w_stages};
  int tile_ = static_cast<int>(blockIdx.x), stage_ = 0;
};

// Mix: n as well, once the first activations are on their way.
template <class S>
__device__ __forceinline__ void copy_x(const Args& a, const Memory<S>& m, int copies) {
  Ring ring(S::x_stages);
  for (int i = 0; i < copies; ++i) {
    Barrier* full = m.x_full + ring.at();
    await_phase(m.x_empty + ring.at(), ring.free_phase());
    expect_bytes(full, S::x_bytes);
    tensor_copy<false>(m.x + ring.at() * S::x_bytes, a.x, i % a.stages * stage_cols, 0, 0, full);
    ring.advance();
    if (S::mix && i + 1 == min(copies, S::x_stages)) {
      expect_bytes(m.n_full, S::n_bytes);
      tensor_copy<false>(m.n, a.n, static_cast<int>(blockIdx.x) * mix_outputs, 0, 0, m.n_full);
    }
  }
}

// Of an output: where it goes, if it exists.
struct Target {
  float* y = nullptr;  // of row 0
  std::int64_t pitch;
  float alpha;
  Act act;
  __device__ __forceinline__ Target(const Args& a, std::int64_t output) {
    int p = 0;
    while (p < a.n_parts && output >= a.parts[p].w.rows) output -= a.parts[p++].w.rows;
    if (p == a.n_parts) return;
    const LinearPart& part = a.parts[p];
    y = part.y + output;
    pitch = part.w.rows;
    alpha = part.alpha;
    act = part.act;
  }
};

// d: the lane's sums of hi, then of lo. Activation functions are code of their own, since code that
// is fetched and not used would take longer than the products of a small map.
template <int Tokens, bool Activate>
__device__ __forceinline__ void store(const float (&d)[Tokens], int half, const Target& to,
                                      int rows) {
  const int row0 = 2 * (lane_id() % 4);
  float* y = to.y + row0 * to.pitch;
#pragma unroll
  for (int j = 0; j < Tokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 4 * j + 2 * half + e;
      const float v = to.alpha * (d[i] + d[Tokens / 2 + i]);
      if (row0 + 8 * j + e < rows) y[e * to.pitch] = Activate ? activate(to.act, v) : v;
    }
    y += 8 * to.pitch;
  }
}

__device__ __forceinline__ void sync_multiply_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(multiply_threads) : "memory");
}

// The gated mean of the streams, see MixArgs.
template <class S>
__device__ __forceinline__ void mix(const Args& a, const Memory<S>& m, const float (&d)[S::tokens],
                                    int row0) {
  auto* gates = reinterpret_cast<float*>(m.w);
  sync_multiply_warps();  // nobody reads the stages
  const int c = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < S::tokens / 2; ++i)
    gates[(i / 4 * 8 + 2 * c + i % 2) * S::pitch + row0 + i % 4 / 2 * 8] =
        sigmoid(a.scale * (d[i] + d[S::tokens / 2 + i]));
  sync_multiply_warps();
  await_phase(m.n_full, 0);
  const auto* n = reinterpret_cast<const float*>(m.n);
#pragma unroll 4
  for (int e = static_cast<int>(threadIdx.x); e < mix_outputs * a.rows; e += multiply_threads) {
    const int t = e / mix_outputs, i = e % mix_outputs;
    float mean = 0;
#pragma unroll
    for (int s = 0; s < mix_streams; ++s) {
      const int at = s * mix_outputs + i;
      mean = fmaf(gates[t * S::pitch + at], n[t * tile_outputs + at], mean);
    }
    const std::int64_t output = static_cast<std::int64_t>(blockIdx.x) * mix_outputs + i;
    if (output < a.hidden) a.mixed[t * a.hidden + output] = mean * (1.0f / mix_streams);
  }
}

template <class S>
__global__ void __launch_bounds__(threads, 1) linear_wgmma_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) std::byte memory[];
  const Memory<S> m(memory);
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int copies = (a.tiles - block + blocks - 1) / blocks * a.stages;
  const bool copies_w = threadIdx.x == multiply_threads;
  const bool copies_x = threadIdx.x == multiply_threads + 32;
  WeightCopies<S> weights(a, m);
  if (copies_w) {
    m.init();
    for (int i = 0; i < min(copies, S::w_stages); ++i) weights.copy();
  }
  __syncthreads();
  begin();
  if (copies_w) {
    for (int i = S::w_stages; i < copies; ++i) weights.copy();
  } else if (copies_x) {
    copy_x(a, m, copies);
  }
  if (warp_id() >= multiply_warps) return;

  const int group = warp_id() / 4;
  const int row0 = warp_id() * 16 + lane_id() / 4;
  Ring w(S::w_stages), x(S::x_stages);
  for (int tile = block; tile < a.tiles; tile += blocks) {
    float d[S::tokens];
#pragma unroll
    for (int i = 0; i < S::tokens; ++i) d[i] = 0;
    int w_before = 0, x_before = 0;
    const auto release = [&] {
      if (lane_id() != 0) return;
      arrive(m.w_empty + w_before);
      arrive(m.x_empty + x_before);
    };
    for (int stage = 0; stage < a.stages; ++stage) {
      await_phase(m.w_full + w.at(), w.phase());
      await_phase(m.x_full + x.at(), x.phase());
      const std::uint64_t left =
          operand(m.w + w.at() * weight_bytes + group * (group_rows * line_bytes));
      const std::uint64_t right = operand(m.x + x.at() * S::x_bytes);
      hold(d);
      begin_products();
#pragma unroll
      for (int k = 0; k < line_bytes / product_bytes; ++k)
        multiply(d, columns(left, k), columns(right, k));
      end_products();
      if (stage > 0) {
        await_products<1>();
        release();
      }
      w_before = w.at();
      x_before = x.at();
      w.advance();
      x.advance();
    }
    await_products<0>();
    hold(d);
    release();
    if constexpr (S::mix) {
      mix(a, m, d, row0);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Target to(a, static_cast<std::int64_t>(tile) * tile_outputs + row0 + 8 * half);
        if (to.y == nullptr) continue;
        if (to.act == Act::none)
          store<S::tokens, false>(d, half, to, a.rows);
        else
          store<S::tokens, true>(d, half, to, a.rows);
      }
    }
  }
}

// Of bf16 as operands of products.
CUtensorMap operand_map(const void* data, std::int64_t cols, const Dimension& rows,
                        const Dimension& planes) {
  return tensor_map(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                    {{cols, 2, stage_cols}, rows, planes});
}

// Tiles, and maps of weights and for Mix of the streams, are in the arguments.
template <class S>
void launch_shape(Args& a, const std::byte* halves, std::int64_t cols, cudaStream_t stream) {
  const std::int64_t row_bytes = 2 * cols;
  a.x = operand_map(halves, cols, {a.rows, row_bytes, S::tokens}, {2, a.rows * row_bytes, 2});
  a.stages = static_cast<int>(div_up(cols, stage_cols));
  const auto kernel = linear_wgmma_kernel<S>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "cudaFuncSetAttribute");
  const int blocks = S::mix ? a.tiles : std::min(a.tiles, limits().processors);
  launch(kernel, static_cast<unsigned>(blocks), threads, shared_bytes, stream, a);
}

// f(tokens) of the smallest shape, of up to `Most`.
template <int Most, int Tokens = 32, class F>
void with_tokens(std::int64_t rows, F f) {
  if constexpr (Tokens < Most)
    if (rows > Tokens) return with_tokens<Most, 2 * Tokens>(rows, f);
  f.template operator()<Tokens>();
}

// Fewer tiles would leave most of the device idle.
bool enough_tiles(std::int64_t tiles) { return 2 * tiles >= limits().processors; }

}  // namespace

bool has_wgmma(std::int64_t outputs, std::int64_t rows) {
  return limits().group_products && rows <= most_wgmma_rows &&
         enough_tiles(div_up(outputs, tile_outputs));
}

bool has_wgmma(const MixArgs& m) {
  return m.hidden % 4 == 0 && m.rows <= most_mix_rows && has_wgmma(m.w.rows, m.rows);
}

void run_wgmma(const LinearArgs& args, const std::byte* halves, cudaStream_t stream) {
  Args a{};
  a.rows = static_cast<int>(args.rows);
  a.n_parts = args.n_parts;
  std::copy_n(args.parts, args.n_parts, a.parts);
  std::int64_t outputs = 0;
  for (int i = 0; i < args.n_parts; ++i) outputs += args.parts[i].w.rows;
  const Matrix& w = args.parts[0].w;
  a.tiles = static_cast<int>(div_up(outputs, tile_outputs));
  a.w = operand_map(w.data, w.cols, {outputs, w.row_bytes, tile_outputs}, {1, w.row_bytes, 1});
  with_tokens<most_wgmma_rows>(args.rows, [&]<int Tokens>() {
    launch_shape<Shape<Tokens, false>>(a, halves, w.cols, stream);
  });
}

void run_wgmma(const MixArgs& m, const std::byte* halves, cudaStream_t stream) {
  Args a{};
  a.rows = static_cast<int>(m.rows);
  a.tiles = static_cast<int>(div_up(m.hidden, mix_outputs));
  a.scale = m.w.scale;
  a.mixed = m.x;
  a.hidden = m.hidden;
  a.w = operand_map(m.w.data, m.w.cols, {m.hidden, m.w.row_bytes, mix_outputs},
                    {mix_streams, m.hidden * m.w.row_bytes, mix_streams});
  with_tokens<most_mix_rows>(m.rows, [&]<int Tokens>() {
    a.n = tensor_map(m.n, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE,
                     {{m.hidden, 4, mix_outputs},
                      {mix_streams, 4 * m.hidden, mix_streams},
                      {m.rows, 4 * mix_streams * m.hidden, Tokens}});
    launch_shape<Shape<Tokens, true>>(a, halves, m.w.cols, stream);
  });
}

}  // namespace imp::cuda
