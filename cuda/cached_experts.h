// A session's cache of experts in front of the model's store, as kernels address them. C++20-clean.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cpp/runtime/backend.h"
#include "cuda/context.h"
#include "cuda/expert_cache.h"
#include "cuda/expert_store.h"

namespace imp::cuda {

class WeightStore;

class CachedExperts {
 public:
  // `layers` in the order of the model. Fails as the cache does.
  CachedExperts(const std::vector<ExpertLayer>& layers, const CudaOptions&, WeightStore& weights,
                cudaStream_t);

  // A bank as the cache shows it, or nullptr.
  const Experts* find(const ExpertBank&) const;
  // Most experts that a step of a layer may ask for at once.
  std::int64_t wave() const { return wave_; }
  ExpertStats stats(cudaStream_t) const;

  // The rest needs CudaOptions::verify_experts (invalid_argument).
  // Compares all slots and all of the store with the checksums; slots that differ are empty after
  // it.
  ExpertCheck verify(cudaStream_t);
  // Around a step: fails (io) if it read a slot that differs; other slots that do are emptied.
  void begin_step(cudaStream_t);
  void check_step(cudaStream_t);
  // Flips a bit of what a slot holds, for tests.
  void damage(std::int64_t slot, cudaStream_t);

 private:
  Experts experts(const ExpertBank&, std::int64_t layer, int matrix) const;
  void need_checksums() const;
  ExpertCheck check_slots(cudaStream_t);
  void empty(const DamagedExpert&, cudaStream_t);

  std::shared_ptr<const ExpertStore> store_;
  std::int64_t wave_;
  ExpertCacheMemory cache_;
  DeviceMemory hashes_;                             // [slots], if they are compared
  std::unordered_map<const void*, Experts> banks_;  // by host address
};

}  // namespace imp::cuda
