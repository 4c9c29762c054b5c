// Expert policies against a direct model of each, and planted routing against its curve.
#include "cpp/memory/expert_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <random>
#include <set>

#include "cpp/runtime/expert_sim.h"
#include "cpp/runtime/planted_routing.h"
#include "tests/cpp/errors.h"

namespace imp {
namespace {

using test::refused;
using Ids = std::vector<std::int32_t>;

Ids draw(std::mt19937& random, int experts, int k) {
  std::set<std::int32_t> ids;
  while (static_cast<int>(ids.size()) < k)  // skewed, so that there is something to learn
    ids.insert(static_cast<std::int32_t>(
        static_cast<double>(experts) *
        std::pow(std::uniform_real_distribution<double>(0, 1)(random), 2)));
  return {ids.begin(), ids.end()};
}

}  // namespace

TEST_CASE("lru equals a list that moves used experts to the front") {
  constexpr int layers = 3, experts = 300, k = 7, slots = 3 * 40 + 2;
  ExpertCache cache({layers, experts, slots}, read_policy("lru"));
  std::vector<std::list<std::int32_t>> recent(layers);
  std::mt19937 random(3);
  for (std::uint64_t step = 1; step <= 500; ++step)
    for (int l = 0; l < layers; ++l) {
      const auto room = static_cast<std::size_t>(l < 2 ? 41 : 40);  // the remainder goes first
      CHECK(cache.slots_of(l).last - cache.slots_of(l).first == static_cast<std::int64_t>(room));
      const Ids ids = draw(random, experts, k);
      std::set<std::int32_t> cached(recent[l].begin(), recent[l].end()), missed;
      for (const auto& m : cache.resolve(l, ids, step).misses) missed.insert(m.expert);
      for (const std::int32_t e : ids) {
        CHECK(missed.contains(e) != cached.contains(e));
        recent[l].remove(e);
      }
      // Equals leave in the order of their slots, so the model orders them so too.
      Ids used = ids;
      std::ranges::sort(used, std::greater<>{},
                        [&](std::int32_t e) { return cache.slot_of(l, e); });
      recent[l].insert(recent[l].begin(), used.begin(), used.end());
      while (recent[l].size() > room) recent[l].pop_back();
    }
}

TEST_CASE("tables stay consistent and victims are never routed, for every policy") {
  constexpr int layers = 4, experts = 520, k = 10;
  for (const char* name : {"lru", "pool", "lrfu:8", "lrfu", "pool-lrfu:1000"}) {
    CAPTURE(name);
    const ExpertPolicy policy = read_policy(name);
    ExpertCache cache({layers, experts, 4 * 25}, policy);
    std::mt19937 random(5);
    for (std::uint64_t step = 1; step <= 400; ++step)
      for (int l = 0; l < layers; ++l) {
        const Ids ids = draw(random, experts, k);
        const auto& r = cache.resolve(l, ids, step);
        REQUIRE(r.hits.size() + r.misses.size() == ids.size());
        for (const auto& m : r.misses) {
          REQUIRE((m.slot >= 0 || policy.admission));
          if (m.victim >= 0)
            REQUIRE_FALSE(
                (m.victim / experts == l && std::ranges::binary_search(ids, m.victim % experts)));
        }
        for (std::int64_t s = 0; s < 100; ++s) {
          const std::int32_t pair = cache.pair_of(s);
          if (pair >= 0) REQUIRE(cache.slot_of(pair / experts, pair % experts) == s);
        }
        for (const std::int32_t e : ids) {
          const std::int64_t s = cache.slot_of(l, e);
          if (!policy.admission) REQUIRE(s >= 0);
          if (s >= 0) REQUIRE(cache.pair_of(s) == l * experts + e);
        }
      }
    CHECK(cache.hits() > 0);
    CHECK(cache.hits() < cache.wanted());
  }
}

TEST_CASE("decayed scores follow their formula") {
  const ExpertPolicy p = read_policy("lrfu:16");
  ExpertCache cache({1, 8, 8}, p);
  double sum = 0;
  std::mt19937 random(2);
  for (std::uint64_t step = 1; step < 400; ++step) {
    if (random() % 5 != 0) continue;
    const Ids ids{3};
    cache.resolve(0, ids, step);
    sum += std::exp2(static_cast<double>(step) / 16);
    const double exact = score_unit * (std::log2(sum) + 1);
    CHECK(static_cast<double>(cache.score(0, 3)) == doctest::Approx(exact).epsilon(0.02));
  }
}

TEST_CASE("a cache of everything misses each expert once; the least cache holds one token") {
  for (const char* name : {"lru", "pool", "lrfu"}) {
    ExpertCache all({2, 64, 128}, read_policy(name));
    std::mt19937 random(1);
    std::set<std::pair<int, std::int32_t>> seen;
    std::size_t misses = 0;
    for (std::uint64_t step = 1; step <= 200; ++step)
      for (int l = 0; l < 2; ++l) {
        const Ids ids = draw(random, 64, 5);
        misses += all.resolve(l, ids, step).misses.size();
        for (const std::int32_t e : ids) seen.emplace(l, e);
      }
    CHECK(misses == seen.size());
  }
  ExpertCache least({2, 64, 10}, read_policy("lru"));
  const Ids five{1, 2, 3, 4, 5}, six{1, 2, 3, 4, 5, 6};
  CHECK(least.resolve(1, five, 1).misses.size() == 5);
  refused([&] { least.resolve(1, six, 2); }, ErrorCode::invalid_argument,
          {"layer 1 wants 6 experts at once, it has 5 slots"});
  refused([&] { least.resolve(0, Ids{64}, 2); }, ErrorCode::invalid_argument,
          {"experts 64 to 64 of 64"});
  refused(
      [&] {
        ExpertCache({2, 64, 1}, read_policy("lru"));
      },
      ErrorCode::invalid_argument, {"1 slots for 2 layers of 64 experts"});
  refused(
      [&] {
        ExpertCache({2, 64, 129}, read_policy("pool"));
      },
      ErrorCode::invalid_argument, {"129 slots for 2 layers of 64 experts"});
}

TEST_CASE("admission keeps a cache of often used experts through a scan") {
  const auto hot_hits = [](const char* name) {
    ExpertCache cache({1, 512, 12}, read_policy(name));
    std::int64_t before = 0;
    std::int32_t cold = 100;
    for (std::uint64_t step = 1; step <= 300; ++step) {
      Ids ids;
      if (step % 2 == 0)
        for (int i = 0; i < 8; ++i) ids.push_back(i);
      else
        for (int i = 0; i < 8; ++i) ids.push_back(100 + cold++ % 400);
      if (step == 101) before = cache.hits();
      cache.resolve(0, ids, step);
    }
    return cache.hits() - before;
  };
  CHECK(hot_hits("lrfu:200") == 800);  // every use of the 8 hot experts
  CHECK(hot_hits("lru") < 800);
}

TEST_CASE("policy names") {
  CHECK(read_policy("lrfu:1048576").half_life == max_half_life);
  refused([&] { read_policy("lrfu:1048577"); }, ErrorCode::invalid_argument, {"1 to 1048576"});
  refused([&] { read_policy("lrfu:0"); }, ErrorCode::invalid_argument, {"1 to 1048576"});
  refused([&] { read_policy("lru:3"); }, ErrorCode::invalid_argument, {"half-life '3'"});
  refused([&] { read_policy("fifo"); }, ErrorCode::invalid_argument, {"expert policy 'fifo'"});
}

TEST_CASE("planted routing gives its curve under lru") {
  constexpr std::int64_t layers = 2, experts = 512, k = 10, tokens = 3000;
  PlantedRouting routing(layers, experts, k, read_curve("prose", experts), 1);
  std::vector<std::uint16_t> ids;
  std::vector<std::int32_t> row(k);
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t l = 0; l < layers; ++l) {
      routing.next(l, 1, row.data());
      CHECK(std::set<std::int32_t>(row.begin(), row.end()).size() == k);
      for (const std::int32_t e : row) ids.push_back(static_cast<std::uint16_t>(e));
    }
  const RoutingTrace trace{layers, experts, k, std::vector<std::int32_t>(tokens, 1), ids};
  for (const auto& [slots, share] : std::map<std::int64_t, double>{
           {31, 0.50}, {62, 0.68}, {97, 0.80}, {118, 0.84}, {173, 0.92}, {256, 0.97}}) {
    CAPTURE(slots);
    const SimResult r = simulate(trace, layers * slots, read_policy("lru"), 500);
    // Draws of an expert that the token has already are repeated, which costs the front a little.
    CHECK(static_cast<double>(r.hits) / static_cast<double>(r.wanted) ==
          doctest::Approx(share).epsilon(0.035));
    CHECK(r.layer_hits[0] + r.layer_hits[1] == r.hits);
  }
  CHECK(simulate(trace, layers * 9, read_policy("lru"), 0).uncached == tokens * layers);
  refused([&] { read_curve("poetry", 512); }, ErrorCode::invalid_argument, {"routing 'poetry'"});
  refused([&] { PlantedRouting(1, 4, 5, read_curve("uniform", 4), 1); },
          ErrorCode::invalid_argument, {"5 of 4 experts"});
}

TEST_CASE("uniform routing chooses all experts alike") {
  PlantedRouting routing(1, 64, 4, read_curve("uniform", 64), 9);
  std::vector<std::int64_t> count(64);
  Ids ids(4 * 8);
  for (int step = 0; step < 1000; ++step) {
    routing.next(0, 8, ids.data());
    for (const std::int32_t e : ids) ++count[static_cast<std::size_t>(e)];
  }
  const auto [least, most] = std::ranges::minmax(count);
  CHECK(least > 400);  // of 500
  CHECK(most < 600);
}

}  // namespace imp
