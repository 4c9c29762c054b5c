// Plain comparison; the checksums come from the device.
#include "cpp/memory/expert_check.h"

#include "cpp/core/error.h"

namespace imp {

std::string describe(const DamagedExpert& e) {
  const std::string where = e.slot < 0 ? "in host memory" : str("in slot ", e.slot);
  return str("expert ", e.expert, " of layer ", e.layer, " ", where,
             " is not what was read from the file");
}

ExpertCheck check_slots(std::int64_t experts, std::span<const std::int32_t> pair_of,
                        std::span<const std::uint64_t> found, std::span<const std::uint64_t> want,
                        std::span<const std::int32_t> reads) {
  ExpertCheck check;
  for (std::size_t slot = 0; slot < pair_of.size(); ++slot) {
    if (pair_of[slot] < 0) continue;
    ++check.slots;
    const auto pair = static_cast<std::size_t>(pair_of[slot]);
    if (found[slot] == want[pair]) continue;
    const auto n = static_cast<std::int64_t>(slot);
    check.damaged.push_back({pair_of[slot] / experts, pair_of[slot] % experts, n,
                             reads[pair] == static_cast<std::int32_t>(slot)});
  }
  return check;
}

}  // namespace imp
