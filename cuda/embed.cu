// Row look-ups: tables stay on the host, their rows come with the step's inputs.
#include "cuda/check.h"
#include "cuda/common/formats.cuh"
#include "cuda/common/math.cuh"
#include "cuda/launch.h"
#include "cuda/run.h"

namespace imp::cuda {
namespace {

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

struct RowArgs {
  DType type;
  const std::byte* rows;  // as stored, one after the other
  std::int64_t row_bytes, dim;
  float scale;
  std::int64_t copies;
  float* y;        // [rows, copies, dim]
  std::int64_t n;  // rows * dim
};

RowArgs row_args(const Weight& table, const std::byte* rows, std::int64_t copies, float* y,
                 std::int64_t n) {
  return {table.dtype,
          rows,
          static_cast<std::int64_t>(table.row_bytes),
          table.cols,
          table.scale,
          copies,
          y,
          n};
}

// A thread decodes an element and writes all of its copies.
__device__ void decode_rows(const RowArgs& a) {
  const std::int64_t i = global_thread();
  if (i >= a.n) return;
  const std::int64_t row = i / a.dim, at = i % a.dim;
  const float v = a.scale * stored_element(a.type, a.rows + row * a.row_bytes, at);
  for (std::int64_t c = 0; c < a.copies; ++c) a.y[(row * a.copies + c) * a.dim + at] = v;
}

__global__ void embed_kernel(const RowArgs a) { decode_rows(a); }

__global__ void ngram_rows_kernel(const RowArgs a) {
  begin();
  decode_rows(a);
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
  const Weight& table = *op.table;
  const std::int64_t n = c.rows(op.y) * table.cols;
  if (n == 0) return;
  embed_kernel<<<blocks_for(n), block_threads, 0, c.stream>>>(
      row_args(table, c.rows_of(&table, TableRows::by_token), op.streams, c.f32(op.y), n));
  check_launch("EmbedStreams");
}

void run(const NgramRows& op, const Context& c) {
  const std::int64_t n = c.rows(op.y) * c.cols(op.y);
  if (n == 0) return;
  launch(ngram_rows_kernel, blocks_for(n), block_threads, 0, c.stream,
         row_args(*op.table, c.rows_of(op.table, op.index), 1, c.f32(op.y), n));
}

void run(const GatherOutputs& op, const Context& c) {
  const dim3 grid(static_cast<unsigned>(c.rows(op.y)), blocks_for(c.cols(op.x)));
  if (grid.x == 0) return;
  launch(gather_kernel, grid, block_threads, 0, c.stream, c.f32(op.x), c.step.outputs, c.cols(op.x),
         c.f32(op.y));
}

}  // namespace imp::cuda
