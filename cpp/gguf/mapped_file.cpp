// mmap and madvise.
#include "cpp/gguf/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "cpp/core/error.h"

namespace imp::gguf {
namespace {

[[noreturn]] void refuse(const std::string& path, const char* what, int error) {
  fail(ErrorCode::io,
       str("cannot ", what, " ", path, ": ", std::generic_category().message(error)));
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  // Non-blocking, so that a pipe is refused instead of waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse(path, "open", errno);
  const std::shared_ptr<MappedFile> file(new MappedFile(fd, path));
  struct stat status{};
  if (::fstat(fd, &status) != 0) refuse(path, "stat", errno);
  if (!S_ISREG(status.st_mode)) fail(ErrorCode::bad_file, str(path, " is not a regular file"));
  if (status.st_size == 0) fail(ErrorCode::bad_file, str(path, " is empty"));
  const auto size = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) refuse(path, "map", errno);
  file->data_ = static_cast<const std::byte*>(data);
  file->size_ = size;
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::advise(std::size_t offset, std::size_t size, Advice advice) const {
  if (offset >= size_) return;
  size = std::min(size, size_ - offset);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t first = offset / page * page;
  int how = MADV_NORMAL;
  switch (advice) {
    case Advice::normal:
      how = MADV_NORMAL;
      break;
    case Advice::random:
      how = MADV_RANDOM;
      break;
    case Advice::will_need:
      how = MADV_WILLNEED;
      break;
    case Advice::dont_need:
      how = MADV_DONTNEED;
      break;
  }
  ::madvise(const_cast<std::byte*>(data_) + first, offset + size - first, how);
}

}  // namespace imp::gguf
