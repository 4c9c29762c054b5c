// A whole file mapped read-only into memory, of the size it has when it is opened. A file that is
// truncated later must not be read through the mapping: the operating system answers with SIGBUS.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "cpp/core/file_reader.h"

namespace imp::gguf {

class MappedFile {
 public:
  // Fails with io (naming the file and the system's reason) or bad_file (not a regular file,
  // empty).
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return file_.path(); }
  const FileReader& reader() const { return file_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

  enum class Advice { normal, random, will_need, dont_need };
  // Page-aligns the range by itself; advice is a hint, so a refusal is not an error.
  void advise(std::size_t offset, std::size_t size, Advice advice) const;

 private:
  MappedFile(int descriptor, std::string path) : file_(descriptor, std::move(path)) {}
  FileReader file_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace imp::gguf
