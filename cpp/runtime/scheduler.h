// Which tokens of which requests run in the next step. Pure policy: it knows lengths and free
// memory, not models.
//
// Every running request that has read its prompt decodes one token; the rest of the step goes to
// prompts, shared evenly among those being read. Waiting requests are admitted in order of arrival
// when a state row is free and the cache can hold their whole prompt beside what the running ones
// still need. When the cache runs out, the youngest running request is preempted: it is saved whole
// and waits, ahead of requests that never ran, until there is room again.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace imp {

using RequestId = std::int64_t;

struct SchedulerLimits {
  std::int64_t step_tokens = 512;     // tokens of one step
  std::int64_t prefill_tokens = 512;  // of which prompts get at most this many while others decode
  std::int64_t n_ctx = 0;             // tokens of one sequence
  std::int64_t page_tokens = 16;
  std::int64_t pages = 0;    // of the whole cache
  std::int64_t running = 1;  // requests that hold a sequence at the same time, <= step_tokens
};

struct FreeMemory {
  std::int64_t rows = 0;
  std::int64_t pages = 0;
};

class Scheduler {
 public:
  enum class Action { none, preempt, resume, start };
  struct Change {
    Action action = Action::none;
    RequestId request = -1;
    bool operator==(const Change&) const = default;
  };
  struct Piece {
    RequestId request = -1;
    std::int64_t first = 0;  // index of its first token in the request's sequence
    std::int64_t tokens = 0;
    bool output = false;  // the next token is chosen after it
    bool operator==(const Piece&) const = default;
  };

  explicit Scheduler(const SchedulerLimits& limits);

  // `stops`, ascending: lengths at which a piece of the prompt must end. Fails (invalid_argument)
  // if the prompt can never run, naming both numbers.
  void submit(RequestId id, std::int64_t prompt, std::vector<std::int64_t> stops = {});
  // One change of who runs, to be carried out before the next call: save and free, restore, or open
  // a sequence. Call until none.
  Change change(FreeMemory free);
  // A started request found this many tokens of its prompt computed.
  void cached(RequestId id, std::int64_t tokens);
  // What a started or resumed request could not do after all: it goes on waiting.
  void put_back(RequestId id);
  // Preempts the youngest running request now; none if it is the only one.
  Change preempt();
  // The next step: at most step_tokens tokens, and nothing has changed until commit().
  std::vector<Piece> step() const;
  void commit(const std::vector<Piece>& pieces);
  // One more token was chosen, to be decoded next.
  void token(RequestId id);
  // The page that the request will write next is shared, so the next write takes a new one.
  void shared(RequestId id);
  // The request ended or was cancelled; its memory is free again.
  void finish(RequestId id);

  std::int64_t waiting() const { return std::ssize(waiting_) + std::ssize(preempted_); }
  std::int64_t running() const { return std::ssize(running_); }
  // Pages that the running requests still need to read their prompts and decode one token.
  std::int64_t needed() const;

 private:
  struct Request {
    std::int64_t length = 0;    // tokens known: prompt and chosen ones
    std::int64_t computed = 0;  // of which the cache has
    std::vector<std::int64_t> stops;
    bool shared = false;
    bool saved = false;  // preempted: starts again by a resume
  };
  std::int64_t pages_for(std::int64_t tokens) const;
  std::int64_t growth(const Request& r) const;
  bool decodes(const Request& r) const { return r.length - r.computed == 1; }
  Request& find(RequestId id);
  const Request& at(RequestId id) const { return requests_.at(id); }
  Change admit(std::deque<RequestId>& queue, Action action, FreeMemory free);

  SchedulerLimits limits_;
  std::unordered_map<RequestId, Request> requests_;
  std::vector<RequestId> running_;   // by age
  std::deque<RequestId> preempted_;  // by age
  std::deque<RequestId> waiting_;    // in order of arrival
};

}  // namespace imp
