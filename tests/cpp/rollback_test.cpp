// Taking tokens back, saving and restoring: what fails leaves the sequence as it was, or closed
// off.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "cpp/runtime/session.h"
#include "tests/cpp/errors.h"
#include "tests/cpp/fake_backend.h"
#include "tests/cpp/tiny_model.h"

namespace imp {
namespace {

using Ids = std::vector<std::int32_t>;
using test::refused;

SessionOptions options() {
  SessionOptions o{64, 3, 32, {}, true};
  o.rollback_tokens = 4;
  return o;
}

struct Run {
  explicit Run(SessionOptions o = options())
      : model(test::tiny_model(dir)),
        backend(std::make_shared<test::FakeBackend>()),
        session(model, backend, o) {}
  test::TempDir dir;
  std::shared_ptr<const Model> model;
  std::shared_ptr<test::FakeBackend> backend;
  Session session;

  std::vector<float> extend(SeqId seq, const Ids& ids) {
    const StepRequest request{seq, ids, 0};
    const auto logits = session.step({&request, 1});
    REQUIRE(logits);
    return {logits->data, logits->data + logits->rows * model->hparams().vocab};
  }
  std::int64_t free_pages() const { return session.memory().page_pool().free(); }
};

Ids count(std::int32_t n, std::int32_t first = 0) {
  Ids ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back((first + i * 5) % 32);
  return ids;
}

}  // namespace

TEST_CASE("truncating by one to the limit, one token at a time before and after") {
  Run r;
  const SeqId whole = *r.session.open(), seq = *r.session.open();
  const std::vector<float> want = r.extend(whole, count(30));
  for (const std::int32_t t : count(30)) r.extend(seq, {t});
  for (std::int64_t back = 1; back <= 4; ++back) {
    REQUIRE(r.session.truncate(seq, 30 - back));
    const Ids all = count(30), rest(all.end() - back, all.end());
    const std::vector<float> got = r.extend(seq, rest);
    CHECK(std::memcmp(got.data(), want.data() + (30 - back) * 32, got.size() * 4) == 0);
  }
  CHECK(r.session.tokens(seq) == count(30));
  CHECK(r.session.oldest_length(seq) == 26);
  refused([&] { (void)r.session.truncate(seq, 25); }, ErrorCode::invalid_argument,
          {"of 30 tokens to 25", "go back to 26"});
}

TEST_CASE("pages behind the new end are free at once") {
  Run r;
  const SeqId seq = *r.session.open();
  r.extend(seq, count(15));
  r.extend(seq, count(3));
  CHECK(r.free_pages() == 10);
  REQUIRE(r.session.truncate(seq, 16));
  CHECK(r.free_pages() == 11);
}

TEST_CASE("a replay that fails closes the sequence off, the others go on") {
  Run r;
  const SeqId a = *r.session.open(), b = *r.session.open();
  r.extend(a, count(10));
  r.extend(b, count(10));
  r.backend->fail_run = true;
  refused([&] { (void)r.session.truncate(a, 8); }, ErrorCode::out_of_memory, {"no memory to run"});
  r.backend->fail_run = false;
  for (int i = 0; i < 2; ++i)
    refused([&] { (void)r.session.truncate(a, 0); }, ErrorCode::invalid_argument, {"failed"});
  refused([&] { (void)r.session.save(a); }, ErrorCode::invalid_argument, {"failed"});
  REQUIRE(r.session.truncate(b, 8));
  r.session.close(a);
  r.session.close(b);
  CHECK(r.free_pages() == 12);
}

TEST_CASE("a snapshot is bytes and back") {
  Run r;
  const SeqId seq = *r.session.open();
  r.extend(seq, count(20));
  const Snapshot saved = r.session.save(seq);
  const std::vector<std::byte> bytes = pack(saved);
  const Snapshot read = unpack(bytes, "x");
  CHECK(read.model == r.session.model_hash());
  CHECK(read.tokens == count(20));
  CHECK(read.state == saved.state);
  const auto back = r.session.restore(read);
  REQUIRE(back);
  CHECK(r.session.oldest_length(*back) == 20);
  CHECK(r.extend(*back, count(6, 3)) == r.extend(seq, count(6, 3)));
  REQUIRE(r.session.truncate(*back, 22));
  REQUIRE(r.session.truncate(seq, 22));
  CHECK(r.extend(*back, {1}) == r.extend(seq, {1}));
}

TEST_CASE("every bit of a snapshot counts") {
  Run r;
  const SeqId seq = *r.session.open();
  r.extend(seq, count(3));
  const std::vector<std::byte> good = pack(r.session.save(seq));
  for (std::size_t i = 0; i < good.size(); i += i < 80 ? 1 : 97) {
    std::vector<std::byte> bad = good;
    bad[i] ^= std::byte{0x10};
    refused([&] { (void)unpack(bad, "some file"); }, ErrorCode::bad_file, {"some file: "});
  }
  for (std::size_t n = 0; n < good.size(); n += n < 80 ? 1 : 97)
    refused([&] { (void)unpack(std::span(good).first(n), "f"); }, ErrorCode::bad_file, {"f: "});
}

TEST_CASE("parts of a snapshot that do not fit are refused") {
  Run r;
  const SeqId seq = *r.session.open();
  r.extend(seq, count(3));
  const Snapshot good = r.session.save(seq);
  const auto bad = [&](const Snapshot& s, const std::vector<std::string>& parts) {
    refused([&] { (void)r.session.restore(s); }, ErrorCode::invalid_argument, parts);
  };
  Snapshot s = good;
  ++s.model;
  bad(s, {"another model"});
  s = good;
  s.state.pop_back();
  bad(s, {"3 tokens with", "needed"});
  s = good;
  s.tokens[1] = 32;
  bad(s, {"token 32", "vocabulary has 32"});
  s = good;
  s.tokens.resize(65);
  bad(s, {"65 tokens", "holds 64"});
  s = good;
  s.types = {DType::f16, DType::q8_0};
  bad(s, {"holds f16 keys and q8_0 values", "session f32 keys and f32 values"});
  const Snapshot read = unpack(pack(s), "x");
  CHECK(read.types == s.types);
  s.types.v = static_cast<DType>(5);  // no type has this id
  refused([&] { (void)unpack(pack(s), "x"); }, ErrorCode::bad_file, {"x: ", "cache type id 5"});
  CHECK(r.session.open_sequences() == 1);
}

TEST_CASE("models differ by keys, names and shapes") {
  const test::TempDir a, b, c;
  const std::uint64_t one = model_hash(*test::tiny_model(a));
  CHECK(one == model_hash(*test::tiny_model(b)));
  CHECK(one != model_hash(*test::tiny_model(c, test::tiny_header().real("rope.freq_base", 1e5))));
}

TEST_CASE("options of the cache at the limits") {
  const test::TempDir dir;
  const auto model = test::tiny_model(dir);
  const auto pages = [&](std::int64_t cache, std::int64_t rollback) {
    SessionOptions o{64, 3, 32};
    o.cache_tokens = cache;
    o.rollback_tokens = rollback;
    return Session(model, std::make_shared<test::FakeBackend>(), o).memory().page_pool().size();
  };
  CHECK(pages(0, 0) == 12);
  CHECK(pages(one_context, 0) == 4);
  CHECK(pages(1, 0) == 1);
  CHECK(pages(17, max_rollback) == 2);
  const auto bad = [&](std::int64_t cache, std::int64_t rollback, const std::string& number) {
    refused([&] { pages(cache, rollback); }, ErrorCode::invalid_argument, {number});
  };
  bad(-2, 0, "cache of -2");
  bad(max_ctx + 1, 0, str(max_ctx + 1));
  bad(0, -1, "rollback of -1");
  bad(0, max_rollback + 1, str(max_rollback + 1));
}

}  // namespace imp
