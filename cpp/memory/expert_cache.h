// A cache of experts in slots, by layer: which slot holds what, and who makes room. The reference
// for the device's own bookkeeping, and the core of simulations; it holds no weights.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpp/memory/expert_policy.h"

namespace imp {

struct ExpertCacheShape {
  std::int64_t layers = 0, experts = 0;
  std::int64_t slots = 0;  // of all layers together
};

// Most experts of a layer that a step may ask for at once; more of them go through the cache in
// waves.
std::int64_t step_experts(const ExpertCacheShape&, const ExpertPolicy&);
// Places beside the slots for experts that a step reads but does not keep.
std::int64_t staging_slots(const ExpertCacheShape&, const ExpertPolicy&);

class ExpertCache {
 public:
  // Fails (invalid_argument) if a layer would have no slot.
  ExpertCache(const ExpertCacheShape& shape, const ExpertPolicy& policy);

  struct Miss {
    std::int32_t expert, slot;  // slot -1: read, but not kept (not admitted)
    std::int32_t victim;        // layer * experts + expert that left the slot, or -1
  };
  // What a step of `layer` needs, `ids` in any order, with repeats.
  struct Resolved {
    std::vector<std::int32_t> hits;  // experts, ascending
    std::vector<Miss> misses;        // by expert, ascending
  };
  // One layer of one step; steps are numbered from 1 and do not go back. Victims are chosen in one
  // pass and are never experts of `ids`. Fails (invalid_argument) if the layer's distinct experts
  // outnumber the slots it may use: the caller goes through them in waves.
  const Resolved& resolve(std::int64_t layer, std::span<const std::int32_t> ids,
                          std::uint64_t step);

  std::int64_t slot_of(std::int64_t layer, std::int64_t expert) const {
    return slot_of_[index(layer, expert)];
  }
  // layer * experts + expert, or -1.
  std::int32_t pair_of(std::int64_t slot) const { return pair_of_[static_cast<std::size_t>(slot)]; }
  std::uint64_t score(std::int64_t layer, std::int64_t expert) const {
    return score_[index(layer, expert)];
  }
  // Slots [first, last) that a layer may use.
  struct Range {
    std::int64_t first, last;
  };
  Range slots_of(std::int64_t layer) const;

  // Distinct experts of all resolved layers, and how many of them were cached.
  std::int64_t wanted() const { return wanted_; }
  std::int64_t hits() const { return hits_; }

 private:
  std::size_t index(std::int64_t layer, std::int64_t expert) const {
    return static_cast<std::size_t>(layer * shape_.experts + expert);
  }
  ExpertCacheShape shape_;
  ExpertPolicy policy_;
  std::vector<std::int32_t> slot_of_;  // [layers, experts], or -1
  std::vector<std::int32_t> pair_of_;  // [slots]
  std::vector<std::uint64_t> score_;   // [layers, experts]
  std::int64_t wanted_ = 0, hits_ = 0;
  std::vector<std::int32_t> distinct_, order_, victims_;
  Resolved resolved_;
};

// Slots [first, last) of a layer under a policy; shared with the device.
IMP_HOST_DEVICE inline std::int64_t first_slot_of(std::int64_t layer, std::int64_t layers,
                                                  std::int64_t slots) {
  const std::int64_t each = slots / layers, more = slots % layers;
  return layer * each + (layer < more ? layer : more);
}

}  // namespace imp
