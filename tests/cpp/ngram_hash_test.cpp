// Rows of the n-gram table: published values, the cut rules, and pieces of a sequence.
#include "cpp/model/ngram_hash.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

namespace imp {
namespace {

constexpr std::int32_t boundary = 248044;

Ngram released() {
  Ngram n;
  n.size = 3;
  n.heads_per_ngram = 8;
  n.boundary_token = boundary;
  NgramLayer l;
  l.multipliers = {23703573157769, 20109073645365, 8052911324071};
  std::uint64_t offset = 0;
  for (const std::uint64_t tail :
       {3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171}) {
    l.vocab_sizes.push_back(20000000 + tail);
    l.offsets.push_back(offset);
    offset += 20000000 + tail;
  }
  n.layers.push_back(l);
  return n;
}

std::vector<std::int32_t> rows(const Ngram& n, const std::vector<std::int32_t>& history,
                               std::size_t first = 0) {
  std::vector<std::int32_t> out((history.size() - first) * static_cast<std::size_t>(n.heads()), -1);
  ngram_rows(n, n.layers[0], history, first, out.data());
  return out;
}

}  // namespace

TEST_CASE("published rows of the released model") {
  const auto got = rows(released(), {1, 2, boundary, 5, 6});
  const std::int32_t head0[] = {16121432, 15220011, 2993698, 15389869, 15567690};
  const std::int32_t head8[] = {176283436, 170367010, 165238550, 179763390, 164414634};
  for (std::size_t t = 0; t < 5; ++t) {
    CHECK(got[t * 16] == head0[t]);
    CHECK(got[t * 16 + 8] == head8[t]);
  }
}

TEST_CASE("a boundary cuts all that lies before it, but not its own window") {
  const Ngram n = released();
  const auto last = [&](std::vector<std::int32_t> history) {
    const auto all = rows(n, history);
    return std::vector<std::int32_t>(all.end() - 16, all.end());
  };
  CHECK(last({7, boundary, 5}) == last({8, boundary, 5}));  // behind the boundary: unseen
  CHECK(last({boundary, 4, 5}) == last({4, 5}));            // as at the start
  CHECK(last({boundary, 5}) == last({5}));
  CHECK(last({7, 8, boundary}) != last({7, 9, boundary}));  // its own window is whole
  CHECK(last({6, 8, boundary}) != last({7, 8, boundary}));
  CHECK(last({7, 4, 5}) != last({4, 5}));
}

TEST_CASE("only the tokens of the window count, and pieces equal the whole") {
  const Ngram n = released();
  std::mt19937 rng(1);
  std::vector<std::int32_t> history;
  for (int i = 0; i < 200; ++i)
    history.push_back(rng() % 5 == 0 ? boundary : static_cast<std::int32_t>(rng() % 248320));
  const auto whole = rows(n, history);
  for (std::size_t first = 0; first <= history.size(); ++first) {
    const auto part = rows(n, history, first);
    CHECK(std::equal(part.begin(), part.end(),
                     whole.begin() + static_cast<std::ptrdiff_t>(first * 16)));
  }
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const auto h = i % 16;
    CHECK(whole[i] >= static_cast<std::int64_t>(n.layers[0].offsets[h]));
    CHECK(whole[i] <
          static_cast<std::int64_t>(n.layers[0].offsets[h] + n.layers[0].vocab_sizes[h]));
  }
  std::vector<std::int32_t> other(history.begin() + 100, history.end());
  const auto tail = rows(n, other, 2);
  CHECK(std::equal(tail.begin(), tail.end(), whole.begin() + 102 * 16));
}

TEST_CASE("products wrap at 64 bits, rows reach 2^31 - 1") {
  Ngram n;
  n.size = 2;
  n.heads_per_ngram = 1;
  n.boundary_token = 0;
  n.layers.push_back({0, {0xffffffffffffffff, 1}, {0x7fffffff}, {0}});
  const std::uint64_t mix = std::uint64_t{0} - 12345;
  CHECK(rows(n, {12345})[0] == static_cast<std::int32_t>(mix % 0x7fffffff));
  n.layers[0] = {0, {1, 0}, {1}, {0x7ffffffe}};
  CHECK(rows(n, {5})[0] == 0x7ffffffe);
}

}  // namespace imp
