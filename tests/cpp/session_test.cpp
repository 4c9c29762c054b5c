// Sessions on a tiny model: limits, mixes of sequences, failures that leave nothing half done.
#include "cpp/runtime/session.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/cpp/errors.h"
#include "tests/cpp/fake_backend.h"
#include "tests/cpp/tiny_model.h"

namespace imp {
namespace {

using Ids = std::vector<std::int32_t>;
using test::refused;

struct Run {
  explicit Run(SessionOptions o = {64, 3, 32, {}, true})
      : model(test::tiny_model(dir)), backend(std::make_shared<test::FakeBackend>()) {
    session = std::make_unique<Session>(model, backend, o);
  }
  test::TempDir dir;
  std::shared_ptr<const Model> model;
  std::shared_ptr<test::FakeBackend> backend;
  std::unique_ptr<Session> session;

  // Logits of all tokens, [tokens * vocab].
  std::vector<float> extend(SeqId seq, const Ids& ids, std::int64_t first = 0) {
    const StepRequest request{seq, ids, first};
    const auto logits = session->step({&request, 1});
    REQUIRE(logits);
    return {logits->data, logits->data + logits->rows * model->hparams().vocab};
  }
  void fails(const std::vector<StepRequest>& requests, const std::vector<std::string>& parts) {
    refused([&] { (void)session->step(requests); }, ErrorCode::invalid_argument, parts);
  }
};

Ids count(std::int32_t n, std::int32_t step = 1) {
  Ids ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back((1 + i * step) % 32);
  return ids;
}

}  // namespace

TEST_CASE("decode steps are padded where the backend asks for it") {
  const test::TempDir dir;
  const auto model = test::tiny_model(dir);
  const auto backend = std::make_shared<test::FakeBackend>();
  backend->buckets = {1, 2, 4, 8};
  const StepInputs& seen = backend->seen;
  const auto session_of = [&](SessionOptions o) {
    o.n_ctx = 64;
    o.max_seqs = 9;
    return Session(model, backend, o);
  };
  const auto rows = [&](Session& session, std::int64_t n, std::int64_t tokens = 1,
                        std::int64_t first = 0) {
    std::vector<StepRequest> requests;
    const Ids ids = count(static_cast<std::int32_t>(n * tokens));
    for (std::int64_t i = 0; i < n; ++i)
      requests.push_back({*session.open(),
                          std::span(ids).subspan(static_cast<std::size_t>(i * tokens),
                                                 static_cast<std::size_t>(tokens)),
                          first});
    const auto logits = session.step(requests);
    REQUIRE(logits);
    CHECK(logits->rows == n * (tokens - first));
    for (const StepRequest& r : requests) session.close(r.seq);
    return std::ssize(seen.tokens);
  };
  Session session = session_of({});
  for (const auto& [n, padded] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {1, 1}, {2, 2}, {3, 4}, {4, 4}, {5, 8}, {8, 8}, {9, 9}})
    CHECK(rows(session, n) == padded);
  CHECK(session.compiled() == 5);

  CHECK(rows(session, 3) == 4);
  CHECK(seen.tokens == Ids{1, 2, 3, 1});
  CHECK(seen.positions == Ids{0, 0, 0, 0});
  CHECK(seen.outputs == Ids{0, 1, 2, 0});
  REQUIRE(seen.chunks.size() == 3);
  CHECK(seen.chunks[2].row == 2);
  for (const Ids& table_rows : seen.ngram_rows) {
    const auto width = static_cast<std::ptrdiff_t>(table_rows.size() / 4);
    CHECK(std::equal(table_rows.begin(), table_rows.begin() + width, table_rows.end() - width));
  }

  CHECK(rows(session, 3, 2) == 6);     // prompts are not
  CHECK(rows(session, 3, 1, 1) == 3);  // nor what has no outputs
  Session small = session_of({.n_ubatch = 3});
  CHECK(rows(small, 3) == 3);  // 4 would not fit
  Session watched = session_of({.profile = true});
  CHECK(rows(watched, 3) == 3);
}

