// What sequences own: pages and rows through open, reserve, fork and close.
#include "cpp/memory/sequence_memory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cpp/core/error.h"
#include "cpp/memory/cache_types.h"
#include "cpp/runtime/backend.h"
#include "tests/cpp/tiny_model.h"

namespace imp {
namespace {

struct Memory {
  explicit Memory(std::int64_t pages, std::int64_t rows, bool poison = true)
      : backend(make_cpu_backend({1, "generic"})),
        h(test::tiny_header().read()),
        m(*backend, h, {}, pages, rows, poison),
        page(m.page_tokens()) {}
  std::shared_ptr<Backend> backend;
  HParams h;
  SequenceMemory m;
  std::int64_t page;  // tokens

  static float* floats(std::byte* p) { return reinterpret_cast<float*>(p); }
  std::int64_t kv_floats() const { return page * h.attention.kv_heads * h.attention.head_dim; }
  float* keys(std::int32_t p) const { return floats(m.step().kv[0].k) + p * kv_floats(); }
  float* values(std::int32_t p) const { return floats(m.step().kv[0].v) + p * kv_floats(); }
  float* index(std::int32_t p) const {
    return m.step().kv[0].index +
           p * page / h.attention.indexer->ratio * h.attention.indexer->key_dim;
  }
  float* row(std::int32_t r) const { return m.step().state + r * m.step().state_stride; }
  void fill(std::int32_t p, float v) const {
    std::fill_n(keys(p), kv_floats(), v);
    std::fill_n(values(p), kv_floats(), v + 1);
    *index(p) = v + 2;
  }
};

}  // namespace

TEST_CASE("a state row holds what the layers need, 64-byte aligned") {
  const StateLayout s = state_layout(test::tiny_header().read());
  CHECK(s.attention_layers == 1);
  CHECK(s.cache == std::vector<std::int64_t>{-1, -1, -1, 0});
  CHECK(s.delta[3] == -1);
  CHECK(s.index[0] == -1);
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;  // offset, floats
  for (const int l : {0, 1, 2}) {
    parts.push_back({s.delta[static_cast<std::size_t>(l)], 2 * 8 * 8});
    parts.push_back({s.conv[static_cast<std::size_t>(l)], 3 * 32});
  }
  parts.push_back({s.index[3], 4 * 8});
  parts.push_back({s.ngram[0], 9 * 32});
  std::ranges::sort(parts);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].first % 16 == 0);
    const std::int64_t next = i + 1 < parts.size() ? parts[i + 1].first : s.floats;
    CHECK(parts[i].first + parts[i].second <= next);
  }
  CHECK(page_tokens(test::tiny_header().read()) == 16);
  const auto ratio = [](std::int64_t r) {
    return page_tokens(test::tiny_header()
                           .numbers("attention.compress_ratios", {0, 0, 0, r})
                           .number("attention.indexer.top_k", 10 * r)
                           .read());
  };
  CHECK(ratio(16) == 16);
  CHECK(ratio(17) == 17);
  CHECK(ratio(5) == 20);
}

TEST_CASE("a new sequence has a zero row and no pages") {
  Memory x(4, 2);
  auto s = x.m.open();
  REQUIRE(s);
  CHECK(s->pages.empty());
  for (std::int64_t i = 0; i < x.m.step().state_stride; ++i) CHECK(x.row(s->row)[i] == 0.0f);
  x.row(s->row)[3] = 5;
  const std::int32_t row = s->row;
  x.m.close(*s);
  CHECK(s->row == -1);
  CHECK(std::isnan(x.row(row)[3]));  // poisoned
  s = x.m.open();
  REQUIRE(s);
  CHECK(x.row(s->row)[3] == 0.0f);
}

TEST_CASE("as many sequences as rows, then a shortage with both numbers") {
  Memory x(4, 2);
  auto a = x.m.open(), b = x.m.open(), c = x.m.open();
  REQUIRE(a);
  REQUIRE(b);
  REQUIRE_FALSE(c);
  CHECK(c.error().message() == "sequences: 1 needed, 0 available");
  CHECK_FALSE(x.m.fork(*a));
  x.m.close(*b);
  CHECK(x.m.fork(*a));
}

