// pread until all is there.
#include "cpp/core/file_reader.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "cpp/core/error.h"

namespace imp {

FileReader::~FileReader() {
  if (fd_ >= 0) ::close(fd_);
}

void FileReader::read(std::size_t offset, std::size_t size, std::byte* to) const {
  const std::size_t end = offset + size;
  while (offset < end) {
    const ssize_t n = ::pread(fd_, to, end - offset, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      fail(ErrorCode::io, str("cannot read ", path_, " at byte ", offset, ": ",
                              std::generic_category().message(errno)));
    if (n == 0) {
      struct stat now{};
      const auto ends = ::fstat(fd_, &now) == 0 ? static_cast<std::size_t>(now.st_size) : offset;
      fail(ErrorCode::io,
           str(path_, " ends at byte ", std::min(ends, offset), " while bytes up to ", end,
               " are read: it became shorter after it was opened"));
    }
    offset += static_cast<std::size_t>(n);
    to += n;
  }
}

}  // namespace imp
