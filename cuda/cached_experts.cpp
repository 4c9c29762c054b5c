#include "cuda/cached_experts.h"

#include <algorithm>

#include "cpp/memory/expert_cache.h"
#include "cuda/check.h"
#include "cuda/watchdog.h"
#include "cuda/weights.h"

namespace imp::cuda {
namespace {

ExpertCacheShape shape_of(const std::vector<ExpertLayer>& layers, const CudaOptions& o) {
  return {std::ssize(layers), layers.front().banks[0]->experts, o.expert_slots};
}

ExpertCacheMemory::Shape memory_of(const ExpertCacheShape& s, const CudaOptions& o,
                                   const ExpertBlob& blob) {
  return {s.layers,   s.experts,          s.slots,           staging_slots(s, o.expert_policy),
          blob.bytes, blob.first_bytes(), o.overlap_gathers, o.poison};
}

template <class T>
std::vector<T> on_host(const T* from, std::int64_t n, cudaStream_t stream) {
  std::vector<T> to(static_cast<std::size_t>(n));
  check(cudaMemcpyAsync(to.data(), from, sizeof(T) * to.size(), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  finish(stream, "reading the expert cache's tables");
  return to;
}

}  // namespace

CachedExperts::CachedExperts(const std::vector<ExpertLayer>& layers, const CudaOptions& o,
                             WeightStore& weights, cudaStream_t stream)
    : store_(weights.expert_store(layers, o.ram_limit, o.verify_experts)),
      wave_(step_experts(shape_of(layers, o), o.expert_policy)),
      cache_(memory_of(shape_of(layers, o), o, store_->blob()), o.expert_policy, store_->layers(),
             stream),
      hashes_(device_memory(o.verify_experts ? 8 * static_cast<std::size_t>(o.expert_slots) : 0,
                            "checksums of experts")) {
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
  e.places = cache_.view().places + layer * bank.experts;
  const bool later = matrix == ExpertBlob::down;
  e.arrived = cache_.view().arrived + (later ? 1 : 0);
  e.pieces = gather_pieces(
      static_cast<std::int64_t>(later ? blob.bytes - blob.first_bytes() : blob.first_bytes()));
  e.cache = &cache_.view();
  e.layer = static_cast<std::int32_t>(layer);
  e.wave = wave_;
  return e;
}

ExpertStats CachedExperts::stats(cudaStream_t stream) const {
  const ExpertCacheView& c = cache_.view();
  ExpertStats s{c.layers,
                c.experts,
                c.slots,
                c.blob_bytes,
                static_cast<std::int64_t>(store_->bytes()),
                store_->pin_seconds(),
                store_->fill_seconds(),
                {}};
  for (const auto& n : on_host(c.counts, c.layers, stream))
    s.by_layer.push_back({static_cast<std::int64_t>(n.wanted), static_cast<std::int64_t>(n.hits),
                          static_cast<std::int64_t>(n.kept),
                          static_cast<std::int64_t>(n.fetch_ns)});
  return s;
}

void CachedExperts::need_checksums() const {
  if (store_->checksums().empty())
    fail(ErrorCode::invalid_argument,
         "experts cannot be verified: no checksums were taken when the session was opened");
}

void CachedExperts::begin_step(cudaStream_t stream) {
  need_checksums();
  const ExpertCacheView& c = cache_.view();
  const auto pairs = static_cast<std::size_t>(c.layers) * static_cast<std::size_t>(c.experts);
  check(cudaMemsetAsync(c.places, 0xff, sizeof(c.places[0]) * pairs, stream), "cudaMemsetAsync");
}

ExpertCheck CachedExperts::check_slots(cudaStream_t stream) {
  need_checksums();
  const ExpertCacheView& c = cache_.view();
  auto* hashes = reinterpret_cast<std::uint64_t*>(hashes_.data());
  hash_slots(c, hashes, stream);
  std::vector<std::int32_t> reads;
  for (const ExpertPlace& p : on_host(c.places, std::int64_t{c.layers} * c.experts, stream))
    reads.push_back(p.slot);
  ExpertCheck checked =
      imp::check_slots(c.experts, on_host(c.pair_of, c.slots, stream),
                       on_host(hashes, c.slots, stream), store_->checksums(), reads);
  for (const DamagedExpert& e : checked.damaged) empty(e, stream);
  return checked;
}

// As before the expert came: the next step that wants it fetches it.
void CachedExperts::empty(const DamagedExpert& e, cudaStream_t stream) {
  const ExpertCacheView& c = cache_.view();
  for (std::int32_t* entry : {c.slot_of + e.layer * c.experts + e.expert, c.pair_of + e.slot})
    check(cudaMemsetAsync(entry, 0xff, sizeof(*entry), stream), "cudaMemsetAsync");
  finish(stream, "emptying a slot");
}

void CachedExperts::check_step(cudaStream_t stream) {
  for (const DamagedExpert& e : check_slots(stream).damaged)
    if (e.used)
      fail(ErrorCode::io,
           str(describe(e), ", and the step used it: its results are void; the slot is empty now"));
}

ExpertCheck CachedExperts::verify(cudaStream_t stream) {
  ExpertCheck checked = check_slots(stream);
  checked.stored = std::ssize(store_->checksums());
  for (const DamagedExpert& e : store_->damaged()) checked.damaged.push_back(e);
  return checked;
}

void CachedExperts::damage(std::int64_t slot, cudaStream_t stream) {
  const ExpertCacheView& c = cache_.view();
  if (slot < 0 || slot >= c.slots)
    fail(ErrorCode::invalid_argument, str("slot ", slot, " of ", c.slots));
  std::byte* byte = c.slab + slot * c.blob_bytes + c.blob_bytes / 2;
  const std::byte flipped = on_host(byte, 1, stream).front() ^ std::byte{1};
  check(cudaMemcpyAsync(byte, &flipped, 1, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  finish(stream, "damaging a slot");
}

}  // namespace imp::cuda
