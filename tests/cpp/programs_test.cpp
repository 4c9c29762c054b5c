// Compiled steps: kept by shape, the least recently used dropped; patterns of taps.
#include "cpp/runtime/programs.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "cpp/model/synthetic.h"
#include "tests/cpp/fake_backend.h"
#include "tests/cpp/tiny_model.h"

namespace imp {

TEST_CASE("64 shapes are kept, the one not used for longest goes") {
  const test::TempDir dir;
  const auto model = test::tiny_model(dir);
  const StateLayout layout = state_layout(model->hparams());
  test::FakeBackend backend;
  Programs programs(backend, *model, layout, 256, {});
  for (std::int64_t rows = 1; rows <= 64; ++rows) programs.get({rows, 1});
  CHECK(backend.compiled == 64);
  for (std::int64_t rows = 1; rows <= 64; ++rows) programs.get({rows, 1});
  CHECK(backend.compiled == 64);
  programs.get({1, 1});
  programs.get({64, 2});  // other outputs, another shape; drops {2, 1}
  CHECK(backend.compiled == 65);
  programs.get({1, 1});
  programs.get({3, 1});
  CHECK(backend.compiled == 65);
  programs.get({2, 1});
  CHECK(backend.compiled == 66);
}

TEST_CASE("a program has its results, taps by pattern, and the arena's size") {
  const test::TempDir dir;
  const auto model = test::tiny_model(dir);
  const StateLayout layout = state_layout(model->hparams());
  test::FakeBackend backend;
  const auto names = [&](const std::vector<std::string>& patterns, StepShape shape) {
    Programs programs(backend, *model, layout, 256, patterns);
    std::vector<std::string> out;
    for (const Tap& t : programs.get(shape).taps) out.push_back(t.name);
    return out;
  };
  using Names = std::vector<std::string>;
  CHECK(names({"blk.*.residual"}, {3, 0}) ==
        Names{"blk.0.residual", "blk.1.residual", "blk.2.residual", "blk.3.residual"});
  CHECK(names({"blk.?.ngram_out", "result_norm"}, {3, 1}) ==
        Names{"blk.1.ngram_out", "result_norm"});
  CHECK(names({"result_norm", "logits"}, {3, 0}).empty());  // a step without outputs has neither
  CHECK(names({"nothing"}, {3, 1}).empty());
  Programs programs(backend, *model, layout, 256, {});
  CHECK(programs.get({3, 0}).results.logits == Tensor{});
  const Program& p = programs.get({3, 2});
  REQUIRE(p.results.logits);
  CHECK(p.graph->info(p.results.logits).rows == 2);
  CHECK(p.graph->info(p.results.logits).cols == 32);
  CHECK(p.arena_bytes == plan(*p.graph).bytes);
}

TEST_CASE("a shape that fails to compile leaves the others") {
  const test::TempDir dir;
  const auto model = test::tiny_model(dir);
  const StateLayout layout = state_layout(model->hparams());
  test::FakeBackend backend;
  Programs programs(backend, *model, layout, 256, {});
  programs.get({1, 1});
  backend.fail_compile = true;
  CHECK_THROWS_AS(programs.get({2, 1}), Error);
  programs.get({1, 1});
  backend.fail_compile = false;
  programs.get({2, 1});
  CHECK(backend.compiled == 2);
}

TEST_CASE("patterns") {
  CHECK(matches("", ""));
  CHECK_FALSE(matches("", "a"));
  CHECK_FALSE(matches("a", ""));
  CHECK(matches("*", ""));
  CHECK(matches("*", "anything"));
  CHECK(matches("**", "x"));
  CHECK(matches("a?c", "abc"));
  CHECK_FALSE(matches("a?c", "ac"));
  CHECK_FALSE(matches("?", ""));
  CHECK(matches("blk.*.attn_out", "blk.12.attn_out"));
  CHECK_FALSE(matches("blk.*.attn_out", "blk.12.attn_out2"));
  CHECK_FALSE(matches("blk.*", "blk"));
  CHECK(matches("*ab", "aab"));
  CHECK(matches("*ab*ab", "ab_abab"));
  CHECK_FALSE(matches("*ab*ab", "ab"));
  CHECK(matches("a*b*c", "a.b.b.c"));
  CHECK(matches("a*?", "ab"));
  CHECK_FALSE(matches("a*?", "a"));
  CHECK_FALSE(matches("[a]", "a"));  // no classes
  // Many stars stay quick.
  CHECK_FALSE(matches("*a*a*a*a*a*a*a*a*b", std::string(5000, 'a')));
}

// Against the definition, on all short strings over two letters.
namespace {
bool slow(std::string_view p, std::string_view t) {
  if (p.empty()) return t.empty();
  if (p[0] == '*') return slow(p.substr(1), t) || (!t.empty() && slow(p, t.substr(1)));
  return !t.empty() && (p[0] == '?' || p[0] == t[0]) && slow(p.substr(1), t.substr(1));
}
void words(const std::string& letters, std::size_t length, std::vector<std::string>& out) {
  std::vector<std::string> last{""};
  out.push_back("");
  for (std::size_t n = 1; n <= length; ++n) {
    std::vector<std::string> next;
    for (const std::string& w : last)
      for (const char c : letters) next.push_back(w + c);
    out.insert(out.end(), next.begin(), next.end());
    last = next;
  }
}
}  // namespace

TEST_CASE("patterns equal their definition on all short strings") {
  std::vector<std::string> patterns, texts;
  words("ab?*", 4, patterns);
  words("ab", 5, texts);
  int different = 0;
  for (const std::string& p : patterns)
    for (const std::string& t : texts) different += matches(p, t) != slow(p, t);
  CHECK(different == 0);
}

// python/imp_runtime/planner/fit.py counts with these: LAYER_VALUES, HEAD_VALUES.
TEST_CASE("activations of the released shape take what plans of memory count") {
  const auto model = make_synthetic("flash-next:table=65536", false);
  const HParams& h = model->hparams();
  const StateLayout state = state_layout(h);
  const double streams = static_cast<double>(h.wide()), vocab = static_cast<double>(h.vocab);
  const auto values = [&](std::int64_t rows, std::int64_t outputs) {
    Graph g;
    Builder builder(g, *model, state, {rows, outputs}, true);
    g.keep(model->arch().build(builder).logits);
    return static_cast<double>(plan(g).bytes) / sizeof(float);
  };
  for (const std::int64_t rows : {1, 64, 512, 2048}) {
    const auto n = static_cast<double>(rows);
    CHECK(values(rows, rows) <= n * (1.3 * streams + vocab));
    if (rows >= 64) CHECK(values(rows, 1) <= n * 6.1 * streams);
  }
  CHECK(values(512, 1) >= 512 * 6.0 * streams);
}

}  // namespace imp
