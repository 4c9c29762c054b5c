// Checksums of what slots hold: Hash over a blob's words, a thread for each slot.
#include "cpp/core/hash.h"
#include "cuda/expert_cache.h"
#include "cuda/launch.h"

namespace imp::cuda {
namespace {

constexpr int check_threads = 32;  // few, so that all multiprocessors take part

__global__ void __launch_bounds__(check_threads)
    hash_slots_kernel(const ExpertCacheView c, std::uint64_t* hashes) {
  begin();
  const int slot = static_cast<int>(blockIdx.x) * check_threads + static_cast<int>(threadIdx.x);
  if (slot >= c.slots || c.pair_of[slot] < 0) return;
  constexpr int line = static_cast<int>(blob_alignment / sizeof(ulonglong2));
  const auto* from = reinterpret_cast<const ulonglong2*>(c.slab + slot * c.blob_bytes);
  const auto* end = from + c.blob_bytes / static_cast<std::int64_t>(sizeof(ulonglong2));
  Hash hash;
  hash.word(static_cast<std::uint64_t>(c.blob_bytes));
  for (; from < end; from += line) {
    ulonglong2 words[line];
#pragma unroll
    for (int i = 0; i < line; ++i) words[i] = from[i];
#pragma unroll
    for (int i = 0; i < line; ++i) {
      hash.word(words[i].x);
      hash.word(words[i].y);
    }
  }
  hashes[slot] = hash.value();
}

}  // namespace

void hash_slots(const ExpertCacheView& view, std::uint64_t* hashes, cudaStream_t stream) {
  launch(hash_slots_kernel, (view.slots + check_threads - 1) / check_threads, check_threads, 0,
         stream, view, hashes);
}

}  // namespace imp::cuda
