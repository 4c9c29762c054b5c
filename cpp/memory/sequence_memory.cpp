// Pools of pages and rows on a backend's memory.
#include "cpp/memory/sequence_memory.h"

#include <algorithm>

#include "cpp/memory/cache_types.h"

namespace imp {
namespace {

// NaN as fp32, fp16 and bf16, and as the scale of a Q8_0 block.
constexpr std::byte poison_byte{0xff};

std::size_t bytes(std::int64_t floats) { return static_cast<std::size_t>(floats) * sizeof(float); }
std::size_t kv_bytes(const HParams& h, DType type) {
  return static_cast<std::size_t>(page_tokens(h)) *
         row_bytes(type, h.attention.kv_heads * h.attention.head_dim);
}
std::size_t index_bytes(const HParams& h) {
  return h.attention.indexer
             ? bytes(page_tokens(h) / h.attention.indexer->ratio * h.attention.indexer->key_dim)
             : 0;
}
template <class T>
std::byte* raw(T* p) {
  return reinterpret_cast<std::byte*>(p);
}

}  // namespace

MemoryCost memory_cost(const HParams& h, CacheTypes types) {
  check_cache_types(types, h);
  const StateLayout layout = state_layout(h);
  const std::size_t page = kv_bytes(h, types.k) + kv_bytes(h, types.v) + index_bytes(h);
  return {layout.attention_layers * static_cast<std::int64_t>(page),
          static_cast<std::int64_t>(bytes(layout.floats))};
}

SequenceMemory::SequenceMemory(Backend& backend, const HParams& h, CacheTypes types,
                               std::int64_t pages, std::int64_t rows, bool poison,
                               std::int64_t kept)
    : backend_(backend),
      layout_(state_layout(h)),
      poison_(poison),
      kept_(kept),
      k_bytes_(kv_bytes(h, types.k)),
      v_bytes_(kv_bytes(h, types.v)),
      index_bytes_(index_bytes(h)),
      pages_(pages),
      rows_(rows) {
  check_cache_types(types, h);
  const auto alloc = [&](std::int64_t count, std::size_t each, const char* what) {
    const std::size_t size = static_cast<std::size_t>(count) * each;
    if (size == 0) return static_cast<std::byte*>(nullptr);
    blocks_.push_back(backend.alloc(size, what));
    if (poison) backend.fill(blocks_.back().get(), size, poison_byte);
    return blocks_.back().get();
  };
  step_.page_tokens = imp::page_tokens(h);
  step_.types = types;
  step_.state_stride = layout_.floats;
  step_.state =
      reinterpret_cast<float*>(alloc(rows * (1 + kept), bytes(layout_.floats), "sequence state"));
  for (std::int64_t l = 0; l < layout_.attention_layers; ++l)
    step_.kv.push_back({alloc(pages, k_bytes_, "key cache"), alloc(pages, v_bytes_, "value cache"),
                        reinterpret_cast<float*>(alloc(pages, index_bytes_, "index keys"))});
}

template <class F>
void SequenceMemory::each_part(std::int32_t page, F f) const {
  const auto p = static_cast<std::size_t>(page);
  for (const KvLayer& kv : step_.kv) {
    f(kv.k + p * k_bytes_, k_bytes_);
    f(kv.v + p * v_bytes_, v_bytes_);
    if (kv.index != nullptr) f(raw(kv.index) + p * index_bytes_, index_bytes_);
  }
}

std::expected<SequenceState, Shortage> SequenceMemory::open() {
  std::vector<std::int32_t> row;
  if (auto r = rows_.take(1, row); !r)
    return std::unexpected(Shortage{"sequences", r.error().needed, r.error().available});
  clear_row(row[0]);
  return SequenceState{{}, row[0]};
}

std::expected<SequenceState, Shortage> SequenceMemory::fork(const SequenceState& from) {
  auto copy = open();
  if (!copy) return copy;
  copy_row(copy->row, from.row);
  copy->pages = from.pages;
  for (const std::int32_t p : copy->pages) pages_.retain(p);
  return copy;
}

std::expected<void, Shortage> SequenceMemory::reserve(SequenceState& s, std::int64_t length,
                                                      std::int64_t end) {
  const std::int64_t last = pages_for(end);
  const std::int64_t missing = std::max<std::int64_t>(0, last - std::ssize(s.pages));
  std::vector<std::int32_t*> shared;  // pages of [length, end) that a fork also holds
  for (std::int64_t i = length / page_tokens(); i < std::min(last, std::ssize(s.pages)); ++i)
    if (std::int32_t& page = s.pages[static_cast<std::size_t>(i)]; pages_.references(page) > 1)
      shared.push_back(&page);
  std::vector<std::int32_t> fresh;
  if (auto r = pages_.take(missing + std::ssize(shared), fresh); !r) return r;
  if (poison_)
    for (const std::int32_t p : fresh) poison_page(p);
  for (std::int32_t* page : shared) {
    copy_page(fresh.back(), *page);
    pages_.release(*page);
    *page = fresh.back();
    fresh.pop_back();
  }
  s.pages.insert(s.pages.end(), fresh.begin(), fresh.end());
  return {};
}

void SequenceMemory::drop_pages(SequenceState& s, std::int64_t length) {
  while (std::ssize(s.pages) > pages_for(length)) {
    pages_.release(s.pages.back());
    s.pages.pop_back();
  }
}

void SequenceMemory::close(SequenceState& s) {
  for (const std::int32_t p : s.pages) pages_.release(p);
  if (s.row >= 0) {
    if (poison_)
      backend_.fill(raw(step_.state + s.row * step_.state_stride), bytes(step_.state_stride),
                    poison_byte);
    rows_.release(s.row);
  }
  s = {};
}

void SequenceMemory::copy_row(std::int64_t to, std::int64_t from) {
  backend_.copy(raw(step_.state + to * step_.state_stride),
                raw(step_.state + from * step_.state_stride), bytes(step_.state_stride));
}

void SequenceMemory::clear_row(std::int64_t row) {
  backend_.fill(raw(step_.state + row * step_.state_stride), bytes(step_.state_stride),
                std::byte{0});
}

std::size_t SequenceMemory::saved_bytes(std::int64_t length) const {
  const std::size_t page = step_.kv.size() * (k_bytes_ + v_bytes_ + index_bytes_);
  return bytes(step_.state_stride) + static_cast<std::size_t>(pages_for(length)) * page;
}

void SequenceMemory::save(const SequenceState& s, std::int64_t length, std::byte* out) {
  const auto put = [&](const std::byte* from, std::size_t size) {
    backend_.copy(out, from, size);
    out += size;
  };
  put(raw(step_.state + s.row * step_.state_stride), bytes(step_.state_stride));
  for (std::int64_t i = 0; i < pages_for(length); ++i)
    each_part(s.pages[static_cast<std::size_t>(i)], put);
  backend_.sync();
}

std::expected<SequenceState, Shortage> SequenceMemory::load(std::int64_t length,
                                                            const std::byte* saved) {
  auto s = open();
  if (!s) return s;
  if (auto room = reserve(*s, 0, length); !room) {
    close(*s);
    return std::unexpected(room.error());
  }
  const auto get = [&](std::byte* to, std::size_t size) {
    backend_.copy(to, saved, size);
    saved += size;
  };
  get(raw(step_.state + s->row * step_.state_stride), bytes(step_.state_stride));
  for (const std::int32_t page : s->pages) each_part(page, get);
  backend_.sync();
  return s;
}

void SequenceMemory::poison_page(std::int32_t page) {
  each_part(page, [&](std::byte* p, std::size_t size) { backend_.fill(p, size, poison_byte); });
}

void SequenceMemory::copy_page(std::int32_t to, std::int32_t from) {
  std::vector<const std::byte*> sources;
  each_part(from, [&](const std::byte* p, std::size_t) { sources.push_back(p); });
  auto source = sources.begin();
  each_part(to, [&](std::byte* p, std::size_t size) { backend_.copy(p, *source++, size); });
}

}  // namespace imp
