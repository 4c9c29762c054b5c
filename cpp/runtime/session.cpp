// One step: reserve, pack, hash, run.
#include "cpp/runtime/session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/model/ngram_hash.h"

namespace imp {
namespace {

void require(bool ok, const std::string& sentence) {
  if (!ok) fail(ErrorCode::invalid_argument, sentence);
}

// The context that was asked for, or the model's own, halved until its cache takes at most half of
// the free memory.
std::int64_t choose_context(const Model& model, const SessionOptions& o) {
  const HParams& h = model.hparams();
  require(o.n_ctx >= 0 && o.n_ctx <= max_ctx,
          str("context of ", o.n_ctx, " tokens; imp takes 1 to ", max_ctx));
  require(o.max_seqs >= 1 && o.max_seqs <= max_sequences,
          str(o.max_seqs, " sequences; imp takes 1 to ", max_sequences));
  require(o.n_ubatch >= 1 && o.n_ubatch <= max_ubatch,
          str("steps of ", o.n_ubatch, " tokens; imp takes 1 to ", max_ubatch));
  const MemoryCost cost = memory_cost(h);
  const MemoryInfo memory = memory_info();
  const auto bytes = [&](std::int64_t context) {
    return static_cast<double>(o.max_seqs) *
           (static_cast<double>(cost.pages(context, page_tokens(h))) *
                static_cast<double>(cost.page_bytes) +
            static_cast<double>(cost.row_bytes));
  };
  std::int64_t context = o.n_ctx;
  if (context == 0) {
    constexpr std::int64_t least = 512;
    context = std::min(h.context_length, max_ctx);
    while (context > least && bytes(context) > static_cast<double>(memory.available_bytes) / 2)
      context /= 2;
  }
  if (bytes(context) > static_cast<double>(memory.available_bytes))
    fail(ErrorCode::out_of_memory,
         str(o.max_seqs, " sequences of ", context, " tokens need ",
             static_cast<std::int64_t>(bytes(context)), " bytes of cache and state, ",
             memory.available_bytes, " are available (", memory.limited_by, ")"));
  return context;
}

}  // namespace

Session::Session(std::shared_ptr<const Model> model, std::shared_ptr<Backend> backend,
                 const SessionOptions& options)
    : model_(std::move(model)),
      backend_(std::move(backend)),
      options_(options),
      n_ctx_(choose_context(*model_, options)),
      memory_(*backend_, model_->hparams(),
              options.max_seqs *
                  ((n_ctx_ + page_tokens(model_->hparams()) - 1) / page_tokens(model_->hparams())),
              options.max_seqs, options.poison),
      programs_(*backend_, *model_, memory_.layout(), n_ctx_, options.taps) {}

std::expected<SeqId, Shortage> Session::open() {
  auto state = memory_.open();
  if (!state) return std::unexpected(state.error());
  sequences_.emplace(next_id_, Sequence{{}, std::move(*state)});
  return next_id_++;
}

std::expected<SeqId, Shortage> Session::fork(SeqId seq) {
  const Sequence& from = usable(seq);
  auto state = memory_.fork(from.state);
  if (!state) return std::unexpected(state.error());
  sequences_.emplace(next_id_, Sequence{from.tokens, std::move(*state)});
  return next_id_++;
}

void Session::close(SeqId seq) {
  memory_.close(find(seq).state);
  sequences_.erase(seq);
}

Session::Sequence& Session::find(SeqId seq) {
  const auto it = sequences_.find(seq);
  require(it != sequences_.end(), str("sequence ", seq, " is not open"));
  return it->second;
}

Session::Sequence& Session::usable(SeqId seq) {
  Sequence& s = find(seq);
  require(!s.failed,
          str("sequence ", seq, " cannot go on: a step of it failed half-way; close it"));
  return s;
}

const std::vector<std::int32_t>& Session::tokens(SeqId seq) const {
  return const_cast<Session*>(this)->find(seq).tokens;
}

void Session::check(std::span<const StepRequest> requests) {
  const std::int64_t vocab = model_->hparams().vocab;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const StepRequest& r = requests[i];
    const std::int64_t length = std::ssize(usable(r.seq).tokens), n = std::ssize(r.tokens);
    require(n > 0, "a step without tokens");
    for (std::size_t j = 0; j < i; ++j)
      require(requests[j].seq != r.seq, str("sequence ", r.seq, " twice in one step"));
    for (std::int64_t t = 0; t < n; ++t)
      require(r.tokens[static_cast<std::size_t>(t)] >= 0 &&
                  r.tokens[static_cast<std::size_t>(t)] < vocab,
              str("token ", r.tokens[static_cast<std::size_t>(t)], " at position ", length + t,
                  ", the vocabulary has ", vocab));
    require(r.first_output >= 0 && r.first_output <= n,
            str("first output ", r.first_output, " of ", n, " tokens"));
    require(length + n <= n_ctx_, str(length + n, " tokens in a context of ", n_ctx_));
    total += n;
  }
  require(total > 0 && total <= options_.n_ubatch,
          str("a step of ", total, " tokens, at most ", options_.n_ubatch));
}

