// Parses one GGUF file image into a Gguf; Gguf::open joins the shards. Internal to cpp/gguf.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpp/gguf/cursor.h"
#include "cpp/gguf/gguf.h"

namespace imp::gguf {

class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& file, const Limits& limits);

  std::uint32_t version = 0;
  KeyValues keys;
  std::vector<TensorInfo> tensors;  // shard is 0

  // One Gguf over the files of `parts`, in shard order; the keys are those of the first.
  static std::shared_ptr<const Gguf> join(std::string path, std::vector<Reader> parts,
                                          std::vector<std::shared_ptr<const MappedFile>> files);

 private:
  std::uint64_t header();  // returns the number of tensors
  void read_key();
  Value read_value(ValueType type);
  Array read_array(int depth);
  template <class T>
  std::vector<T> numbers(std::uint64_t count);
  ValueType read_type();
  void read_alignment();
  TensorInfo read_tensor();
  void place_tensors();

  std::span<const std::byte> bytes_;
  Cursor in_;
  std::string subject_;
  std::uint64_t n_keys_ = 0;
  std::uint32_t alignment_ = default_alignment;
};

}  // namespace imp::gguf
