// Bounds-checked GGUF reader: maps one file or all shards of a split one, checks every length
// against the bytes that remain, never trusts a count, never asserts. Container: GGUF v2/v3, little
// endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cpp/gguf/key_values.h"
#include "cpp/gguf/mapped_file.h"
#include "cpp/quant/quant.h"

namespace imp::gguf {

inline constexpr std::uint32_t min_version = 2;
inline constexpr std::uint32_t max_version = 3;
inline constexpr int max_dims = 4;                             // dimensions of a tensor
inline constexpr std::size_t max_name_bytes = 65535;           // length of a key or tensor name
inline constexpr std::uint32_t min_alignment = 8;              // bytes; a power of two
inline constexpr std::uint32_t max_alignment = 1u << 20;       // bytes; a power of two
inline constexpr std::uint32_t default_alignment = 32;         // bytes, without general.alignment
inline constexpr std::uint32_t first_private_type = 1000;      // DType ids that no file may use
inline constexpr int max_array_depth = 4;                      // arrays of arrays
inline constexpr int max_shards = 9999;                        // files of a split model
inline constexpr std::uint64_t max_metadata_bytes = 1u << 30;  // keys and tensor infos of one file

// The limits that only a huge input would meet; tests lower them.
struct Limits {
  std::uint64_t metadata_bytes = max_metadata_bytes;
  std::int64_t shards = max_shards;
};

// A name from a file, quoted and made fit for one line of an error message.
std::string quote(std::string_view name);

struct TensorInfo {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> dims;  // fastest-varying first, as in the file (ggml's ne)
  std::size_t n_bytes = 0;
  int shard = 0;                    // index into Gguf::files()
  std::size_t file_offset = 0;      // absolute, in that file
  const std::byte* data = nullptr;  // inside the mapping

  std::int64_t n_elems() const;
};

class Gguf {
 public:
  // Opens `path` and, if it says split.count > 1, the other shards beside it; any shard will do.
  // Fails with Error naming file, key or tensor and both numbers.
  static std::shared_ptr<const Gguf> open(const std::string& path, const Limits& limits = {});
  // Header and tensor infos from memory, for tests and fuzzing; tensor data must lie inside
  // `bytes`.
  static std::shared_ptr<const Gguf> parse(std::span<const std::byte> bytes,
                                           const std::string& name, const Limits& limits = {});

  const KeyValues& keys() const { return keys_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;
  const std::vector<std::shared_ptr<const MappedFile>>& files() const { return files_; }
  const std::string& path() const { return path_; }
  std::uint32_t version() const { return version_; }

 private:
  friend class Reader;
  std::string path_;
  std::uint32_t version_ = 3;
  KeyValues keys_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, std::size_t> index_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
};

}  // namespace imp::gguf
