// Experts of all layers in slots of device memory; kernels find them, choose who makes room, and
// fetch what is missing from mapped host memory. Policies and their reference: cpp/memory.
// C++20-clean.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpp/memory/expert_policy.h"
#include "cuda/context.h"
#include "cuda/handles.h"
#include "cuda/route.h"

namespace imp::cuda {

// An expert as one block of bytes, in the store and in a slot: codes of gate and up, their scales,
// then the same of down, which is read later. Offsets and sizes are multiples of blob_alignment.
struct ExpertBlob {
  enum Matrix { gate, up, down };
  std::size_t codes[3] = {}, scales[3] = {};
  std::size_t bytes = 0;
  std::size_t first_bytes() const { return codes[down]; }
};
inline constexpr std::size_t blob_alignment = 128;

inline constexpr int max_cached_experts = 1024;  // of a layer

// What kernels see. Slots [slots, slots + staging) hold experts that a step reads but does not
// keep.
struct ExpertCacheView {
  ExpertPolicy policy;
  std::int32_t layers = 0, experts = 0, slots = 0, staging = 0;
  std::int64_t blob_bytes = 0, first_bytes = 0;
  bool overlap = true, poison = false;      // see CudaOptions
  std::byte* slab = nullptr;                // [slots + staging, blob_bytes]
  const std::byte* const* store = nullptr;  // [layers] mapped host memory, [experts, blob_bytes]

  std::int32_t* slot_of = nullptr;    // [layers, experts], or -1
  std::int32_t* pair_of = nullptr;    // [slots], layer * experts + expert, or -1
  std::uint64_t* score = nullptr;     // [layers, experts]
  ExpertPlace* places = nullptr;      // [layers, experts] of what the last step of a layer reads
  const std::uint8_t* add = nullptr;  // score_table()

  struct Miss {
    std::int32_t expert, slot;
  };
  Miss* misses = nullptr;            // [experts] of the last resolve
  std::int32_t* n_misses = nullptr;  // [1]
  std::uint32_t* arrived = nullptr;  // [experts, 2] pieces of miss i: of its first bytes, the rest
  std::uint64_t* step = nullptr;     // [1]
  struct Counts {
    std::uint64_t wanted, hits, kept;  // distinct experts; misses that entered the cache
    std::uint64_t fetch_ns;            // of gathers, by the time of one block's equal share
  };
  Counts* counts = nullptr;  // [layers], since the cache was made
};

// Pieces that the gather counts for so many bytes.
std::uint32_t gather_pieces(std::int64_t bytes);

// Owner of all of it but the store.
class ExpertCacheMemory {
 public:
  struct Shape {
    std::int64_t layers = 0, experts = 0, slots = 0, staging = 0;
    std::size_t blob_bytes = 0, first_bytes = 0;
    bool overlap = true, poison = false;
  };
  // `store`: per layer, mapped memory of all its blobs. Fails with out_of_memory (naming both
  // numbers) or invalid_argument, also if there are fewer slots than layers.
  ExpertCacheMemory(const Shape& shape, const ExpertPolicy& policy,
                    const std::vector<const std::byte*>& store, cudaStream_t stream);

  const ExpertCacheView& view() const { return view_; }
  std::size_t bytes() const { return slab_.size() + tables_.size(); }

 private:
  DeviceMemory slab_, tables_;
  ExpertCacheView view_;
};

// The distinct experts of ids[0..n) within [low, high): marks hits, chooses the victims of all
// misses in one pass and lists the misses by decreasing score. `first`: this is the step's first
// call, of any layer. With logits in `route`, which is of one token, it writes ids and weights
// first. The layer's slots (or the staging) must hold as many as can be distinct. Between two steps
// something else must be in the stream that does not overlap, as a copy.
void resolve_experts(const ExpertCacheView&, std::int32_t layer, const std::int32_t* ids,
                     std::int64_t n, std::int32_t low, std::int32_t high, bool first,
                     const RouteArgs& route, cudaStream_t);

// Hash of what each slot that holds an expert holds: hashes [slots]. Defined in expert_check.cu.
void hash_slots(const ExpertCacheView&, std::uint64_t* hashes, cudaStream_t);

// Copies the listed misses of a layer from the store into their slots, by whole lines, the first
// bytes of all before the rest. With `overlap` the next kernel runs beside it: it starts when the
// misses are known, and waits for what it reads by their counts in `arrived`. Blocks of the gather
// wait for nothing and all run before the first that waits for them, so this ends.
void gather_experts(const ExpertCacheView&, std::int32_t layer, cudaStream_t);

}  // namespace imp::cuda
