#include "cpp/runtime/planted_routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "cpp/core/error.h"

namespace imp {
namespace {

// splitmix64 of G. Steele et al., "Fast Splittable Pseudorandom Number Generators" (2014).
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

}  // namespace

HitCurve read_curve(std::string_view name, std::int64_t experts) {
  const auto n = static_cast<double>(experts);
  if (name == "uniform") return {{{n, 1.0}}};
  if (name != "prose")
    fail(ErrorCode::invalid_argument, str("routing '", name, "': prose or uniform"));
  constexpr double shape = 512;  // experts of the published curve
  HitCurve c{{{8, 0.20},
              {16, 0.34},
              {31, 0.50},
              {62, 0.68},
              {74, 0.75},
              {97, 0.80},
              {118, 0.84},
              {173, 0.92},
              {256, 0.97},
              {512, 1.0}}};
  for (auto& [at, share] : c.points) at *= n / shape;
  return c;
}

PlantedRouting::PlantedRouting(std::int64_t layers, std::int64_t experts, std::int64_t k,
                               const HitCurve& curve, std::uint64_t seed)
    : experts_(experts), k_(k), random_(seed) {
  if (layers < 1 || k < 1 || k > experts)
    fail(ErrorCode::invalid_argument,
         str("routing for ", layers, " layers, ", k, " of ", experts, " experts"));
  double at = 0, share = 0;
  std::size_t next = 0;
  for (std::int64_t d = 1; d <= experts; ++d) {
    while (next < curve.points.size() && curve.points[next].first < static_cast<double>(d))
      std::tie(at, share) = curve.points[next++];
    double value = 1;
    if (next < curve.points.size()) {
      const auto [to, top] = curve.points[next];
      if (to <= at || top < share || top > 1)
        fail(ErrorCode::invalid_argument, str("hit curve at ", to, ": ", top, " after ", share));
      value = share + (top - share) * (static_cast<double>(d) - at) / (to - at);
    }
    below_.push_back(static_cast<std::uint64_t>(std::ldexp(std::min(value, 1.0), 63)));
  }
  below_.back() = std::uint64_t{1} << 63;
  order_.assign(static_cast<std::size_t>(layers), {});
  for (auto& order : order_) {
    order.resize(static_cast<std::size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size() - 1; i > 0; --i)
      std::swap(order[i], order[next_random(random_) % (i + 1)]);
  }
}

std::int64_t PlantedRouting::depth() {
  const std::uint64_t draw = next_random(random_) >> 1;
  return std::ranges::upper_bound(below_, draw) - below_.begin();
}

void PlantedRouting::next(std::int64_t layer, std::int64_t rows, std::int32_t* ids) {
  auto& order = order_[static_cast<std::size_t>(layer)];
  for (std::int64_t r = 0; r < rows; ++r, ids += k_) {
    for (std::int64_t j = 0; j < k_;) {
      const std::int32_t e = order[static_cast<std::size_t>(depth())];
      if (std::find(ids, ids + j, e) == ids + j) ids[j++] = e;
    }
    for (std::int64_t j = k_; j-- > 0;) {
      const auto at = std::ranges::find(order, ids[j]);
      std::rotate(order.begin(), at, at + 1);
    }
  }
}

RecordedRouting::RecordedRouting(std::vector<std::uint16_t> ids, std::int64_t layers,
                                 std::int64_t k)
    : ids_(std::move(ids)), layers_(layers), k_(k), at_(static_cast<std::size_t>(layers), 0) {
  if (layers < 1 || k < 1 || ids_.empty() || std::ssize(ids_) % (layers * k) != 0)
    fail(ErrorCode::invalid_argument,
         str(ids_.size(), " recorded experts for ", layers, " layers, ", k, " a token"));
}

void RecordedRouting::next(std::int64_t layer, std::int64_t rows, std::int32_t* ids) {
  std::int64_t& at = at_[static_cast<std::size_t>(layer)];
  const std::int64_t tokens = std::ssize(ids_) / (layers_ * k_);
  for (std::int64_t r = 0; r < rows; ++r, ids += k_) {
    std::copy_n(ids_.begin() + (at * layers_ + layer) * k_, k_, ids);
    at = (at + 1) % tokens;
  }
}

}  // namespace imp
