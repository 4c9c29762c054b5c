// One step: reserve, pack, hash, run.
#include "cpp/runtime/session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpp/core/error.h"
#include "cpp/core/sysinfo.h"
#include "cpp/memory/cache_types.h"
#include "cpp/model/ngram_hash.h"

namespace imp {
namespace {

// The sentence is put together only when it is needed: some checks are of every token.
template <class... Parts>
void require(bool ok, const Parts&... sentence) {
  if (!ok) fail(ErrorCode::invalid_argument, str(sentence...));
}

std::int64_t pool_pages(const HParams& h, const SessionOptions& o, std::int64_t context) {
  const auto pages = [&](std::int64_t tokens) {
    return (tokens + page_tokens(h) - 1) / page_tokens(h);
  };
  if (o.cache_tokens > 0) return pages(o.cache_tokens);
  return pages(context) * (o.cache_tokens == one_context ? 1 : o.max_seqs);
}

StepShape shape_of(std::span<const StepRequest> requests) {
  StepShape shape;
  for (const StepRequest& r : requests) {
    shape.rows += std::ssize(r.tokens);
    shape.outputs += std::ssize(r.tokens) - r.first_output;
  }
  return shape;
}

// State rows of a sequence: its own and the two checkpoints.
std::int64_t rows_each(const SessionOptions& o) { return o.rollback_tokens > 0 ? 3 : 1; }

// The context that was asked for, or the model's own, halved until its cache takes at most half of
// the free memory.
std::int64_t choose_context(const Model& model, const Backend& backend, const SessionOptions& o) {
  const HParams& h = model.hparams();
  check_cache_types(o.cache_types, backend.info());
  require(o.n_ctx >= 0 && o.n_ctx <= max_ctx, "context of ", o.n_ctx, " tokens; imp takes 1 to ",
          max_ctx);
  require(o.max_seqs >= 1 && o.max_seqs <= max_sequences, o.max_seqs, " sequences; imp takes 1 to ",
          max_sequences);
  require(o.n_ubatch >= 1 && o.n_ubatch <= max_ubatch, "steps of ", o.n_ubatch,
          " tokens; imp takes 1 to ", max_ubatch);
  require(o.cache_tokens >= one_context && o.cache_tokens <= max_ctx, "a cache of ", o.cache_tokens,
          " tokens; imp takes 1 to ", max_ctx);
  require(o.rollback_tokens >= 0 && o.rollback_tokens <= max_rollback, "rollback of ",
          o.rollback_tokens, " tokens; imp takes 0 to ", max_rollback);
  require(o.max_outputs >= 0 && o.max_outputs <= max_ubatch, "logits of ", o.max_outputs,
          " tokens a step; imp takes 0 to ", max_ubatch);
  const MemoryCost cost = memory_cost(h, o.cache_types);
  const MemoryInfo memory = memory_info();
  const auto bytes = [&](std::int64_t context) {
    return static_cast<double>(pool_pages(h, o, context)) * static_cast<double>(cost.page_bytes) +
           static_cast<double>(o.max_seqs * rows_each(o)) * static_cast<double>(cost.row_bytes);
  };
  std::int64_t context = o.n_ctx;
  if (context == 0) {
    constexpr std::int64_t least = 512;
    context = std::min(h.context_length, max_ctx);
    if (o.cache_tokens > 0) context = std::min(context, o.cache_tokens);
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
      n_ctx_(choose_context(*model_, *backend_, options)),
      buckets_(backend_->info().buckets),
      memory_(*backend_, model_->hparams(), options.cache_types,
              pool_pages(model_->hparams(), options, n_ctx_), options.max_seqs, options.poison,
              rows_each(options) - 1),
      programs_(*backend_, *model_, memory_.layout(), n_ctx_, options.taps,
                static_cast<bool>(options.routing)),
      model_hash_(imp::model_hash(*model_)) {}

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
  for (const int i : {0, 1})
    if (from.kept[static_cast<std::size_t>(i)] >= 0)
      memory_.copy_row(memory_.kept_row(*state, i), memory_.kept_row(from.state, i));
  sequences_.emplace(next_id_, Sequence{from.tokens, std::move(*state), false, from.kept});
  return next_id_++;
}

void Session::close(SeqId seq) {
  memory_.close(find(seq).state);
  sequences_.erase(seq);
}

const Session::Sequence& Session::find(SeqId seq) const {
  const auto it = sequences_.find(seq);
  require(it != sequences_.end(), "sequence ", seq, " is not open");
  return it->second;
}

Session::Sequence& Session::find(SeqId seq) {
  return const_cast<Sequence&>(std::as_const(*this).find(seq));
}

Session::Sequence& Session::usable(SeqId seq) {
  Sequence& s = find(seq);
  require(!s.failed, "sequence ", seq, " cannot go on: a step of it failed half-way; close it");
  return s;
}

const std::vector<std::int32_t>& Session::tokens(SeqId seq) const { return find(seq).tokens; }

const std::vector<std::int32_t>& Session::pages(SeqId seq) const { return find(seq).state.pages; }

std::int64_t Session::pages_held_by(std::span<const SeqId> seqs) const {
  std::unordered_map<std::int32_t, std::int32_t> held;
  for (const SeqId id : seqs)
    for (const std::int32_t page : pages(id)) ++held[page];
  return std::ranges::count_if(
      held, [&](const auto& h) { return memory_.page_pool().references(h.first) == h.second; });
}

void Session::check(std::span<const StepRequest> requests) {
  const std::int64_t vocab = model_->hparams().vocab;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const StepRequest& r = requests[i];
    const std::int64_t length = std::ssize(usable(r.seq).tokens), n = std::ssize(r.tokens);
    require(n > 0, "a step without tokens");
    for (std::size_t j = 0; j < i; ++j)
      require(requests[j].seq != r.seq, "sequence ", r.seq, " twice in one step");
    for (std::int64_t t = 0; t < n; ++t)
      require(r.tokens[static_cast<std::size_t>(t)] >= 0 &&
                  r.tokens[static_cast<std::size_t>(t)] < vocab,
              "token ", r.tokens[static_cast<std::size_t>(t)], " at position ", length + t,
              ", the vocabulary has ", vocab);
    require(r.first_output >= 0 && r.first_output <= n, "first output ", r.first_output, " of ", n,
            " tokens");
    require(length + n <= n_ctx_, length + n, " tokens in a context of ", n_ctx_);
    total += n;
  }
  require(total > 0 && total <= options_.n_ubatch, "a step of ", total, " tokens, at most ",
          options_.n_ubatch);
  const std::int64_t outputs = shape_of(requests).outputs;
  require(options_.max_outputs == 0 || outputs <= options_.max_outputs, "a step with logits of ",
          outputs, " tokens, at most ", options_.max_outputs);
}

void Session::pack(std::span<const StepRequest> requests, std::span<const Draw> draws) {
  const HParams& h = model_->hparams();
  step_ = {};
  step_.draws.assign(draws.begin(), draws.end());
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
  if (!options_.routing) return;
  const auto layers = static_cast<std::size_t>(h.layers);
  step_.expert_ids.resize(layers);
  planted_ahead_.resize(layers);
  for (std::size_t l = 0; l < layers; ++l) {
    std::vector<std::int32_t>&ids = step_.expert_ids[l], &ahead = planted_ahead_[l];
    ids.assign(static_cast<std::size_t>(row * h.moe.used), 0);
    const std::size_t taken = std::min(ids.size(), ahead.size());
    std::copy_n(ahead.begin(), taken, ids.begin());
    ahead.erase(ahead.begin(), ahead.begin() + static_cast<std::ptrdiff_t>(taken));
    plant(l, std::span(ids).subspan(taken));
    for (const std::int32_t e : ids)
      if (e < 0 || e >= h.moe.experts)
        fail(ErrorCode::invalid_argument,
             str("planted expert ", e, " of ", h.moe.experts, " in layer ", l));
  }
}

void Session::plant(std::size_t layer, std::span<std::int32_t> ids) const {
  if (!ids.empty())
    options_.routing(static_cast<std::int64_t>(layer), std::ssize(ids) / model_->hparams().moe.used,
                     ids.data());
}

void Session::plant_ahead(std::size_t rows) {
  if (!options_.routing) return;
  for (std::size_t l = 0; l < planted_ahead_.size(); ++l) {
    std::vector<std::int32_t>& ahead = planted_ahead_[l];
    if (!ahead.empty()) continue;
    ahead.resize(rows * static_cast<std::size_t>(model_->hparams().moe.used));
    plant(l, ahead);
  }
}

// Decode steps only, where every sequence has one token and wants what follows. Whoever watches a
// step sees it as it is.
StepShape Session::padded(StepShape shape, std::size_t sequences) const {
  const auto n = static_cast<std::int64_t>(sequences);
  const auto bucket = std::ranges::lower_bound(buckets_, n);
  if (shape.rows != n || shape.outputs != n || bucket == buckets_.end() ||
      *bucket > options_.n_ubatch || options_.profile || !options_.taps.empty())
    return shape;
  shape.rows = shape.outputs = *bucket;
  return shape;
}

// Repeats the first row of step_ until it has the shape.
void Session::pad(StepShape shape) {
  const auto rows = static_cast<std::size_t>(shape.rows), had = step_.tokens.size();
  if (rows == had) return;
  step_.tokens.resize(rows, step_.tokens.front());
  step_.positions.resize(rows, step_.positions.front());
  step_.outputs.resize(rows, step_.outputs.front());
  if (shape.sample) step_.draws.resize(rows);
  const auto repeat = [&](std::vector<std::int32_t>& values) {
    const std::size_t width = values.size() / had;
    values.resize(rows * width);
    for (std::size_t r = had; r < rows; ++r)
      std::copy_n(values.begin(), width, values.begin() + static_cast<std::ptrdiff_t>(r * width));
  };
  for (auto& table_rows : step_.ngram_rows) repeat(table_rows);
  for (auto& ids : step_.expert_ids) repeat(ids);
}

std::expected<Logits, Shortage> Session::step(std::span<const StepRequest> requests) {
  check(requests);
  const auto done = advance(requests, {});
  if (!done) return std::unexpected(done.error());
  return logits(**done, 0, shape_of(requests).outputs);
}

std::expected<std::vector<Choice>, Shortage> Session::choose(std::span<const StepRequest> requests,
                                                             std::span<const Draw> draws) {
  check(requests);
  const std::int64_t outputs = shape_of(requests).outputs;
  require(std::ssize(draws) == outputs, draws.size(), " draws for ", outputs, " outputs");
  for (const Draw& d : draws)
    for (const std::int32_t id : d.suppressed)
      require(id >= -1 && id < model_->hparams().vocab, "suppressed token ", id,
              ", the vocabulary has ", model_->hparams().vocab);
  const auto done = advance(requests, draws);
  if (!done) return std::unexpected(done.error());
  std::vector<Choice> choices(draws.size());
  if (draws.empty()) return choices;
  const Program& program = **done;
  const auto* ids =
      reinterpret_cast<const std::int32_t*>(program.executable->data(program.ids, 0, outputs));
  for (std::int64_t i = 0; i < outputs; ++i) {
    Choice& c = choices[static_cast<std::size_t>(i)];
    c.token = ids[i];
    if (c.token < 0) c.logits = logits(program, i, 1);
  }
  return choices;
}

Logits Session::logits(const Program& program, std::int64_t first, std::int64_t rows) const {
  if (rows == 0) return {};
  const Executable& executable = *program.executable;
  return {executable.data(program.results.logits, first, rows), rows, executable.memory()};
}

std::expected<const Program*, Shortage> Session::advance(std::span<const StepRequest> requests,
                                                         std::span<const Draw> draws) {
  for (const StepRequest& r : requests) {
    Sequence& s = find(r.seq);
    const std::int64_t length = std::ssize(s.tokens);
    // Pages that were reserved before another request fell short stay with their sequence, unused.
    if (auto room = memory_.reserve(s.state, length, length + std::ssize(r.tokens)); !room)
      return std::unexpected(room.error());
  }
  StepShape shape = shape_of(requests);
  shape.sample = !draws.empty();
  shape = padded(shape, requests.size());
  Program& program = programs_.get(shape);  // may fail: nothing has changed yet
  arena_bytes_ = std::max(arena_bytes_, program.arena_bytes);
  for (const StepRequest& r : requests) keep_state(find(r.seq));
  try {
    pack(requests, draws);
    pad(shape);
    model_->prefetch_rows(step_.ngram_rows);
    run(program);
    plant_ahead(requests.size());
  } catch (...) {
    abandon(requests);
    throw;
  }
  return &program;
}

// Two checkpoints, at least rollback_tokens apart: the older one is always that far back.
void Session::keep_state(Sequence& s) {
  const std::int64_t length = std::ssize(s.tokens), newest = std::max(s.kept[1], std::int64_t{0});
  if (options_.rollback_tokens == 0 || length - newest < options_.rollback_tokens) return;
  if (s.kept[1] >= 0) {
    memory_.copy_row(memory_.kept_row(s.state, 0), memory_.kept_row(s.state, 1));
    s.kept[0] = s.kept[1];
  }
  memory_.copy_row(memory_.kept_row(s.state, 1), s.state.row);
  s.kept[1] = length;
}

std::int64_t Session::oldest_length(SeqId seq) const {
  const Sequence& s = find(seq);
  return std::max({std::int64_t{0}, s.kept[0], std::ssize(s.tokens) - options_.rollback_tokens});
}

// The newer checkpoint is of tokens that are gone.
void Session::keep_older(Sequence& s) {
  if (s.kept[0] >= 0) memory_.copy_row(memory_.kept_row(s.state, 1), memory_.kept_row(s.state, 0));
  s.kept[1] = s.kept[0];
}

std::expected<void, Shortage> Session::truncate(SeqId seq, std::int64_t length) {
  Sequence& s = usable(seq);
  const std::int64_t now = std::ssize(s.tokens);
  require(length >= 0 && length <= now, "truncating sequence ", seq, " to ", length,
          " tokens, it has ", now);
  if (length == now) return {};
  require(length >= oldest_length(seq), "truncating sequence ", seq, " of ", now, " tokens to ",
          length, ", it can go back to ", oldest_length(seq));
  // The newest state at or before `length`; 0 is the zero state.
  const std::size_t newest = s.kept[1] <= length ? 1 : 0;
  const std::int64_t from = std::max(s.kept[newest], std::int64_t{0});
  // The replay writes what the pages hold already, but not into a page that others read.
  if (from < length)
    if (auto room = memory_.reserve(s.state, from, length); !room) return room;
  memory_.drop_pages(s.state, length);
  if (s.kept[newest] >= 0) {
    memory_.copy_row(s.state.row, memory_.kept_row(s.state, static_cast<int>(newest)));
  } else {
    memory_.clear_row(s.state.row);
  }
  if (newest == 0) keep_older(s);
  const std::vector<std::int32_t> replay(s.tokens.begin() + from, s.tokens.begin() + length);
  s.tokens.resize(static_cast<std::size_t>(from));
  s.failed = true;  // unless the replay comes to its end
  for (std::int64_t at = 0; at < std::ssize(replay);) {
    const std::int64_t n = std::min(options_.n_ubatch, std::ssize(replay) - at);
    const StepRequest part{
        seq, std::span(replay).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(n)),
        n};
    if (auto done = advance({&part, 1}, {}); !done)
      fail(ErrorCode::internal, str("replay: ", done.error().message()));
    at += n;
  }
  s.failed = false;
  return {};
}

Snapshot Session::save(SeqId seq) {
  const Sequence& s = usable(seq);
  Snapshot snapshot{model_hash_, s.tokens, {}, options_.cache_types};
  snapshot.state.resize(memory_.saved_bytes(std::ssize(s.tokens)));
  memory_.save(s.state, std::ssize(s.tokens), snapshot.state.data());
  return snapshot;
}

std::expected<SeqId, Shortage> Session::restore(const Snapshot& snapshot) {
  require(snapshot.model == model_hash_, "the snapshot is of another model");
  require(snapshot.types == options_.cache_types, "the snapshot holds ", describe(snapshot.types),
          ", the session ", describe(options_.cache_types));
  const std::int64_t length = std::ssize(snapshot.tokens);
  require(length <= n_ctx_, "a snapshot of ", length, " tokens, the context holds ", n_ctx_);
  require(snapshot.state.size() == memory_.saved_bytes(length), "a snapshot of ", length,
          " tokens with ", snapshot.state.size(), " bytes, ", memory_.saved_bytes(length),
          " needed");
  for (const std::int32_t t : snapshot.tokens)
    require(t >= 0 && t < model_->hparams().vocab, "token ", t,
            " in a snapshot, the vocabulary has ", model_->hparams().vocab);
  auto state = memory_.load(length, snapshot.state.data());
  if (!state) return std::unexpected(state.error());
  Sequence s{snapshot.tokens, std::move(*state)};
  if (options_.rollback_tokens > 0 && length > 0) {  // what was before needs no replay from zero
    for (const int i : {0, 1}) memory_.copy_row(memory_.kept_row(s.state, i), s.state.row);
    s.kept = {length, length};
  }
  sequences_.emplace(next_id_, std::move(s));
  return next_id_++;
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
      std::memcpy(data.data.data(), program.executable->data(tap.tensor, 0, t.rows), t.bytes());
      taps_.push_back(std::move(data));
    }
  };
  const bool watched = options_.profile || !program.taps.empty();
  program.executable->run(
      step_, memory_.step(),
      watched ? std::function<void(std::size_t)>(after) : std::function<void(std::size_t)>());
}

}  // namespace imp
