// A check of cached experts against the checksums of their store. C++20-clean.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace imp {

// An expert whose bytes are not those that its store was filled with.
struct DamagedExpert {
  std::int64_t layer = 0, expert = 0;
  std::int64_t slot = -1;  // that holds it; -1 = the store's own copy
  bool used = false;       // the last step read it there
};
std::string describe(const DamagedExpert&);

struct ExpertCheck {
  std::int64_t slots = 0;   // that hold an expert, compared
  std::int64_t stored = 0;  // experts of the store, compared
  std::vector<DamagedExpert> damaged;
};

// Compares slots: `pair_of` [slots] = layer * experts + expert or -1, `found` [slots] their
// checksums, `want` [pairs] the store's, `reads` [pairs] = the slot where the last step read a
// pair, or -1.
ExpertCheck check_slots(std::int64_t experts, std::span<const std::int32_t> pair_of,
                        std::span<const std::uint64_t> found, std::span<const std::uint64_t> want,
                        std::span<const std::int32_t> reads);

}  // namespace imp
