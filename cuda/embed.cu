// Row look-ups: token embeddings on the device, n-gram rows as the step brought them.
#include "cuda/check.h"
#include "cuda/common/matvec.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

// A thread decodes a unit of a token's row and writes it to every stream. grid (tokens, units)
constexpr int embed_threads = 64;
template <class F, bool Whole>
__global__ void __launch_bounds__(embed_threads)
    embed_kernel(const Matrix table, const std::int32_t* tokens, std::int64_t streams, float* y) {
  const int hidden = static_cast<int>(table.cols);
  const Row row = row_of(table, tokens[blockIdx.x]);
  float* out = y + blockIdx.x * streams * hidden;
  const int u = blockIdx.y * embed_threads + threadIdx.x;
  if (u >= div_up(hidden, unit_elems)) return;
  float v[unit_elems];
  if constexpr (Whole) {
    const typename F::Raw raw = F::load(row, u);
    F::decode(raw, v);
    if constexpr (F::scaled)
      for (int i = 0; i < unit_elems; ++i) v[i] *= F::factor(raw);
  } else {
    for (int i = 0; i < unit_elems && u * unit_elems + i < hidden; ++i)
      v[i] = F::one(row.data, u * unit_elems + i);
  }
#pragma unroll
  for (int i = 0; i < unit_elems; ++i) {
    const int at = i < 4 ? F::first(u) + i : F::second(u) + i - 4;
    if (at >= hidden) continue;
    for (std::int64_t s = 0; s < streams; ++s) out[s * hidden + at] = v[i] * table.scale;
  }
}

// One element of a row as the file stores it.
__device__ float stored_element(DType type, const std::byte* row, std::int64_t i) {
  switch (type) {
    case DType::f32:
      return F32::one(row, i);
    case DType::f16:
      return F16::one(row, i);
    case DType::bf16:
      return Bf16::one(row, i);
    case DType::f8_e4m3:
      return F8E4m3::one(row, i);
    case DType::q8_0: {
      const std::byte* block = row + i / 32 * 34;
      return F16::one(block, 0) * static_cast<float>(static_cast<std::int8_t>(block[2 + i % 32]));
    }
    case DType::nvfp4: {
      const std::byte* block = row + i / 64 * 36;
      const int group = static_cast<int>(i % 64 / 16), at = static_cast<int>(i % 16);
      const auto byte = static_cast<std::uint32_t>(block[4 + 8 * group + at % 8]);
      const std::uint32_t code = at < 8 ? byte & 15u : byte >> 4;
      const std::uint32_t scale = Nvfp4::pack_scales(static_cast<std::uint32_t>(block[group]));
      return Nvfp4::pair((code & 8u) << 12 | (code & 7u) << 9).x *
             Nvfp4::factor({0, static_cast<std::uint8_t>(scale)}) * Nvfp4::missing;
    }
    default:
      return 0;
  }
}

__global__ void table_rows_kernel(DType type, const std::byte* rows, std::int64_t row_bytes,
                                  std::int64_t dim, float scale, float* y, std::int64_t n) {
  begin();
  const std::int64_t i = global_thread();
  if (i < n) y[i] = scale * stored_element(type, rows + i / dim * row_bytes, i % dim);
}

// A thread per element. grid (outputs, columns)
__global__ void gather_kernel(const float* x, const std::int32_t* outputs, std::int64_t cols,
                              float* y) {
  const std::int64_t from = outputs[blockIdx.x] * cols;
  begin();
  const std::int64_t i = blockIdx.y * static_cast<std::int64_t>(block_threads) + threadIdx.x;
  if (i < cols) y[blockIdx.x * cols + i] = x[from + i];
}

}  // namespace

void run(const Feed& op, const Context& c) {
  const auto bytes = static_cast<std::size_t>(c.rows(op.y) * c.cols(op.y)) * 4;
  if (bytes == 0) return;
  check(cudaMemcpyAsync(c.f32(op.y), op.values, bytes, cudaMemcpyHostToDevice, c.stream), "Feed");
}

// The first of a step: launched plainly, so that the step before has ended.
void run(const EmbedStreams& op, const Context& c) {
  const Matrix& table = c.matrix(op.table);
  const dim3 grid(static_cast<unsigned>(c.rows(op.y)),
                  static_cast<unsigned>(div_up(table.cols, unit_elems * embed_threads)));
  if (grid.x == 0) return;
  with_format(table.type, [&]<class F>(F) {
    if constexpr (!F::blocks)
      if (!whole_units(table)) {
        embed_kernel<F, false>
            <<<grid, embed_threads, 0, c.stream>>>(table, c.step.tokens, op.streams, c.f32(op.y));
        return;
      }
    embed_kernel<F, true>
        <<<grid, embed_threads, 0, c.stream>>>(table, c.step.tokens, op.streams, c.f32(op.y));
  });
  check_launch("EmbedStreams");
}

void run(const NgramRows& op, const Context& c) {
  const std::int64_t n = c.rows(op.y) * c.cols(op.y);
  if (n == 0) return;
  const Weight& table = *op.table;
  launch(table_rows_kernel, blocks_for(n), block_threads, 0, c.stream, table.dtype,
         c.table_rows[op.index], static_cast<std::int64_t>(table.row_bytes), table.cols,
         table.scale, c.f32(op.y), n);
}

void run(const GatherOutputs& op, const Context& c) {
  const dim3 grid(static_cast<unsigned>(c.rows(op.y)), blocks_for(c.cols(op.x)));
  if (grid.x == 0) return;
  launch(gather_kernel, grid, block_threads, 0, c.stream, c.f32(op.x), c.step.outputs, c.cols(op.x),
         c.f32(op.y));
}

}  // namespace imp::cuda