TEST_CASE("pages are taken at page edges") {
  Memory x(3, 1);
  auto s = x.m.open();
  REQUIRE(x.m.reserve(*s, 0, 1));
  CHECK(s->pages.size() == 1);
  REQUIRE(x.m.reserve(*s, 1, x.page));
  CHECK(s->pages.size() == 1);
  REQUIRE(x.m.reserve(*s, x.page, x.page + 1));
  CHECK(s->pages.size() == 2);
  const auto r = x.m.reserve(*s, x.page + 1, 5 * x.page);
  REQUIRE_FALSE(r);
  CHECK(r.error().needed == 3);
  CHECK(r.error().available == 1);
  CHECK(s->pages.size() == 2);
  CHECK(x.m.page_pool().free() == 1);
  for (const std::int32_t p : s->pages) CHECK(std::isnan(x.keys(p)[0]));  // fresh: poisoned
}

TEST_CASE("a fork shares pages until one of the two writes") {
  Memory x(8, 3);
  auto a = x.m.open();
  const std::int64_t length = x.page + 5;
  REQUIRE(x.m.reserve(*a, 0, length));
  x.fill(a->pages[0], 10);
  x.fill(a->pages[1], 20);
  x.row(a->row)[7] = 3;
  auto b = x.m.fork(*a);
  REQUIRE(b);
  CHECK(b->pages == a->pages);
  CHECK(b->row != a->row);
  CHECK(x.row(b->row)[7] == 3);
  CHECK(x.m.page_pool().free() == 6);

  REQUIRE(x.m.reserve(*b, length, length + 1));  // b gets its own copy of the partial page
  CHECK(b->pages[0] == a->pages[0]);
  CHECK(b->pages[1] != a->pages[1]);
  CHECK(x.keys(b->pages[1])[0] == 20);
  CHECK(x.values(b->pages[1])[1] == 21);
  CHECK(*x.index(b->pages[1]) == 22);
  CHECK(x.m.page_pool().references(a->pages[1]) == 1);
  const auto before = a->pages;
  REQUIRE(x.m.reserve(*a, length, length + 1));  // a has its page to itself again
  CHECK(a->pages == before);
  CHECK(x.m.page_pool().free() == 5);
  x.m.close(*a);
  CHECK(x.m.page_pool().references(b->pages[0]) == 1);
  CHECK(x.keys(b->pages[0])[0] == 10);
  x.m.close(*b);
  CHECK(x.m.page_pool().free() == 8);
  CHECK(x.m.row_pool().free() == 3);
}

TEST_CASE("at a page edge a fork copies nothing") {
  Memory x(4, 2);
  auto a = x.m.open();
  REQUIRE(x.m.reserve(*a, 0, x.page));
  auto b = x.m.fork(*a);
  REQUIRE(x.m.reserve(*b, x.page, x.page + 1));
  REQUIRE(x.m.reserve(*a, x.page, x.page + 1));
  CHECK(a->pages[0] == b->pages[0]);
  CHECK(a->pages[1] != b->pages[1]);
  CHECK(x.m.page_pool().free() == 1);
}

TEST_CASE("pages that were reserved but not yet written are not shared for writing") {
  Memory x(6, 2);
  for (const std::int64_t length : {x.page, x.page + 3}) {
    auto a = x.m.open();
    REQUIRE(x.m.reserve(*a, 0, length));
    REQUIRE(x.m.reserve(*a, length, 2 * x.page + 1));  // a step that then did not happen
    auto b = x.m.fork(*a);
    REQUIRE(x.m.reserve(*a, length, 2 * x.page + 1));
    REQUIRE(x.m.reserve(*b, length, 2 * x.page + 1));
    CHECK(a->pages[0] == b->pages[0]);
    CHECK(a->pages[1] != b->pages[1]);
    CHECK(a->pages[2] != b->pages[2]);
    x.m.close(*a);
    x.m.close(*b);
    CHECK(x.m.page_pool().free() == 6);
  }
}

