// Reads bytes in order from a file image and never past its end: every length is checked before it
// is read and before anything is allocated for it. Internal to cpp/gguf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "cpp/core/error.h"

namespace imp::gguf {

class Cursor {
 public:
  // `limit`: bytes of metadata that imp reads at most.
  Cursor(std::span<const std::byte> bytes, std::string file, std::uint64_t limit)
      : bytes_(bytes), file_(std::move(file)), limit_(limit) {}

  std::size_t position() const { return position_; }
  std::size_t remaining() const { return bytes_.size() - position_; }
  // What the next reads belong to, as an error message names it: "key 'general.name'".
  void set_subject(std::string subject) { subject_ = std::move(subject); }

  [[noreturn]] void bad(const std::string& message) const {
    fail(ErrorCode::bad_file, file_ + ": " + message);
  }
  [[noreturn]] void unsupported(const std::string& message) const {
    fail(ErrorCode::unsupported, file_ + ": " + message);
  }

  // Fails unless `count` items of at least `item_bytes` each can still follow.
  void need(std::uint64_t count, std::size_t item_bytes) const;

  template <class T>
  T read() {
    need(1, sizeof(T));
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  std::string_view characters(std::uint64_t count) {
    need(count, 1);
    const auto* first = reinterpret_cast<const char*>(bytes_.data() + position_);
    position_ += static_cast<std::size_t>(count);
    return {first, static_cast<std::size_t>(count)};
  }
  std::string_view string() { return characters(read<std::uint64_t>()); }

 private:
  std::span<const std::byte> bytes_;
  std::string file_;
  std::uint64_t limit_;
  std::string subject_ = "the header";
  std::size_t position_ = 0;
};

}  // namespace imp::gguf
