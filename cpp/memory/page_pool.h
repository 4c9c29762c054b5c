// Page ids with reference counts. Pure bookkeeping: it does not know what a page holds.
#pragma once

#include <cstdint>
#include <expected>
#include <vector>

#include "cpp/core/error.h"

namespace imp {

class PagePool {
 public:
  explicit PagePool(std::int64_t pages);

  std::int64_t size() const { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int32_t references(std::int32_t page) const {
    return references_[static_cast<std::size_t>(page)];
  }

  // Appends `n` pages with one reference each, all or none.
  std::expected<void, Shortage> take(std::int64_t n, std::vector<std::int32_t>& pages);
  void retain(std::int32_t page) { ++references_[static_cast<std::size_t>(page)]; }
  void release(std::int32_t page);

 private:
  std::vector<std::int32_t> free_;  // lowest ids are taken first
  std::vector<std::int32_t> references_;
};

}  // namespace imp