TEST_CASE("a copy that finds no page changes nothing") {
  Memory x(2, 2);
  auto a = x.m.open();
  REQUIRE(x.m.reserve(*a, 0, x.page + 1));
  auto b = x.m.fork(*a);
  const auto before = b->pages;
  const auto r = x.m.reserve(*b, x.page + 1, x.page + 2);
  REQUIRE_FALSE(r);
  CHECK(r.error().needed == 1);
  CHECK(r.error().available == 0);
  CHECK(b->pages == before);
  CHECK(x.m.page_pool().references(before[1]) == 2);
}

TEST_CASE("whatever happens, everything comes back to the pools, and nobody writes to another") {
  std::mt19937 rng(1);
  for (const bool poison : {false, true}) {
    Memory x(20, 6, poison);
    struct Live {
      SequenceState s;
      std::vector<float> written;  // what this sequence stored for each of its tokens
    };
    std::vector<Live> live;
    float next = 1;
    const auto at = [&](const Live& l, std::size_t t) -> float& {
      const auto page = static_cast<std::size_t>(x.page);
      return x.keys(l.s.pages[t / page])[static_cast<std::int64_t>(t % page)];
    };
    for (int round = 0; round < 3000; ++round) {
      const std::size_t i = live.empty() ? 0 : rng() % live.size();
      const auto action = rng() % 8;
      if (live.empty() || action == 0) {
        if (auto s = x.m.open()) live.push_back({std::move(*s), {}});
      } else if (action == 1) {
        if (auto s = x.m.fork(live[i].s)) live.push_back({std::move(*s), live[i].written});
      } else if (action == 2) {
        x.m.close(live[i].s);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        Live& l = live[i];
        const std::int64_t length = std::ssize(l.written), more = 1 + rng() % 20;
        if (!x.m.reserve(l.s, length, length + more)) continue;
        if (rng() % 10 == 0) continue;  // a step that then failed
        for (std::int64_t t = 0; t < more; ++t) {
          l.written.push_back(next);
          at(l, l.written.size() - 1) = next++;
        }
      }
      for (const Live& l : live)
        for (std::size_t t = 0; t < l.written.size(); ++t)
          if (at(l, t) != l.written[t]) FAIL("token " << t << " was overwritten");
    }
    for (Live& l : live) x.m.close(l.s);
    CHECK(x.m.page_pool().free() == 20);
    CHECK(x.m.row_pool().free() == 6);
  }
}

TEST_CASE("costs are those of the pools") {
  const HParams h = test::tiny_header().read();
  const MemoryCost cost = memory_cost(h, {});
  CHECK(cost.page_bytes == (2 * 16 * 8 + 16 / 4 * 8) * 4);
  CHECK(cost.row_bytes == state_layout(h).floats * 4);
  CHECK(cost.pages(0, 16) == 0);
  CHECK(cost.pages(16, 16) == 1);
  CHECK(cost.pages(17, 16) == 2);
}

namespace {

HParams wide_header() {
  HParams h = test::tiny_header().read();
  h.attention.head_dim = 32;
  return h;
}

constexpr CacheTypes mixed[] = {
    {DType::f16, DType::q8_0}, {DType::q8_0, DType::bf16}, {DType::f32, DType::f16}};

}  // namespace

TEST_CASE("stored types cost what they take") {
  const HParams h = wide_header();
  const std::int64_t index = 16 / 4 * 8 * 4, values = 16 * h.attention.kv_heads * 32;
  CHECK(memory_cost(h, {DType::f16, DType::bf16}).page_bytes == index + values * 4);
  CHECK(memory_cost(h, {DType::q8_0, DType::f32}).page_bytes ==
        index + values / 32 * 34 + values * 4);
  CHECK(memory_cost(h, {DType::q8_0, DType::q8_0}).row_bytes == memory_cost(h, {}).row_bytes);
}

