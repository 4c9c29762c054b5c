// Pools of pages and rows on a backend's memory.
#include "cpp/memory/sequence_memory.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace imp {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

std::int64_t kv_width(const HParams& h) { return h.attention.kv_heads * h.attention.head_dim; }
std::int64_t index_floats(const HParams& h) {
  return h.attention.indexer
             ? page_tokens(h) / h.attention.indexer->ratio * h.attention.indexer->key_dim
             : 0;
}
constexpr std::size_t bytes(std::int64_t floats) {
  return static_cast<std::size_t>(floats) * sizeof(float);
}
std::byte* raw(float* p) { return reinterpret_cast<std::byte*>(p); }

}  // namespace

MemoryCost memory_cost(const HParams& h) {
  const StateLayout layout = state_layout(h);
  const std::int64_t page =
      layout.attention_layers * (2 * page_tokens(h) * kv_width(h) + index_floats(h));
  return {static_cast<std::int64_t>(bytes(page)), static_cast<std::int64_t>(bytes(layout.floats))};
}

SequenceMemory::SequenceMemory(Backend& backend, const HParams& h, std::int64_t pages,
                               std::int64_t rows, bool poison, std::int64_t kept)
    : backend_(backend),
      layout_(state_layout(h)),
      poison_(poison),
      kept_(kept),
      kv_floats_(imp::page_tokens(h) * kv_width(h)),
      index_floats_(imp::index_floats(h)),
      pages_(pages),
      rows_(rows) {
  const auto alloc = [&](std::int64_t floats, const char* what) {
    if (floats == 0) return static_cast<float*>(nullptr);
    blocks_.push_back(backend.alloc(bytes(floats), what));
    float* p = reinterpret_cast<float*>(blocks_.back().get());
    if (poison) backend.fill(p, floats, nan);
    return p;
  };
  step_.page_tokens = imp::page_tokens(h);
  step_.state_stride = layout_.floats;
  step_.state = alloc(rows * (1 + kept) * layout_.floats, "sequence state");
  for (std::int64_t l = 0; l < layout_.attention_layers; ++l)
    step_.kv.push_back({alloc(pages * kv_floats_, "key cache"),
                        alloc(pages * kv_floats_, "value cache"),
                        alloc(pages * index_floats_, "index keys")});
}

template <class F>
void SequenceMemory::each_part(std::int32_t page, F f) const {
  for (const KvLayer& kv : step_.kv) {
    f(kv.k + page * kv_floats_, kv_floats_);
    f(kv.v + page * kv_floats_, kv_floats_);
    if (kv.index != nullptr) f(kv.index + page * index_floats_, index_floats_);
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
    for (const std::int32_t p : fresh) fill_page(p, nan);
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
    if (poison_) backend_.fill(step_.state + s.row * step_.state_stride, step_.state_stride, nan);
    rows_.release(s.row);
  }
  s = {};
}

void SequenceMemory::copy_row(std::int64_t to, std::int64_t from) {
  backend_.copy(raw(step_.state + to * step_.state_stride),
                raw(step_.state + from * step_.state_stride), bytes(step_.state_stride));
}

void SequenceMemory::clear_row(std::int64_t row) {
  backend_.fill(step_.state + row * step_.state_stride, step_.state_stride, 0.0f);
}

std::size_t SequenceMemory::saved_bytes(std::int64_t length) const {
  const std::int64_t page = 2 * kv_floats_ + index_floats_;
  return bytes(step_.state_stride + pages_for(length) * std::ssize(step_.kv) * page);
}

void SequenceMemory::save(const SequenceState& s, std::int64_t length, std::byte* out) {
  const auto put = [&](const float* from, std::int64_t floats) {
    backend_.copy(out, reinterpret_cast<const std::byte*>(from), bytes(floats));
    out += bytes(floats);
  };
  put(step_.state + s.row * step_.state_stride, step_.state_stride);
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
  const auto get = [&](float* to, std::int64_t floats) {
    backend_.copy(raw(to), saved, bytes(floats));
    saved += bytes(floats);
  };
  get(step_.state + s->row * step_.state_stride, step_.state_stride);
  for (const std::int32_t page : s->pages) each_part(page, get);
  backend_.sync();
  return s;
}

void SequenceMemory::fill_page(std::int32_t page, float value) {
  each_part(page, [&](float* p, std::int64_t floats) { backend_.fill(p, floats, value); });
}

void SequenceMemory::copy_page(std::int32_t to, std::int32_t from) {
  for (const KvLayer& kv : step_.kv) {
    backend_.copy(raw(kv.k + to * kv_floats_), raw(kv.k + from * kv_floats_), bytes(kv_floats_));
    backend_.copy(raw(kv.v + to * kv_floats_), raw(kv.v + from * kv_floats_), bytes(kv_floats_));
    if (kv.index != nullptr)
      backend_.copy(raw(kv.index + to * index_floats_), raw(kv.index + from * index_floats_),
                    bytes(index_floats_));
  }
}

}  // namespace imp
