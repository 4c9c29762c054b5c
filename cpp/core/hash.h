// A fast 64-bit hash of words and bytes; not one that withstands an attacker. C++20-clean; usable
// in device code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "cpp/core/host_device.h"

namespace imp {

// Each step is a bijection of the state and of the word, so any one changed word shows.
class Hash {
 public:
  IMP_HOST_DEVICE void word(std::uint64_t w) {
    const std::uint64_t x = (h_ ^ w) * 0x9e3779b97f4a7c15u;
    h_ = x << 29 | x >> 35;
  }
  void bytes(const void* p, std::size_t n) {
    const auto* at = static_cast<const char*>(p);
    word(n);
    for (; n >= 8; n -= 8, at += 8) {
      std::uint64_t w;
      std::memcpy(&w, at, 8);
      word(w);
    }
    std::uint64_t rest = 0;
    std::memcpy(&rest, at, n);
    if (n > 0) word(rest);
  }
  void text(std::string_view s) { bytes(s.data(), s.size()); }
  IMP_HOST_DEVICE std::uint64_t value() const { return h_ ^ (h_ >> 32); }

 private:
  std::uint64_t h_ = 0x243f6a8885a308d3u;
};

}  // namespace imp
