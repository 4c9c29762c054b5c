// Device copies of a model's weights, made once per host tensor, for all sessions of the model.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cpp/graph/graph.h"
#include "cpp/runtime/backend.h"
#include "cuda/cached_experts.h"
#include "cuda/context.h"
#include "cuda/handles.h"

namespace imp::cuda {
class WeightStore;
}

namespace imp {

// What the sessions of a model pass on; the store is there while one of them is.
class CudaWeights {
 public:
  std::shared_ptr<cuda::WeightStore> store();  // made if nobody has it
  WeightBytes bytes() const;

 private:
  mutable std::mutex mutex_;
  std::weak_ptr<cuda::WeightStore> store_;
};

}  // namespace imp

namespace imp::cuda {

// Any thread may call it; what add() has returned from can be read by every stream of the device.
class WeightStore {
 public:
  // Uploads whatever the graph's ops name and is not here yet, but the experts that `cached` (may
  // be absent) has, into one block: the driver rounds every allocation up to 2 MiB. Tables of which
  // a step needs single rows stay on the host (host_tables). Fails with out_of_memory, or
  // unsupported for a type without kernels.
  void add(const Graph&, const CachedExperts* cached);
  // All experts of these layers on the host, once for all that hold it at the same time;
  // `ram_limit` counts when it is made. Fails (invalid_argument) if `verify` did not then.
  std::shared_ptr<const ExpertStore> expert_store(const std::vector<ExpertLayer>&,
                                                  std::size_t ram_limit, bool verify);
  // A bank's factors, uploaded if need be, or absent.
  const float* factors(const ExpertBank&);
  WeightBytes bytes() const;

  const Matrix& matrix(const Weight&) const;
  const Experts& experts(const ExpertBank&) const;
  const float* vector(const Vector&) const;

 private:
  void add(const Weight*);
  void add(const ExpertBank*);
  void add(const Vector&);
  // Bytes that add() would take; 0 for what is here.
  std::size_t missing(const Weight*) const;
  std::size_t missing(const ExpertBank*) const;
  std::size_t missing(const Vector&) const;
  // `parts` matrices of `shape`, `stride` bytes apart on the host, compact on the device.
  Matrix upload(const Weight& shape, std::size_t parts, std::size_t stride, bool tiled = false);
  std::byte* take(std::size_t bytes, const char* what);
  const float* own_factors(const ExpertBank&);

  mutable std::mutex mutex_;  // of all that follows
  Stream stream_ = make_stream();
  std::vector<DeviceMemory> blocks_;
  std::weak_ptr<const ExpertStore> expert_store_;
  std::size_t bytes_ = 0;
  std::byte* next_ = nullptr;  // of the block that is being filled
  std::size_t left_ = 0;
  // By host address: a tensor that serves twice (tied output) is stored once.
  std::unordered_map<const void*, Matrix> matrices_;
  std::unordered_map<const void*, Experts> experts_;
  std::unordered_map<const void*, const float*> vectors_;
};

// Separates blocks of a format into codes and scales; defined in planar.cu.
struct BlockShape {
  std::size_t block_bytes = 0, scale_bytes = 0;  // of one block; scales come first
  float missing = 1;                             // factor that the packed bits leave out
};
BlockShape block_shape(DType);  // zeros for formats without blocks
// A weight's shape as it is packed; no addresses.
Matrix packed_matrix(const Weight&, bool tiled);
// Blocks [first, first + n) of a matrix (or of several, one after the other, if they are not tiled)
// to their places.
void pack_blocks(const Weight&, bool tiled, const std::byte* blocks, std::size_t first,
                 std::size_t n, std::byte* codes, std::byte* scales, cudaStream_t);
// Words [first, first + words) of a tensor that exists by its seed alone; defined in fill.cu.
void fill_synthetic(const Weight& shape, std::size_t first, std::size_t words, std::byte* to,
                    cudaStream_t);
void split_blocks(DType, const std::byte* blocks, std::size_t n, std::byte* codes,
                  std::byte* scales, cudaStream_t);

// NVFP4 experts whose sides are both whole tiles are stored in tiles (common/nvfp4_tiles.cuh),
// their rows' and scales' bytes as many as otherwise.
// Kernels for them need bulk copies: code for compute capability 9.0 or newer.
// Rows or columns: a block shares its slots' activations, beside a stage of weights, in 99 KiB.
inline constexpr std::int64_t most_tiled = 4096;
bool can_tile(const Weight&);
float tiled_missing();
// Blocks [first, first + n) of a matrix.
void tile_blocks(const std::byte* blocks, std::size_t first, std::size_t n, std::int64_t row_blocks,
                 std::byte* codes, std::byte* scales, cudaStream_t);

}  // namespace imp::cuda
