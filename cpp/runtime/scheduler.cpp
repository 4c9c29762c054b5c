// Decode first, then prompts; admission by what is free; preemption of the youngest.
#include "cpp/runtime/scheduler.h"

#include <algorithm>

#include "cpp/core/error.h"

namespace imp {
namespace {

void refuse(const std::string& why) { fail(ErrorCode::invalid_argument, why); }

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits) : limits_(limits) {
  if (limits.step_tokens < 1 || limits.prefill_tokens < 1 || limits.running < 1)
    refuse(str("steps of ", limits.step_tokens, " tokens, ", limits.prefill_tokens,
               " for prompts, ", limits.running, " requests; each must be at least 1"));
  if (limits.running > limits.step_tokens)
    refuse(str(limits.running, " requests at once, a step has ", limits.step_tokens, " tokens"));
}

std::int64_t Scheduler::pages_for(std::int64_t tokens) const {
  return (tokens + limits_.page_tokens - 1) / limits_.page_tokens;
}

std::int64_t Scheduler::growth(const Request& r) const {
  return pages_for(r.length) - pages_for(r.computed) +
         (r.shared && r.computed % limits_.page_tokens != 0 ? 1 : 0);
}

std::int64_t Scheduler::needed() const {
  std::int64_t pages = 0;
  for (const RequestId id : running_) pages += growth(at(id));
  return pages;
}

Scheduler::Request& Scheduler::find(RequestId id) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) fail(ErrorCode::internal, str("request ", id, " is not scheduled"));
  return it->second;
}

void Scheduler::submit(RequestId id, std::int64_t prompt, std::vector<std::int64_t> stops) {
  if (prompt < 1) refuse("the prompt has no tokens");
  if (prompt > limits_.n_ctx)
    refuse(str("the prompt has ", prompt, " tokens, the context holds ", limits_.n_ctx));
  if (pages_for(prompt) > limits_.pages)
    refuse(str("the prompt needs ", pages_for(prompt), " cache pages, there are ", limits_.pages));
  if (requests_.contains(id)) fail(ErrorCode::internal, str("request ", id, " twice"));
  requests_.emplace(id, Request{prompt, 0, std::move(stops)});
  waiting_.push_back(id);
}

Scheduler::Change Scheduler::preempt() {
  if (running_.size() < 2) return {};
  const RequestId id = running_.back();
  running_.pop_back();
  find(id).saved = true;
  preempted_.insert(std::ranges::lower_bound(preempted_, id), id);
  return {Action::preempt, id};
}

Scheduler::Change Scheduler::admit(std::deque<RequestId>& queue, Action action, FreeMemory free) {
  const RequestId id = queue.front();
  const Request& r = at(id);
  // A page for everyone to grow into keeps the youngest from being preempted again at once.
  const std::int64_t spare = running();
  if (free.rows < 1 || needed() + pages_for(r.length) + spare > free.pages) return {};
  queue.pop_front();
  running_.insert(std::ranges::lower_bound(running_, id), id);
  return {action, id};
}

Scheduler::Change Scheduler::change(FreeMemory free) {
  if (needed() > free.pages) return preempt();
  if (running() >= limits_.running) return {};
  if (!preempted_.empty()) return admit(preempted_, Action::resume, free);
  if (!waiting_.empty()) return admit(waiting_, Action::start, free);
  return {};
}

void Scheduler::cached(RequestId id, std::int64_t tokens) {
  Request& r = find(id);
  if (tokens < 0 || tokens >= r.length)
    fail(ErrorCode::internal, str(tokens, " cached tokens of ", r.length));
  r.computed = tokens;
  r.shared = true;
}

void Scheduler::put_back(RequestId id) {
  if (std::erase(running_, id) == 0)
    fail(ErrorCode::internal, str("request ", id, " is not running"));
  if (find(id).saved) {
    preempted_.insert(std::ranges::lower_bound(preempted_, id), id);
  } else {
    waiting_.push_front(id);
  }
}

std::vector<Scheduler::Piece> Scheduler::step() const {
  std::vector<Piece> pieces;
  std::vector<RequestId> reading;
  for (const RequestId id : running_) {
    const Request& r = at(id);
    if (!decodes(r)) {
      reading.push_back(id);
    } else {
      pieces.push_back({id, r.computed, 1, true});
    }
  }
  std::int64_t budget = limits_.step_tokens - std::ssize(pieces);
  if (!pieces.empty()) budget = std::min(budget, limits_.prefill_tokens);
  const auto wanted = [this](RequestId id) {
    const Request& r = at(id);
    const auto stop = std::ranges::upper_bound(r.stops, r.computed);
    return (stop == r.stops.end() ? r.length : std::min(*stop, r.length)) - r.computed;
  };
  // Shortest first, so that what one does not need goes to the others.
  std::ranges::stable_sort(reading, {}, wanted);
  for (std::size_t i = 0; i < reading.size(); ++i) {
    const Request& r = at(reading[i]);
    const std::int64_t left = std::ssize(reading) - static_cast<std::int64_t>(i);
    const std::int64_t tokens = std::min((budget + left - 1) / left, wanted(reading[i]));
    if (tokens == 0) continue;
    budget -= tokens;
    pieces.push_back({reading[i], r.computed, tokens, r.computed + tokens == r.length});
  }
  return pieces;
}

void Scheduler::commit(const std::vector<Piece>& pieces) {
  for (const Piece& p : pieces) {
    Request& r = find(p.request);
    r.computed += p.tokens;
    r.shared = false;
  }
}

void Scheduler::token(RequestId id) { ++find(id).length; }

void Scheduler::shared(RequestId id) { find(id).shared = true; }

void Scheduler::finish(RequestId id) {
  std::erase(running_, id);
  std::erase(preempted_, id);
  std::erase(waiting_, id);
  requests_.erase(id);
}

}  // namespace imp