TEST_CASE("options at the limits") {
  const test::TempDir dir;
  const auto model = test::tiny_model(dir);
  const auto open = [&](SessionOptions o) {
    return Session(model, std::make_shared<test::FakeBackend>(), o).n_ctx();
  };
  CHECK(open({}) == 256);  // the model's own
  CHECK(open({1, 1, 1}) == 1);
  CHECK(open({16, max_sequences, 1}) == 16);
  CHECK(open({16, 1, max_ubatch}) == 16);
  const auto bad = [&](SessionOptions o, const std::vector<std::string>& parts) {
    refused([&] { open(o); }, ErrorCode::invalid_argument, parts);
  };
  bad({-1}, {"context of -1", str(max_ctx)});
  bad({max_ctx + 1}, {str(max_ctx + 1), str(max_ctx)});
  bad({16, 0}, {"0 sequences", str(max_sequences)});
  bad({16, max_sequences + 1}, {str(max_sequences + 1), str(max_sequences)});
  bad({16, 1, 0}, {"steps of 0", str(max_ubatch)});
  bad({16, 1, max_ubatch + 1}, {str(max_ubatch + 1), str(max_ubatch)});
  refused([&] { open({max_ctx, max_sequences}); }, ErrorCode::out_of_memory,
          {str(max_sequences, " sequences of ", max_ctx), "available"});
}

TEST_CASE("requests are checked before anything happens") {
  Run r;
  const SeqId a = *r.session->open(), b = *r.session->open();
  const Ids one{1}, full = count(32), over = count(33), bad{1, 32}, negative{-1};
  r.extend(a, {3});
  r.fails({}, {"a step of 0 tokens", "32"});
  r.fails({{a, {}, 0}}, {"without tokens"});
  r.fails({{a, over, 0}}, {"a step of 33 tokens", "at most 32"});
  r.fails({{a, full, 0}, {b, one, 0}}, {"a step of 33 tokens"});
  r.fails({{a, bad, 0}}, {"token 32 at position 2", "vocabulary has 32"});
  r.fails({{a, one, 0}, {b, negative, 0}}, {"token -1 at position 0"});
  r.fails({{a, one, 0}, {a, one, 0}}, {str("sequence ", a, " twice")});
  r.fails({{a, one, -1}}, {"first output -1 of 1"});
  r.fails({{a, one, 2}}, {"first output 2 of 1"});
  r.fails({{77, one, 0}}, {"sequence 77 is not open"});
  CHECK(r.session->tokens(a) == Ids{3});
  CHECK(r.session->tokens(b).empty());

  r.extend(a, count(31));
  r.extend(a, full);  // 64: the context is full
  r.fails({{a, one, 0}}, {"65 tokens in a context of 64"});
  CHECK(r.session->tokens(a).size() == 64);
}

TEST_CASE("as many sequences as asked for") {
  Run r;
  std::vector<SeqId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(*r.session->open());
  const auto none = r.session->open();
  REQUIRE_FALSE(none);
  CHECK(none.error().message() == "sequences: 1 needed, 0 available");
  CHECK_FALSE(r.session->fork(ids[0]));
  r.session->close(ids[1]);
  refused([&] { r.session->close(ids[1]); }, ErrorCode::invalid_argument, {"is not open"});
  const auto again = r.session->open();
  REQUIRE(again);
  CHECK(*again != ids[1]);  // a stale handle never names a new sequence
  CHECK(r.session->open_sequences() == 3);
  for (const SeqId id : {ids[0], ids[2], *again}) r.session->close(id);
  CHECK(r.session->memory().page_pool().free() == r.session->memory().page_pool().size());
}

TEST_CASE("three full contexts fit at once") {
  Run r({50, 3, 32, {}, true});  // not a multiple of the page
  std::vector<SeqId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(*r.session->open());
  for (const SeqId id : ids) {
    r.extend(id, count(32));
    r.extend(id, count(18));
  }
  CHECK(r.session->memory().page_pool().free() == 0);
}

