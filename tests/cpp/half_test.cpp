// Conversions of half, bf16 and e4m3: every stored pattern, and every fp32 pattern near a rounding
// boundary, against slow references.
#include "cpp/core/half.h"

#include <doctest/doctest.h>

#include <cmath>
#include <initializer_list>
#include <limits>

namespace imp {
namespace {

// sign * mantissa * 2^exponent of a small float format, in double.
double decoded(std::uint32_t bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  const auto mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
  const auto exponent = static_cast<int>(bits >> mantissa_bits) & top;
  const double sign = bits >> (exponent_bits + mantissa_bits) ? -1 : 1;
  if (has_infinity && exponent == top)
    return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (!has_infinity && exponent == top && mantissa == (1 << mantissa_bits) - 1) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

bool same(float got, double want) {
  if (std::isnan(want)) return std::isnan(got);
  return static_cast<double>(got) == want && std::signbit(got) == std::signbit(want);
}

// The nearer of the two neighbours in a format given by its decoder, the even one of equals. `low`
// is the largest non-negative code not above |f|.
template <class Decode>
std::uint16_t nearest(float f, std::uint16_t infinity, Decode decode) {
  const double x = std::abs(static_cast<double>(f));
  std::uint16_t low = 0, high = infinity;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (decode(middle) <= x ? low : high) = middle;
  }
  // Infinity counts as one step above the largest number.
  const double above = high == infinity
                           ? 2 * decode(low) - decode(static_cast<std::uint16_t>(low - 1))
                           : decode(high);
  const double down = x - decode(low), up = above - x;
  return down < up || (down == up && low % 2 == 0) ? low : high;
}

template <class Encode, class Decode>
void check_rounding(std::uint16_t infinity, int dropped_bits, Encode encode, Decode decode) {
  const auto check = [&](std::uint32_t bits) {
    const float f = std::bit_cast<float>(bits);
    if (std::isnan(f)) {
      if (!std::isnan(decode(encode(f)))) FAIL_CHECK("NaN " << bits);
      return;
    }
    const std::uint16_t want = std::isinf(f) ? infinity : nearest(f, infinity, decode);
    if (encode(f) != want || encode(-f) != (want | 0x8000u)) FAIL_CHECK(f << " -> " << encode(f));
  };
  // Around every boundary of the dropped bits, for each value of the kept ones.
  const std::uint32_t half = 1u << (dropped_bits - 1);
  for (std::uint32_t high = 0; high < (0x80000000u >> dropped_bits); ++high)
    for (const std::uint32_t low : {0u, 1u, half - 1, half, half + 1, 2 * half - 1})
      check((high << dropped_bits) + low);
}

}  // namespace

TEST_CASE("half, bf16 and e4m3 decode every pattern exactly") {
  for (std::uint32_t b = 0; b < 65536; ++b) {
    const auto h = static_cast<std::uint16_t>(b);
    if (!same(half_to_float(h), decoded(b, 5, 10, true))) FAIL_CHECK("half " << b);
    if (!same(bf16_to_float(h), decoded(b, 8, 7, true))) FAIL_CHECK("bf16 " << b);
  }
  for (std::uint32_t b = 0; b < 256; ++b)
    if (!same(e4m3_to_float(static_cast<std::uint8_t>(b)), decoded(b, 4, 3, false)))
      FAIL_CHECK("e4m3 " << b);
  CHECK(e4m3_to_float(0x7e) == 448.0f);
}

TEST_CASE("half and bf16 survive the way there and back") {
  for (std::uint32_t b = 0; b < 65536; ++b) {
    const auto h = static_cast<std::uint16_t>(b);
    if (!std::isnan(half_to_float(h)) && float_to_half(half_to_float(h)) != h)
      FAIL_CHECK("half " << b);
    if (!std::isnan(bf16_to_float(h)) && float_to_bf16(bf16_to_float(h)) != h)
      FAIL_CHECK("bf16 " << b);
  }
}

TEST_CASE("fp32 rounds to the nearest bf16, even on ties") {
  check_rounding(
      0x7f80, 16, [](float f) { return float_to_bf16(f); },
      [](std::uint16_t b) { return decoded(b, 8, 7, true); });
}

TEST_CASE("fp32 rounds to the nearest half, even on ties, subnormals included") {
  const auto encode = [](float f) { return float_to_half(f); };
  const auto decode = [](std::uint16_t b) { return decoded(b, 5, 10, true); };
  check_rounding(0x7c00, 13, encode, decode);
  // Ties between subnormals need more than the 13 dropped bits: every midpoint and its neighbours.
  for (std::uint16_t b = 0; b < 0x400; ++b) {
    const auto middle = static_cast<float>((b + 0.5) * 0x1p-24);
    CHECK(encode(middle) == (b % 2 == 0 ? b : b + 1));
    CHECK(encode(std::nextafter(middle, 0.0f)) == b);
    CHECK(encode(std::nextafter(middle, 1.0f)) == b + 1);
  }
  CHECK(encode(65519.996f) == 0x7bff);
  CHECK(encode(65520.0f) == 0x7c00);
}

}  // namespace imp