TEST_CASE("pages of any types are poisoned, copied, saved and loaded whole") {
  const auto backend = make_cpu_backend({1, "generic"});
  const HParams h = wide_header();
  const std::int64_t width = h.attention.kv_heads * h.attention.head_dim;
  for (const CacheTypes types : mixed) {
    SequenceMemory m(*backend, h, types, 6, 3, true);
    const std::size_t k_row = row_bytes(types.k, width), v_row = row_bytes(types.v, width);
    const auto key = [&](std::int32_t page, std::int64_t t) {
      return m.step().kv[0].k + static_cast<std::size_t>(page * m.page_tokens() + t) * k_row;
    };
    const auto value = [&](std::int32_t page, std::int64_t t) {
      return m.step().kv[0].v + static_cast<std::size_t>(page * m.page_tokens() + t) * v_row;
    };
    auto s = m.open();
    const std::int64_t length = m.page_tokens() + 3;
    REQUIRE(m.reserve(*s, 0, length));
    std::vector<float> x(static_cast<std::size_t>(width));
    for (const std::int32_t page : s->pages)
      for (std::int64_t t = 0; t < m.page_tokens(); ++t) {  // nothing there is a number
        decode_row(types.k, key(page, t), width, x.data());
        CHECK(std::ranges::all_of(x, [](float f) { return std::isnan(f); }));
        decode_row(types.v, value(page, t), width, x.data());
        CHECK(std::ranges::all_of(x, [](float f) { return std::isnan(f); }));
        std::fill_n(key(page, t), k_row, std::byte(page + t));
        std::fill_n(value(page, t), v_row, std::byte(page + t + 1));
      }
    auto fork = m.fork(*s);
    REQUIRE(m.reserve(*fork, length, length + 1));
    REQUIRE(fork->pages[1] != s->pages[1]);
    CHECK(
        std::equal(key(s->pages[1], 0), key(s->pages[1], m.page_tokens()), key(fork->pages[1], 0)));
    CHECK(std::equal(value(s->pages[1], 0), value(s->pages[1], m.page_tokens()),
                     value(fork->pages[1], 0)));
    m.close(*fork);

    std::vector<std::byte> saved(m.saved_bytes(length));
    CHECK(std::ssize(saved) == m.layout().floats * 4 + 2 * memory_cost(h, types).page_bytes);
    m.save(*s, length, saved.data());
    auto back = m.load(length, saved.data());
    REQUIRE(back);
    for (const std::size_t i : {0u, 1u}) {
      const std::int32_t a = s->pages[i], b = back->pages[i];
      CHECK(std::equal(key(a, 0), key(a, m.page_tokens()), key(b, 0)));
      CHECK(std::equal(value(a, 0), value(a, m.page_tokens()), value(b, 0)));
    }
  }
}

TEST_CASE("types that heads or backends cannot have are refused") {
  const HParams h = test::tiny_header().read();  // heads of 8
  CHECK_THROWS_WITH_AS(memory_cost(h, {DType::f32, DType::q8_0}),
                       "cache type q8_0 needs heads of a multiple of 32 dimensions, the model's "
                       "have 8",
                       Error);
  HParams odd = wide_header();
  for (const std::int64_t dim : {31, 33}) {
    odd.attention.head_dim = dim;
    CHECK_THROWS_AS(memory_cost(odd, {DType::q8_0, DType::f32}), Error);
  }
  CHECK_THROWS_WITH_AS(
      check_cache_types({DType::f32, DType::q8_0}, BackendInfo{"cuda", "", {DType::f32}}),
      "cuda: cache type q8_0 is not supported, only f32", Error);
  CHECK_THROWS_WITH_AS(cache_type("q4_0"),
                       "cache type q4_0 is not supported, only f32, f16, bf16 and q8_0", Error);
  CHECK(cache_type("q8_0") == DType::q8_0);
}

}  // namespace imp
