// A model's experts in a pinned store with a cache in front, as kernels address them. C++20-clean.
#pragma once

#include <cstdint>
#include <vector>

#include "cpp/runtime/backend.h"
#include "cuda/context.h"
#include "cuda/expert_cache.h"
#include "cuda/expert_store.h"

namespace imp::cuda {

class CachedExperts {
 public:
  // `layers` in the order of the model. Fails as the store and the cache do.
  CachedExperts(const std::vector<ExpertLayer>& layers, const CudaOptions&, cudaStream_t);

  // A bank of layer `layer` without its factors.
  Experts experts(std::int64_t layer, int matrix) const;
  // Most experts that a step of a layer may ask for at once.
  std::int64_t wave() const { return wave_; }
  ExpertStats stats(cudaStream_t) const;

 private:
  std::vector<ExpertLayer> layers_;
  ExpertStore store_;
  std::int64_t wave_;
  ExpertCacheMemory cache_;
};

}  // namespace imp::cuda
