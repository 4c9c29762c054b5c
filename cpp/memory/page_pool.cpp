// The free list is a stack.
#include "cpp/memory/page_pool.h"

namespace imp {

PagePool::PagePool(std::int64_t pages) : references_(static_cast<std::size_t>(pages), 0) {
  for (std::int64_t p = pages; p-- > 0;) free_.push_back(static_cast<std::int32_t>(p));
}

std::expected<void, Shortage> PagePool::take(std::int64_t n, std::vector<std::int32_t>& pages) {
  if (n > free()) return std::unexpected(Shortage{"cache pages", n, free()});
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t page = free_.back();
    free_.pop_back();
    references_[static_cast<std::size_t>(page)] = 1;
    pages.push_back(page);
  }
  return {};
}

void PagePool::release(std::int32_t page) {
  std::int32_t& n = references_[static_cast<std::size_t>(page)];
  if (n <= 0) fail(ErrorCode::internal, str("page ", page, " is released once too often"));
  if (--n == 0) free_.push_back(page);
}

}  // namespace imp
