// Anonymous mappings.
#include "cpp/core/buffer.h"

#include <sys/mman.h>

#include "cpp/core/error.h"

namespace imp {

Buffer::Buffer(std::size_t bytes, const char* what) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    fail(ErrorCode::out_of_memory, str(what, ": the system has no ", bytes, " bytes to map"));
  data_ = static_cast<std::byte*>(p);
  size_ = bytes;
}

void Buffer::release() noexcept {
  if (data_ != nullptr) munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

}  // namespace imp
