// The scheduling policy by table: who runs, with how many tokens, and who has to make room.
#include "cpp/runtime/scheduler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "tests/cpp/errors.h"

namespace imp {
namespace {

using Action = Scheduler::Action;
using Change = Scheduler::Change;
using Piece = Scheduler::Piece;
using Pieces = std::vector<Piece>;
using test::refused;

constexpr FreeMemory plenty{100, 1000};

// Steps of 8 tokens, 4 of them for prompts while others decode; 10 pages of 4 tokens.
SchedulerLimits limits() { return {8, 4, 32, 4, 10, 4}; }

std::vector<Change> settle(Scheduler& s, FreeMemory free) {
  std::vector<Change> changes;
  for (Change c = s.change(free); c.action != Action::none; c = s.change(free))
    changes.push_back(c);
  return changes;
}

// Runs a step; every request whose prompt is read, or that decodes, gets a token.
Pieces run(Scheduler& s) {
  const Pieces pieces = s.step();
  s.commit(pieces);
  for (const Piece& p : pieces)
    if (p.output) s.token(p.request);
  return pieces;
}

}  // namespace

TEST_CASE("a prompt is read in steps and then decodes") {
  Scheduler s(limits());
  s.submit(1, 19);
  CHECK(s.step().empty());
  CHECK(settle(s, plenty) == std::vector<Change>{{Action::start, 1}});
  CHECK(s.step() == s.step());  // planning changes nothing
  CHECK(run(s) == Pieces{{1, 0, 8, false}});
  CHECK(run(s) == Pieces{{1, 8, 8, false}});
  CHECK(run(s) == Pieces{{1, 16, 3, true}});
  CHECK(run(s) == Pieces{{1, 19, 1, true}});
  CHECK(run(s) == Pieces{{1, 20, 1, true}});
  s.finish(1);
  CHECK(s.step().empty());
  CHECK(s.running() == 0);
}

TEST_CASE("decoding goes first, prompts share their budget evenly") {
  Scheduler s(limits());
  s.submit(1, 2);
  settle(s, plenty);
  run(s);
  s.submit(2, 20);
  s.submit(3, 20);
  s.submit(4, 1);  // one token of a prompt is as good as decoding
  CHECK(settle(s, plenty).size() == 3);
  CHECK(run(s) == Pieces{{1, 2, 1, true}, {4, 0, 1, true}, {2, 0, 2, false}, {3, 0, 2, false}});
  CHECK(run(s) == Pieces{{1, 3, 1, true}, {4, 1, 1, true}, {2, 2, 2, false}, {3, 2, 2, false}});
  s.finish(2);
  CHECK(run(s) == Pieces{{1, 4, 1, true}, {4, 2, 1, true}, {3, 4, 4, false}});
  s.finish(1);
  s.finish(4);
  CHECK(run(s) == Pieces{{3, 8, 8, false}});  // nobody decodes: the whole step
}

TEST_CASE("what a short prompt leaves goes to a long one") {
  Scheduler s(limits());
  s.submit(1, 20);
  s.submit(2, 2);
  settle(s, plenty);
  CHECK(run(s) == Pieces{{2, 0, 2, true}, {1, 0, 6, false}});
}

TEST_CASE("pieces end at the stops") {
  Scheduler s(limits());
  s.submit(1, 10, {3, 4, 10});
  settle(s, plenty);
  CHECK(run(s) == Pieces{{1, 0, 3, false}});
  CHECK(run(s) == Pieces{{1, 3, 1, false}});
  CHECK(run(s) == Pieces{{1, 4, 6, true}});
  CHECK(run(s) == Pieces{{1, 10, 1, true}});
}

TEST_CASE("admission in order, by rows, pages and number") {
  Scheduler s(limits());
  for (RequestId id = 1; id <= 6; ++id) s.submit(id, 8);  // two pages each
  CHECK(settle(s, {0, 10}).empty());
  CHECK(s.change({1, 1}).action == Action::none);
  CHECK(s.change({1, 2}) == Change{Action::start, 1});
  // 1 still needs its two pages, and one to grow.
  CHECK(s.change({1, 4}).action == Action::none);
  CHECK(s.change({1, 5}) == Change{Action::start, 2});
  CHECK(settle(s, plenty) == std::vector<Change>{{Action::start, 3}, {Action::start, 4}});
  CHECK(s.running() == 4);  // the most
  CHECK(s.waiting() == 2);
  CHECK(s.needed() == 8);
}

TEST_CASE("cached tokens are not read again, a shared page is counted") {
  Scheduler s(limits());
  s.submit(1, 10);
  settle(s, plenty);
  s.cached(1, 6);          // one and a half pages
  CHECK(s.needed() == 2);  // the copy of the half page, and the third
  CHECK(run(s) == Pieces{{1, 6, 4, true}});
  CHECK(s.needed() == 0);  // the third has room
  s.shared(1);
  CHECK(s.needed() == 1);
  run(s);
  CHECK(s.needed() == 0);
  refused([&] { s.cached(1, 12); }, ErrorCode::internal, {"12 cached tokens of 12"});
}

TEST_CASE("the youngest makes room, and comes back before newer ones") {
  Scheduler s(limits());
  for (RequestId id = 1; id <= 3; ++id) s.submit(id, 4);
  settle(s, plenty);
  run(s);
  run(s);
  CHECK(s.needed() == 3);  // each at the end of its page
  CHECK(s.change({1, 2}) == Change{Action::preempt, 3});
  CHECK(s.change({1, 1}) == Change{Action::preempt, 2});
  CHECK(s.change({1, 0}).action == Action::none);  // never the last one
  CHECK(s.preempt().action == Action::none);
  s.submit(4, 1);
  CHECK(run(s) == Pieces{{1, 4, 1, true}});
  CHECK(s.change({1, 2}).action == Action::none);  // 2 needs two pages and one to spare
  CHECK(s.change({1, 3}) == Change{Action::resume, 2});
  CHECK(settle(s, plenty) == std::vector<Change>{{Action::resume, 3}, {Action::start, 4}});
  CHECK(run(s) == Pieces{{1, 5, 1, true}, {2, 4, 1, true}, {3, 4, 1, true}, {4, 0, 1, true}});
  CHECK(s.preempt() == Change{Action::preempt, 4});
}

TEST_CASE("what could not be done is put back where it was") {
  Scheduler s(limits());
  s.submit(1, 4);
  s.submit(2, 4);
  settle(s, plenty);
  s.put_back(1);
  CHECK(s.change(plenty) == Change{Action::start, 1});
  run(s);
  s.preempt();
  CHECK(s.change(plenty) == Change{Action::resume, 2});
  s.put_back(2);
  CHECK(s.change(plenty) == Change{Action::resume, 2});
  refused([&] { s.put_back(9); }, ErrorCode::internal, {"request 9 is not running"});
}

TEST_CASE("a request can end anywhere") {
  Scheduler s(limits());
  for (RequestId id = 1; id <= 3; ++id) s.submit(id, 8);
  s.finish(2);  // waiting
  CHECK(settle(s, plenty) == std::vector<Change>{{Action::start, 1}, {Action::start, 3}});
  s.preempt();
  s.finish(3);  // preempted
  s.finish(1);  // running
  s.finish(77);
  CHECK(s.running() + s.waiting() == 0);
  CHECK(s.needed() == 0);
}

TEST_CASE("what can never run is refused, at the limits") {
  Scheduler s({8, 4, 32, 4, 5, 4});
  s.submit(1, 20);
  const auto bad = [&](std::int64_t prompt, const std::vector<std::string>& parts) {
    refused([&] { s.submit(2, prompt); }, ErrorCode::invalid_argument, parts);
  };
  bad(0, {"no tokens"});
  bad(21, {"needs 6 cache pages", "there are 5"});
  bad(33, {"the prompt has 33 tokens", "holds 32"});
  refused([&] { s.submit(1, 1); }, ErrorCode::internal, {"request 1 twice"});
  refused(
      [&] {
        Scheduler({4, 4, 32, 4, 5, 5});
      },
      ErrorCode::invalid_argument, {"5 requests at once", "4 tokens"});
  Scheduler({5, 4, 32, 4, 5, 5});
  refused([&] { Scheduler({8, 0, 32, 4, 5, 4}); }, ErrorCode::invalid_argument, {"0 for prompts"});
}

TEST_CASE("random traffic on a small cache: all end, none starves, memory is never exceeded") {
  std::mt19937 rng(7);
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(rng);
  };
  const SchedulerLimits l{8, 4, 32, 4, 12, 4};
  Scheduler s(l);
  struct Work {
    std::int64_t pages = 0, tokens = 0, left = 0;
    bool open = false;
  };
  std::map<RequestId, Work> work;
  RequestId next = 0;
  const auto used = [&] {
    std::int64_t pages = 0;
    for (const auto& [id, w] : work) pages += w.open ? w.pages : 0;
    return pages;
  };
  int steps = 0;
  for (; next < 300 || !work.empty(); ++steps) {
    REQUIRE(steps < 20000);
    if (next < 300 && pick(0, 3) == 0) {
      const int prompt = pick(1, 24);
      s.submit(next, prompt);
      work[next++].left = pick(1, 8);
    }
    for (;;) {
      const auto rows =
          l.running - std::ranges::count_if(work, [](auto& w) { return w.second.open; });
      const Change c = s.change({rows, l.pages - used()});
      if (c.action == Action::none) break;
      work[c.request].open = c.action != Action::preempt;
    }
    REQUIRE(used() <= l.pages);
    std::int64_t total = 0;
    for (const Piece& p : run(s)) {
      Work& w = work[p.request];
      REQUIRE(w.open);
      REQUIRE(p.first == w.tokens);
      total += p.tokens;
      w.tokens += p.tokens;
      w.pages = (w.tokens + 3) / 4;
      if (p.output && --w.left == 0) {
        s.finish(p.request);
        work.erase(p.request);
      }
    }
    REQUIRE(total <= l.step_tokens);
    REQUIRE(used() <= l.pages);
  }
  CHECK(s.running() + s.waiting() == 0);
}

}  // namespace imp
