// Rules of a graph, and lifetimes.
#include "cpp/graph/graph.h"

#include <doctest/doctest.h>

#include <limits>

#include "tests/cpp/errors.h"

namespace imp {
namespace {

const float values[64] = {};

Tensor feed(Graph& g, std::int64_t rows = 2, std::int64_t cols = 4) {
  const Tensor t = g.tensor(rows, cols);
  g.add(Feed{values, t});
  return t;
}

SwiGlu swiglu(Graph& g, Tensor a, Tensor b) { return {a, b, g.tensor(2, 4)}; }

}  // namespace

TEST_CASE("a tensor is written before it is read, and once") {
  Graph g;
  const Tensor a = feed(g), late = g.tensor(2, 4);
  test::refused([&] { g.add(swiglu(g, a, late)); }, ErrorCode::internal,
                {str("tensor ", late.id), "read before it is written"});
  test::refused(
      [&] {
        g.add(Feed{values, a});
      },
      ErrorCode::internal, {str("tensor ", a.id), "written twice"});
  CHECK(g.nodes().size() == 1);
}

TEST_CASE("shapes and handles are checked") {
  Graph g;
  test::refused([&] { g.tensor(-1, 3); }, ErrorCode::internal, {"[-1, 3]"});
  test::refused([&] { g.tensor(1, 0); }, ErrorCode::internal, {"[1, 0]"});
  const Tensor none = g.tensor(0, 3);  // a step may have no output rows
  CHECK(g.info(none).bytes() == 0);
  test::refused([&] { g.info(Tensor{}); }, ErrorCode::internal, {"-1", "1"});
  test::refused([&] { g.info(Tensor{1}); }, ErrorCode::internal, {"tensor 1", "with 1"});
  CHECK_FALSE(Tensor{});
}

TEST_CASE("lifetimes run from the writer to the last reader") {
  Graph g;
  const Tensor a = feed(g), b = feed(g);
  const SwiGlu first = swiglu(g, a, b), second = swiglu(g, first.y, b);
  g.add(first);
  g.add(second);
  CHECK(g.info(a).writer == 0);
  CHECK(g.info(a).last == 2);
  CHECK(g.info(b).last == 3);
  CHECK(g.info(first.y).writer == 2);
  CHECK(g.info(first.y).last == 3);
  CHECK(g.info(second.y).last == 3);
  g.keep(a);
  CHECK(g.info(a).last == std::numeric_limits<std::int32_t>::max());
}

TEST_CASE("an alias keeps its base alive, aliases of aliases too") {
  Graph g;
  const Tensor r = feed(g), y = feed(g), s = feed(g, 2, 1);
  g.name(r, "stream");
  const Tensor r1 = g.alias(r);
  g.add(ResidualInject{r, y, s, r1});
  const Tensor r2 = g.alias(r1);
  g.add(ResidualInject{r1, y, s, r2});
  CHECK(g.root(r2) == r);
  CHECK(g.info(r2).name.empty());
  CHECK(g.info(r2).rows == 2);
  CHECK(g.info(r).last == 4);
  const SwiGlu reader = swiglu(g, r2, y);
  g.add(reader);
  CHECK(g.info(r).last == 5);
  test::refused([&] { g.add(ResidualInject{r1, y, s, r2}); }, ErrorCode::internal, {"twice"});
  const Tensor r3 = g.alias(r2);
  test::refused([&] { g.add(swiglu(g, r3, y)); }, ErrorCode::internal, {"before it is written"});
  g.keep(r2);
  CHECK(g.info(r).last == std::numeric_limits<std::int32_t>::max());
}

TEST_CASE("the printout names ops, tensors, shapes and places") {
  Graph g;
  const Tensor a = feed(g), b = feed(g);
  g.name(a, "gate");
  g.add(swiglu(g, a, b));
  const std::string text = print(g, plan(g));
  CHECK(text.find("SwiGlu <-0:gate[2,4]@0 <-1[2,4]@64 ->2[2,4]@128") != std::string::npos);
}

}  // namespace imp
