// Which slots differ from the checksums, and what a blob's checksum notices.
#include "cpp/memory/expert_check.h"

#include <doctest/doctest.h>

#include "cpp/core/hash.h"
#include "cpp/memory/expert_cache.h"

namespace imp {
namespace {

std::uint64_t hash_of(const std::vector<std::uint64_t>& words) {
  Hash h;
  h.bytes(words.data(), 8 * words.size());
  return h.value();
}

TEST_CASE("any one flipped bit changes the checksum") {
  std::vector<std::uint64_t> blob(48);
  for (std::size_t i = 0; i < blob.size(); ++i) blob[i] = i * 0x9e3779b97f4a7c15u;
  const std::uint64_t whole = hash_of(blob);
  for (std::size_t bit = 0; bit < 64 * blob.size(); ++bit) {
    blob[bit / 64] ^= std::uint64_t{1} << (bit % 64);
    CHECK(hash_of(blob) != whole);
    blob[bit / 64] ^= std::uint64_t{1} << (bit % 64);
  }
  // Word by word, as the device does it.
  Hash h;
  h.word(8 * blob.size());
  for (const std::uint64_t w : blob) h.word(w);
  CHECK(h.value() == whole);
}

TEST_CASE("slots that differ are listed with their expert, empty ones are not compared") {
  const std::vector<std::int32_t> pair_of = {5, -1, 0, 7}, reads = {2, -1, -1, -1, -1, 1, -1, 3};
  const std::vector<std::uint64_t> want = {10, 11, 12, 13, 14, 15, 16, 17};
  ExpertCheck check = check_slots(4, pair_of, std::vector<std::uint64_t>{15, 99, 10, 17}, want,
                                  reads);
  CHECK(check.slots == 3);
  CHECK(check.damaged.empty());
  check = check_slots(4, pair_of, std::vector<std::uint64_t>{1, 99, 10, 2}, want, reads);
  REQUIRE(check.damaged.size() == 2);
  CHECK(describe(check.damaged[0]) ==
        "expert 1 of layer 1 in slot 0 is not what was read from the file");
  CHECK_FALSE(check.damaged[0].used);  // it was read in slot 1
  CHECK(check.damaged[1].slot == 3);
  CHECK(check.damaged[1].used);
  CHECK(describe(DamagedExpert{2, 3}) ==
        "expert 3 of layer 2 in host memory is not what was read from the file");
}

TEST_CASE("places for experts that are not kept") {
  const auto staging = [](const char* policy, std::int64_t slots) {
    return staging_slots({4, 64, slots}, read_policy(policy));
  };
  CHECK(staging("lru", 100) == 0);
  CHECK(staging("pool", 100) == 0);
  CHECK(staging("lrfu", 103) == 25);
  CHECK(staging("lrfu", 256) == 64);
  CHECK(staging("pool-lrfu", 40) == 40);
  CHECK(staging("pool-lrfu", 103) == 64);
}

}  // namespace
}  // namespace imp
