// Bytes of an open file where a mapping would end the process: what cannot be read is an error.
#pragma once

#include <cstddef>
#include <string>

namespace imp {

class FileReader {
 public:
  // Takes the descriptor over; -1 = none.
  FileReader(int descriptor, std::string path) : path_(std::move(path)), fd_(descriptor) {}
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Bytes [offset, offset + size). Any number of threads may read. Fails (io) naming the file and
  // the system's reason, or where it ends.
  void read(std::size_t offset, std::size_t size, std::byte* to) const;

  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }

 private:
  std::string path_;
  int fd_;
};

}  // namespace imp
