#include "cuda/cached_experts.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/weights.h"

namespace imp::cuda {
namespace {

std::int64_t wave_of(const std::vector<ExpertLayer>& layers, const CudaOptions& o) {
  const std::int64_t experts = layers.front().banks[0]->experts;
  const std::int64_t own =
      o.expert_policy.per_layer ? o.expert_slots / std::ssize(layers) : o.expert_slots;
  return std::min(own, experts);
}

// What is not admitted needs a place too.
ExpertCacheMemory::Shape shape_of(const std::vector<ExpertLayer>& layers, const CudaOptions& o,
                                  std::int64_t wave, std::size_t blob_bytes) {
  return {std::ssize(layers), layers.front().banks[0]->experts, o.expert_slots,
          o.expert_policy.admission ? wave : 0, blob_bytes};
}

}  // namespace

CachedExperts::CachedExperts(const std::vector<ExpertLayer>& layers, const CudaOptions& o,
                             WeightStore& weights, cudaStream_t stream)
    : store_(weights.expert_store(layers, o.ram_limit)),
      wave_(wave_of(layers, o)),
      cache_(shape_of(layers, o, wave_, store_->blob().bytes), o.expert_policy, store_->layers(),
             stream) {
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (int m = 0; m < 3; ++m) {
      const ExpertBank& bank = *layers[l].banks[m];
      Experts e = experts(bank, static_cast<std::int64_t>(l), m);
      e.factors = weights.factors(bank);
      banks_.emplace(bank.expert.data, e);
    }
}

const Experts* CachedExperts::find(const ExpertBank& bank) const {
  const auto it = banks_.find(bank.expert.data);
  return it == banks_.end() ? nullptr : &it->second;
}

Experts CachedExperts::experts(const ExpertBank& bank, std::int64_t layer, int matrix) const {
  const ExpertBlob& blob = store_->blob();
  Experts e;
  e.tiled = can_tile(bank.expert);
  e.expert = packed_matrix(bank.expert, e.tiled);
  e.expert.data = cache_.view().slab + blob.codes[matrix];
  e.expert.scales = cache_.view().slab + blob.scales[matrix];
  e.experts = bank.experts;
  e.bytes = e.scale_bytes = static_cast<std::int64_t>(blob.bytes);
  e.slots = cache_.view().reads + layer * bank.experts;
  e.cache = &cache_.view();
  e.layer = static_cast<std::int32_t>(layer);
  e.wave = wave_;
  return e;
}

ExpertStats CachedExperts::stats(cudaStream_t stream) const {
  const ExpertCacheView& c = cache_.view();
  std::vector<ExpertCacheView::Counts> counts(static_cast<std::size_t>(c.layers));
  check(cudaMemcpyAsync(counts.data(), c.counts, sizeof(counts[0]) * counts.size(),
                        cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  ExpertStats s{c.layers,
                c.experts,
                c.slots,
                c.blob_bytes,
                static_cast<std::int64_t>(store_->bytes()),
                store_->pin_seconds(),
                store_->fill_seconds(),
                {}};
  for (const auto& n : counts)
    s.by_layer.push_back({static_cast<std::int64_t>(n.wanted), static_cast<std::int64_t>(n.hits),
                          static_cast<std::int64_t>(n.kept)});
  return s;
}

}  // namespace imp::cuda
