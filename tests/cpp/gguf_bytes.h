// Writes GGUF files byte by byte, right or wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpp/gguf/key_values.h"

namespace imp::gguf::test {

class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    data_.insert(data_.end(), first, first + sizeof value);
    return *this;
  }
  Bytes& u32(std::uint32_t v) { return put(v); }
  Bytes& u64(std::uint64_t v) { return put(v); }
  Bytes& text(std::string_view s) {
    for (const char c : s) put(c);
    return *this;
  }
  Bytes& string(std::string_view s) { return u64(s.size()).text(s); }

  Bytes& header(std::uint64_t n_tensors, std::uint64_t n_keys, std::uint32_t version = 3) {
    return text("GGUF").u32(version).u64(n_tensors).u64(n_keys);
  }
  // Name and type of a key; the value has to follow.
  Bytes& key(std::string_view name, ValueType type) {
    return string(name).u32(static_cast<std::uint32_t>(type));
  }
  // Element type and count; the elements have to follow.
  Bytes& array(ValueType element, std::uint64_t count) {
    return u32(static_cast<std::uint32_t>(element)).u64(count);
  }
  Bytes& tensor(std::string_view name, const std::vector<std::uint64_t>& dims, std::uint32_t type,
                std::uint64_t offset) {
    string(name).u32(static_cast<std::uint32_t>(dims.size()));
    for (const std::uint64_t d : dims) u64(d);
    return u32(type).u64(offset);
  }
  Bytes& pad(std::size_t alignment = 32) {
    while (data_.size() % alignment != 0) put(std::uint8_t{0});
    return *this;
  }
  Bytes& zeros(std::size_t count) {
    data_.resize(data_.size() + count);
    return *this;
  }
  Bytes& cut(std::size_t count) {
    data_.resize(data_.size() - count);
    return *this;
  }

  std::size_t size() const { return data_.size(); }
  std::span<const std::byte> span() const { return data_; }

 private:
  std::vector<std::byte> data_;
};

}  // namespace imp::gguf::test