void Session::pack(std::span<const StepRequest> requests) {
  const HParams& h = model_->hparams();
  step_ = {};
  std::int64_t row = 0;
  if (h.ngram) step_.ngram_rows.resize(h.ngram->layers.size());
  for (const StepRequest& r : requests) {
    Sequence& s = find(r.seq);
    const std::int64_t position = std::ssize(s.tokens), n = std::ssize(r.tokens);
    step_.chunks.push_back({row, n, position, s.state.row, s.state.pages.data()});
    s.tokens.insert(s.tokens.end(), r.tokens.begin(), r.tokens.end());
    for (std::int64_t t = 0; t < n; ++t) {
      step_.tokens.push_back(r.tokens[static_cast<std::size_t>(t)]);
      step_.positions.push_back(static_cast<std::int32_t>(position + t));
      if (t >= r.first_output) step_.outputs.push_back(static_cast<std::int32_t>(row + t));
    }
    row += n;
    if (!h.ngram) continue;
    for (std::size_t i = 0; i < h.ngram->layers.size(); ++i) {
      std::vector<std::int32_t>& rows = step_.ngram_rows[i];
      const std::size_t first = rows.size();
      rows.resize(first + static_cast<std::size_t>(n * h.ngram->heads()));
      ngram_rows(*h.ngram, h.ngram->layers[i], s.tokens, static_cast<std::size_t>(position),
                 rows.data() + first);
    }
  }
}

std::expected<Logits, Shortage> Session::step(std::span<const StepRequest> requests) {
  check(requests);
  for (const StepRequest& r : requests) {
    Sequence& s = find(r.seq);
    const std::int64_t length = std::ssize(s.tokens);
    // Pages that were reserved before another request fell short stay with their sequence, unused.
    if (auto room = memory_.reserve(s.state, length, length + std::ssize(r.tokens)); !room)
      return std::unexpected(room.error());
  }
  StepShape shape;
  for (const StepRequest& r : requests) {
    shape.rows += std::ssize(r.tokens);
    shape.outputs += std::ssize(r.tokens) - r.first_output;
  }
  Program& program = programs_.get(shape);  // may fail: nothing has changed yet
  arena_bytes_ = std::max(arena_bytes_, program.arena_bytes);
  try {
    pack(requests);
    model_->prefetch_rows(step_.ngram_rows);
    run(program);
  } catch (...) {
    abandon(requests);
    throw;
  }
  if (!program.results.logits) return Logits{};
  const Executable& executable = *program.executable;
  return Logits{executable.data(program.results.logits), shape.outputs, executable.memory()};
}

// Some layers may have moved their state and others not: the sequences keep their tokens of before
// and take no more steps.
void Session::abandon(std::span<const StepRequest> requests) noexcept {
  for (std::size_t i = 0; i < step_.chunks.size(); ++i) {
    Sequence& s = sequences_.at(requests[i].seq);
    s.tokens.resize(static_cast<std::size_t>(step_.chunks[i].position));
    s.failed = true;
  }
}

void Session::run(Program& program) {
  using Clock = std::chrono::steady_clock;
  taps_.clear();
  const Graph& graph = *program.graph;
  Clock::time_point last = Clock::now();
  const auto after = [&](std::size_t node) {
    if (options_.profile) {
      const Clock::time_point now = Clock::now();
      OpTime& t = op_times_[std::string(op_name(graph.nodes()[node].op))];
      t.seconds += std::chrono::duration<double>(now - last).count();
      ++t.calls;
      last = now;
    }
    for (const Tap& tap : program.taps) {
      if (tap.node != node) continue;
      const TensorInfo& t = graph.info(tap.tensor);
      TapData data{tap.name, t.dtype, t.rows, t.cols, std::vector<std::byte>(t.bytes())};
      std::memcpy(data.data.data(), program.executable->data(tap.tensor), t.bytes());
      taps_.push_back(std::move(data));
    }
  };
  const bool watched = options_.profile || !program.taps.empty();
  program.executable->run(
      step_, memory_.step(),
      watched ? std::function<void(std::size_t)>(after) : std::function<void(std::size_t)>());
}

}  // namespace imp