TEST_CASE("a mix of sequences equals each alone, in any cut") {
  Run r;
  const Ids x = count(30), y = count(21, 5);
  const SeqId alone = *r.session->open();
  const std::vector<float> want_x = r.extend(alone, x);
  r.session->close(alone);
  const SeqId other = *r.session->open();
  const std::vector<float> want_y = r.extend(other, y);
  r.session->close(other);
  for (const float v : want_x) CHECK(std::isfinite(v));

  const SeqId a = *r.session->open(), b = *r.session->open();
  const std::size_t vocab = 32;
  std::size_t at_x = 0, at_y = 0;
  while (at_x < x.size() || at_y < y.size()) {
    const std::size_t n = std::min<std::size_t>(7, x.size() - at_x),
                      m = std::min<std::size_t>(4, y.size() - at_y);
    std::vector<StepRequest> requests;
    if (m > 0) requests.push_back({b, {y.data() + at_y, m}, 0});
    if (n > 0) requests.push_back({a, {x.data() + at_x, n}, 0});
    const auto got = r.session->step(requests);
    REQUIRE(got);
    CHECK(got->rows == static_cast<std::int64_t>(n + m));
    CHECK(std::memcmp(got->data, want_y.data() + at_y * vocab, m * vocab * 4) == 0);
    CHECK(std::memcmp(got->data + m * vocab, want_x.data() + at_x * vocab, n * vocab * 4) == 0);
    at_x += n;
    at_y += m;
  }
}

TEST_CASE("logits of the wanted rows only") {
  Run r;
  const SeqId a = *r.session->open(), b = *r.session->open(), c = *r.session->open();
  const std::vector<float> all = r.extend(a, count(9));
  const std::vector<float> last = r.extend(b, count(9), 8);
  CHECK(last == std::vector<float>(all.end() - 32, all.end()));
  CHECK(r.extend(c, count(9), 9).empty());
  CHECK(r.extend(c, {4}) == r.extend(a, {4}));  // the state is the same without any output
}

TEST_CASE("taps are copies of the last step") {
  Run r({64, 1, 32, {"blk.*.residual", "blk.1.expert_ids", "logits"}, true});
  const SeqId a = *r.session->open();
  r.extend(a, count(5), 4);
  std::vector<std::string> names;
  for (const TapData& t : r.session->taps()) names.push_back(t.name);
  CHECK(names == std::vector<std::string>{"blk.0.residual", "blk.1.expert_ids", "blk.1.residual",
                                          "blk.2.residual", "blk.3.residual", "logits"});
  CHECK(r.session->taps()[0].rows == 5);
  CHECK(r.session->taps()[0].cols == 32);
  CHECK(r.session->taps()[1].dtype == DType::i32);
  CHECK(r.session->taps()[5].rows == 1);
  r.extend(a, {1}, 1);
  CHECK(r.session->taps().size() == 5);
}

TEST_CASE("a step that fails before it runs has not happened") {
  Run r;
  const SeqId a = *r.session->open(), twin = *r.session->open();
  r.extend(a, count(10));
  r.extend(twin, count(10));
  r.backend->fail_compile = true;
  const Ids more = count(7, 3);
  refused([&] { r.extend(a, more); }, ErrorCode::out_of_memory, {"no memory to compile"});
  CHECK(r.session->tokens(a) == count(10));
  r.backend->fail_compile = false;
  CHECK(r.extend(a, more) == r.extend(twin, more));
}

TEST_CASE("after a step that failed while running, its sequences can only be closed") {
  Run r;
  const SeqId a = *r.session->open(), b = *r.session->open();
  r.extend(a, count(10));
  const std::vector<float> want = r.extend(b, count(10));
  r.backend->fail_run = true;
  refused([&] { r.extend(a, {1, 2}); }, ErrorCode::out_of_memory, {"no memory to run"});
  r.backend->fail_run = false;
  CHECK(r.session->tokens(a) == count(10));
  const Ids one{1};
  r.fails({{a, one, 0}}, {str("sequence ", a), "failed"});
  refused([&] { (void)r.session->fork(a); }, ErrorCode::invalid_argument, {"failed"});
  r.session->close(a);
  const SeqId c = *r.session->open();
  CHECK(r.extend(c, count(10)) == want);
  CHECK(r.extend(b, one) == r.extend(c, one));
}

}  // namespace imp
