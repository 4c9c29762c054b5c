// A loaded model: the mapped file, its shape, and every tensor that the architecture's table names,
// checked.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cpp/gguf/gguf.h"
#include "cpp/graph/tensor.h"
#include "cpp/model/arch.h"
#include "cpp/model/hparams.h"

namespace imp {

struct LoadOptions {
  // Multiplies the n-gram table: for files whose converter dropped the checkpoint's scale. 0 = the
  // file's own.
  float ngram_scale = 0;
};

class Model {
 public:
  // Fails with one error that lists every missing, misshapen or unknown tensor.
  static std::shared_ptr<const Model> load(const std::string& path, const LoadOptions& = {});
  // The same over an open file; `memory` is what its tensors lie in, if not the file's mapping.
  static std::shared_ptr<Model> bind(std::shared_ptr<const gguf::Gguf> file,
                                     std::shared_ptr<const void> memory, const LoadOptions&);

  const std::string& path() const { return file_->path(); }
  const gguf::Gguf& file() const { return *file_; }
  const Arch& arch() const { return *arch_; }
  const HParams& hparams() const { return hparams_; }
  const std::vector<std::string>& notes() const { return notes_; }
  // Of weights that make_synthetic() drew; none for a file.
  std::optional<std::int64_t> synthetic_seed() const { return synthetic_seed_; }

  // Look-ups by the table's name; an unknown name is a bug (internal).
  const Weight& weight(std::string_view name) const;
  const ExpertBank& experts(std::string_view name) const;
  Vector vector(std::string_view name) const;  // convolution filters come as [taps, channels]

  // Bytes that a step may touch (all but the n-gram tables), and the tables'.
  std::size_t resident_bytes() const { return resident_bytes_; }
  std::size_t table_bytes() const { return table_bytes_; }
  // Reads bytes [begin, end) of the resident part into the page cache; `resident_bytes()` is the
  // end of the last slice.
  void prefetch(std::size_t begin, std::size_t end) const;
  // Starts reading table rows [n-gram layer][tokens * heads], if the tables are too large to be in
  // memory anyway; a hint.
  void prefetch_rows(const std::vector<std::vector<std::int32_t>>& rows) const;

 private:
  friend class Loader;
  friend std::shared_ptr<const Model> make_synthetic(const std::string& spec, bool on_host,
                                                     const std::string& table_file);
  std::shared_ptr<const void> memory_;
  std::shared_ptr<const gguf::Gguf> file_;
  const Arch* arch_ = nullptr;
  HParams hparams_;
  std::vector<std::string> notes_;
  std::optional<std::int64_t> synthetic_seed_;
  std::unordered_map<std::string, Weight> weights_;
  std::unordered_map<std::string, ExpertBank> banks_;
  std::unordered_map<std::string, std::vector<float>> vectors_;
  std::vector<std::vector<float>> scales_;  // of the banks
  std::vector<const gguf::TensorInfo*> resident_;
  struct Table {
    Weight weight;
    std::size_t bytes;
    std::shared_ptr<const gguf::MappedFile> file;  // absent: in memory
    std::size_t offset = 0;                        // in the file
  };
  std::vector<Table> tables_;  // one per n-gram layer
  std::size_t resident_bytes_ = 0;
  std::size_t table_bytes_ = 0;
};

}  // namespace imp
