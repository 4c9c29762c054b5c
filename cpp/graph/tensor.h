// Handles and shapes of a step's intermediates, and the weights that ops read. C++20-clean.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpp/quant/quant.h"

namespace imp {

class FileReader;

// A tensor of a graph: [rows, cols], row-major, fp32 or int32. -1 = absent.
struct Tensor {
  std::int32_t id = -1;
  explicit operator bool() const { return id >= 0; }
  friend bool operator==(Tensor, Tensor) = default;
};

// A linear map [rows, cols] in storage format: y = scale * w x. Owned by the model.
struct Weight {
  DType dtype = DType::f32;
  std::int64_t rows = 0;  // outputs
  std::int64_t cols = 0;  // inputs
  std::size_t row_bytes = 0;
  const std::byte* data = nullptr;
  float scale = 1;
  std::uint64_t seed = 0;            // not 0: `data` is only a name, contents are synthetic_word's
  const FileReader* file = nullptr;  // whose mapping `data` is in, if any: it begins at file_offset
  std::size_t file_offset = 0;
};

// One matrix per expert: expert e starts at data + e * expert_bytes and has its own scale.
struct ExpertBank {
  Weight expert;  // shape and type of each; data of expert 0
  std::int64_t experts = 0;
  std::size_t expert_bytes = 0;
  const float* scales = nullptr;  // [experts], or absent = 1
};

// Plain fp32 values [rows, cols] or [cols].
struct Vector {
  const float* data = nullptr;
  std::int64_t size = 0;
};

}  // namespace imp
