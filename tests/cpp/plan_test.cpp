// The arena: tensors that live at the same time never share bytes, whatever the graph.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "cpp/graph/graph.h"

namespace imp {
namespace {

constexpr std::size_t alignment = 64;
const float values[1] = {};

std::size_t padded(const TensorInfo& t) {
  return (t.bytes() + alignment - 1) / alignment * alignment;
}

// Ops with two inputs at random over the tensors so far; some results are in place, some kept.
Graph random_graph(std::mt19937& rng, int nodes) {
  Graph g;
  std::vector<Tensor> made;
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(rng() % n); };
  const auto rows = [&] { return static_cast<std::int64_t>(rng() % 8 == 0 ? 0 : 1 + rng() % 40); };
  for (int i = 0; i < nodes; ++i) {
    const auto recent = [&] {  // mostly short lifetimes
      const std::size_t back = rng() % 4 == 0 ? made.size() : std::min<std::size_t>(6, made.size());
      return made[made.size() - 1 - pick(back)];
    };
    const auto cols = static_cast<std::int64_t>(1 + rng() % 50);
    if (made.size() < 3 || rng() % 5 == 0) {
      const Tensor t = g.tensor(rows(), cols);
      g.add(Feed{values, t});
      made.push_back(t);
    } else if (rng() % 4 == 0) {
      const Tensor r = recent(), out = g.alias(r);
      g.add(ResidualInject{r, recent(), recent(), out});
      made.push_back(out);
    } else {
      const Tensor y = g.tensor(rows(), cols);
      g.add(SwiGlu{recent(), recent(), y});
      made.push_back(y);
    }
    if (rng() % 20 == 0) g.keep(made.back());
  }
  return g;
}

// Pairs of roots that overlap in time and in bytes.
int collisions(const Graph& g, const Plan& p) {
  const auto& t = g.tensors();
  int found = 0;
  for (std::size_t i = 0; i < t.size(); ++i)
    for (std::size_t j = i + 1; j < t.size(); ++j) {
      if (t[i].base || t[j].base || t[i].writer < 0 || t[j].writer < 0) continue;
      const bool at_once = t[i].writer <= t[j].last && t[j].writer <= t[i].last;
      const bool shared =
          p.offsets[i] < p.offsets[j] + t[j].bytes() && p.offsets[j] < p.offsets[i] + t[i].bytes();
      found += at_once && shared && t[i].bytes() > 0 && t[j].bytes() > 0;
    }
  return found;
}

}  // namespace

TEST_CASE("random graphs") {
  std::mt19937 rng(1);
  for (int round = 0; round < 200; ++round) {
    const Graph g = random_graph(rng, 1 + static_cast<int>(rng() % 120));
    const Plan p = plan(g);
    CHECK(collisions(g, p) == 0);
    std::size_t sum = 0;
    for (std::size_t i = 0; i < g.tensors().size(); ++i) {
      const TensorInfo& t = g.tensors()[i];
      if (t.base) {
        CHECK(p.offsets[i] == p.offsets[static_cast<std::size_t>(t.base.id)]);
        continue;
      }
      sum += padded(t);
      CHECK(p.offsets[i] % alignment == 0);
      CHECK(p.offsets[i] + t.bytes() <= p.bytes);
    }
    CHECK(p.bytes <= sum);
    // No plan can do with less than what lives at one node.
    for (std::size_t node = 0; node < g.nodes().size(); ++node) {
      std::size_t alive = 0;
      for (const TensorInfo& t : g.tensors())
        if (!t.base && t.writer >= 0 && t.writer <= static_cast<std::int32_t>(node) &&
            t.last >= static_cast<std::int32_t>(node))
          alive += padded(t);
      CHECK(alive <= p.bytes);
    }
  }
}

TEST_CASE("a chain needs the memory of two links") {
  Graph g;
  Tensor a = g.tensor(16, 16), b = g.tensor(1, 1);
  g.add(Feed{values, b});
  g.add(Feed{values, a});
  for (int i = 0; i < 100; ++i) {
    const Tensor y = g.tensor(16, 16);
    g.add(SwiGlu{a, b, y});
    a = y;
  }
  CHECK(plan(g).bytes == 2 * 1024 + alignment);
}

TEST_CASE("a kept tensor outlives the graph, an in-place result needs no room") {
  Graph g;
  const Tensor a = g.tensor(16, 16), s = g.tensor(1, 1);
  g.add(Feed{values, a});
  g.add(Feed{values, s});
  g.keep(a);
  Tensor r = a;
  for (int i = 0; i < 10; ++i) {
    const Tensor out = g.alias(r);
    g.add(ResidualInject{r, s, s, out});
    r = out;
  }
  CHECK(plan(g).bytes == 1024 + alignment);
  const Tensor y = g.tensor(16, 16);
  g.add(Feed{values, y});
  const Plan p = plan(g);
  CHECK(p.offsets[static_cast<std::size_t>(y.id)] != p.offsets[static_cast<std::size_t>(a.id)]);
}

TEST_CASE("an empty graph and tensors that nobody writes take nothing") {
  Graph g;
  CHECK(plan(g).bytes == 0);
  g.tensor(5, 5);
  CHECK(plan(g).bytes == 0);
  CHECK(plan(g).offsets.size() == 1);
}

}  // namespace imp
