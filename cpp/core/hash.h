// A fast 64-bit hash of words and bytes; not one that withstands an attacker.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace imp {

// Each step is a bijection of the state and of the word, so any one changed word shows.
class Hash {
 public:
  void word(std::uint64_t w) { h_ = std::rotl((h_ ^ w) * 0x9e3779b97f4a7c15u, 29); }
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
  std::uint64_t value() const { return h_ ^ (h_ >> 32); }

 private:
  std::uint64_t h_ = 0x243f6a8885a308d3u;
};

}  // namespace imp
