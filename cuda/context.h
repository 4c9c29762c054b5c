// What a CUDA op sees while it runs: device addresses of tensors, weights and the step's inputs.
// C++20-clean; plain pointers and sizes only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpp/graph/tensor.h"
#include "cpp/ops/step.h"

namespace imp::cuda {

// A weight on the device. Block formats are split: `data` holds each row's codes, `scales` each
// row's scales, so that both can be read in whole words.
struct Matrix {
  DType type = DType::f32;
  const std::byte* data = nullptr;
  const std::byte* scales = nullptr;
  std::int64_t rows = 0, cols = 0;
  std::int64_t row_bytes = 0, scale_row_bytes = 0;
  float scale = 1;
};

struct ExpertCacheView;

// Where a step finds an expert: its slot, and its number among the misses or -1.
struct ExpertPlace {
  std::int32_t slot, miss;
};

// Expert e starts at data + place(e) * bytes and scales + place(e) * scale_bytes of `expert`.
struct Experts {
  Matrix expert;
  std::int64_t experts = 0;
  std::int64_t bytes = 0, scale_bytes = 0;
  const float* factors = nullptr;  // [experts], or absent = 1
  bool tiled = false;              // NVFP4 in tiles
  // Of a cache: where this step's experts are, once they are resolved; absent: all, in order. The
  // gather runs beside the kernels that read them: miss i is here when `pieces` are counted.
  const ExpertPlace* places = nullptr;     // [experts]
  const std::uint32_t* arrived = nullptr;  // [misses, 2]
  std::uint32_t pieces = 0;
  const ExpertCacheView* cache = nullptr;  // on the host
  std::int32_t layer = 0;
  std::int64_t wave = 0;  // experts that fit at once

#ifdef __CUDACC__
  // Returns when the expert's bytes are here, for bulk copies too.
  __device__ __forceinline__ std::int64_t place(int e) const {
    if (places == nullptr) return e;
    ExpertPlace p = places[e];
    if (p.miss >= 0) {
      std::uint32_t n;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(n)
                     : "l"(arrived + 2 * p.miss)
                     : "memory");
      } while (n < pieces);
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
      asm volatile("" : "+r"(p.slot));  // no read of the slot comes before
    }
    return p.slot;
  }
#endif
};

struct ChunkView {  // Chunk, as the device reads it
  std::int32_t row, rows, position, state_row;
  std::int32_t first_page;  // in StepView::pages
#ifdef __CUDACC__
  // Rows of no sequence are of a chunk behind the others: it has neither state nor pages, and what
  // is computed for them is dropped.
  __device__ __forceinline__ bool padding() const { return rows == 0; }
#endif
};

// One step's inputs in device memory. Addresses depend on the step's shape only.
struct StepView {
  const std::int32_t* n_chunks = nullptr;    // [1] without padding
  const std::int32_t* n_padding = nullptr;   // [1] rows
  const ChunkView* chunks = nullptr;         // [rows]; padding behind the last
  const std::int32_t* row_chunk = nullptr;   // [rows]
  const std::int32_t* tokens = nullptr;      // [rows]
  const std::int32_t* positions = nullptr;   // [rows]
  const std::int32_t* outputs = nullptr;     // [outputs]
  const std::int32_t* pages = nullptr;       // of all chunks
  const std::int32_t* expert_ids = nullptr;  // [layers, rows, k] where routing is planted
  const Draw* draws = nullptr;               // [outputs] where tokens are chosen
  float* state = nullptr;                    // [state rows, state_stride]
  std::int64_t state_stride = 0;
  std::int64_t page_tokens = 0;

#ifdef __CUDACC__
  __device__ const ChunkView& chunk_of(std::int64_t row) const { return chunks[row_chunk[row]]; }
  __device__ float* state_at(const ChunkView& c, std::int64_t offset) const {
    return state + c.state_row * state_stride + offset;
  }
  // Where the cache holds a position, in tokens.
  __device__ std::int64_t slot(const ChunkView& c, std::int64_t position) const {
    // Positions have 31 bits; division of 64 would take longer than what is looked up.
    const auto at = static_cast<std::uint32_t>(position);
    const auto n = static_cast<std::uint32_t>(page_tokens);
    return pages[c.first_page + at / n] * page_tokens + at % n;
  }
#endif
};

struct TensorView {
  std::byte* data = nullptr;
  std::int64_t rows = 0, cols = 0;
};

// The rows that a step takes from a table which stays on the host, as the table stores them.
struct TableRows {
  static constexpr std::int64_t by_token = -1;

  const Weight* table = nullptr;
  std::int64_t ngram_layer = by_token;  // whose row numbers; else the step's tokens
  const std::byte* data = nullptr;      // on the device
};

class WeightStore;
class CachedExperts;
class CublasLt;

struct Context {
  cudaStream_t stream = nullptr;
  const TensorView* tensors = nullptr;
  const WeightStore* weights = nullptr;
  const CachedExperts* cached = nullptr;  // or absent: all experts are weights like others
  CublasLt* cublas = nullptr;             // of large maps, or absent: own kernels take them
  StepView step;
  std::int64_t most_chunks = 0;       // grid size of ops that run by chunk
  bool one_row_chunks = false;        // a decode step: row i is chunk i, or padding
  const KvLayer* kv = nullptr;        // [attention layers], device pointers
  CacheTypes types;                   // of kv
  std::span<const TableRows> tables;  // of this step
  std::int64_t context = 0;           // the longest sequence in tokens
  bool batch_invariant = false;       // see CudaOptions
  std::byte* scratch = nullptr;       // as large as scratch_bytes(op) asked for

  const TensorView& view(Tensor t) const { return tensors[t.id]; }
  std::int64_t rows(Tensor t) const { return view(t).rows; }
  std::int64_t cols(Tensor t) const { return view(t).cols; }
  float* f32(Tensor t) const { return reinterpret_cast<float*>(view(t).data); }
  std::int32_t* i32(Tensor t) const { return reinterpret_cast<std::int32_t*>(view(t).data); }
  // Fails (internal) for a table that is not in the step.
  const std::byte* rows_of(const Weight* table, std::int64_t ngram_layer) const;
  // Defined in weights.cpp; fail (internal) for what was not uploaded.
  const Matrix& matrix(const Weight*) const;
  const Experts& experts(const ExpertBank*) const;
  const float* vector(const Vector&) const;
};

}  // namespace imp::cuda
