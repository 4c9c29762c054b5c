// A block of zeroed, page-aligned host memory. Pages cost RAM only once they are written.
#pragma once

#include <cstddef>
#include <utility>

namespace imp {

class Buffer {
 public:
  Buffer() = default;
  // Fails with out_of_memory, naming `what` and both numbers.
  Buffer(std::size_t bytes, const char* what);
  ~Buffer() { release(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      release();
      swap(other);
    }
    return *this;
  }

  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  std::size_t size() const { return size_; }

 private:
  void release() noexcept;
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace imp
