// Expert ids that follow a given hit curve, for benchmarks without trained weights: random weights
// route uniformly, real text does not.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace imp {

// Share of picks that find their expert among the n most recently used of its layer; linear between
// the points, which ascend from an implied (0, 0) to (experts, 1).
struct HitCurve {
  std::vector<std::pair<double, double>> points;
};

// "prose": per-layer LRU on running text, as published for 512 experts. "uniform": every expert is
// as likely. Fails (invalid_argument) otherwise.
HitCurve read_curve(std::string_view name, std::int64_t experts);

// Per layer the experts in order of their last use. Each of the k picks of a token draws a depth
// in this order from the curve, again if the token has that expert already; then the token's
// experts move to the front. All sequences share the order.
class PlantedRouting {
 public:
  // Fails (invalid_argument) if k > experts or a curve does not ascend.
  PlantedRouting(std::int64_t layers, std::int64_t experts, std::int64_t k, const HitCurve& curve,
                 std::uint64_t seed);
  // The next `rows` tokens of a layer: ids [rows, k].
  void next(std::int64_t layer, std::int64_t rows, std::int32_t* ids);

 private:
  std::int64_t depth();
  std::int64_t experts_, k_;
  std::vector<std::uint64_t> below_;              // [experts]: 2^63 * curve(depth + 1)
  std::vector<std::vector<std::int32_t>> order_;  // [layers][experts]
  std::uint64_t random_;
};

// Recorded ids, from the start again after the last token.
class RecordedRouting {
 public:
  // ids [tokens, layers, k]; fails (invalid_argument) if their number does not fit or is 0.
  RecordedRouting(std::vector<std::uint16_t> ids, std::int64_t layers, std::int64_t k);
  void next(std::int64_t layer, std::int64_t rows, std::int32_t* ids);

 private:
  std::vector<std::uint16_t> ids_;
  std::int64_t layers_, k_;
  std::vector<std::int64_t> at_;  // [layers] next token
};

}  // namespace imp
