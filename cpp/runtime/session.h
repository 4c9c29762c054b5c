// Sequences over one model: opened, extended in steps of any mix, forked, closed.
#pragma once

#include <array>
#include <cstdint>
#include <expected>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpp/memory/sequence_memory.h"
#include "cpp/model/model.h"
#include "cpp/runtime/programs.h"
#include "cpp/runtime/snapshot.h"

namespace imp {

struct SessionOptions {
  std::int64_t n_ctx =
      0;  // tokens of the longest sequence; 0 = what the model was trained for, if it fits
  std::int64_t max_seqs = 1;
  std::int64_t n_ubatch = 512;    // tokens of one step at most
  std::vector<std::string> taps;  // patterns of intermediates to keep a copy of
  bool poison = false;            // NaN in unused memory
  bool profile = false;           // time every op
  // Tokens of cache for all sequences together; 0 = a full context for each, one_context = one.
  std::int64_t cache_tokens = 0;
  std::int64_t rollback_tokens = 0;  // that truncate() can take back; 0 = none
  std::int64_t max_outputs = 0;      // rows of a step that want logits at most; 0 = all
  CacheTypes cache_types;
  // Fills ids [rows, k] of a layer instead of the router, each layer's in the order of its rows;
  // empty = the router's own.
  std::function<void(std::int64_t layer, std::int64_t rows, std::int32_t* ids)> routing;
};
inline constexpr std::int64_t one_context = -1;
inline constexpr std::int64_t max_ctx = std::int64_t{1} << 30;
inline constexpr std::int64_t max_ubatch = 65536;
inline constexpr std::int64_t max_sequences = 65536;
inline constexpr std::int64_t max_rollback = 4096;

using SeqId = std::int64_t;

struct StepRequest {
  SeqId seq = 0;
  std::span<const std::int32_t> tokens;
  std::int64_t first_output = 0;  // logits for tokens[first_output..]; tokens.size() = none
};

struct Logits {
  const float* data = nullptr;  // [rows, vocab], valid until the next step
  std::int64_t rows = 0;
  std::shared_ptr<const void> memory;  // keeps `data` readable, see Executable::memory
};

// What an output came to: its token, or for the host to choose (see Sample) -1 and its logits.
struct Choice {
  std::int32_t token = -1;
  Logits logits;
};

struct TapData {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0;
  std::vector<std::byte> data;
};

struct OpTime {
  double seconds = 0;
  std::int64_t calls = 0;
};

class Session {
 public:
  Session(std::shared_ptr<const Model> model, std::shared_ptr<Backend> backend,
          const SessionOptions& options);

  const Model& model() const { return *model_; }
  Backend& backend() const { return *backend_; }
  std::int64_t n_ctx() const { return n_ctx_; }
  std::int64_t n_ubatch() const { return options_.n_ubatch; }
  std::uint64_t model_hash() const { return model_hash_; }
  std::int64_t open_sequences() const { return std::ssize(sequences_); }
  const SequenceMemory& memory() const { return memory_; }
  CacheTypes cache_types() const { return options_.cache_types; }

  std::expected<SeqId, Shortage> open();
  std::expected<SeqId, Shortage> fork(SeqId seq);
  void close(SeqId seq);
  const std::vector<std::int32_t>& tokens(SeqId seq) const;
  const std::vector<std::int32_t>& pages(SeqId seq) const;
  // Pages that nobody but these sequences holds: what closing them all would free.
  std::int64_t pages_held_by(std::span<const SeqId> seqs) const;

  // Takes back the last tokens, as if they had never been there. At most rollback_tokens at a time,
  // and not past the older checkpoint (see oldest_length). On a Shortage nothing has happened.
  std::expected<void, Shortage> truncate(SeqId seq, std::int64_t length);
  // The shortest length that truncate() takes now.
  std::int64_t oldest_length(SeqId seq) const;

  Snapshot save(SeqId seq);
  // A new sequence that goes on where the saved one was. Fails (invalid_argument) if the snapshot
  // is of another model, of other cache types, or its parts do not fit.
  std::expected<SeqId, Shortage> restore(const Snapshot& snapshot);

  // Runs all requests (different sequences, at most n_ubatch tokens together) in one step. On a
  // Shortage nothing has happened. Tokens are checked first. After an error while the step ran, its
  // sequences can only be closed.
  std::expected<Logits, Shortage> step(std::span<const StepRequest> requests);
  // The same, and chooses the token after each output as its draw says, so that only tokens leave
  // the device. draws: one per output, in order.
  std::expected<std::vector<Choice>, Shortage> choose(std::span<const StepRequest> requests,
                                                      std::span<const Draw> draws);
  // Copies of the last step's named intermediates.
  const std::vector<TapData>& taps() const { return taps_; }
  // Time by op since the session was opened, if options.profile.
  const std::map<std::string, OpTime>& op_times() const { return op_times_; }
  // Shapes of steps compiled so far.
  std::int64_t compiled() const { return programs_.compiled(); }
  // Bytes of activations of the largest step so far.
  std::size_t arena_bytes() const { return arena_bytes_; }

 private:
  struct Sequence {
    std::vector<std::int32_t> tokens;
    SequenceState state;
    bool failed = false;  // its state is half-way through a step
    // Lengths of the two checkpoints of the state, older first; -1 = the zero state, not stored.
    std::array<std::int64_t, 2> kept = {-1, -1};
  };
  // What step() does without taking checkpoints.
  std::expected<const Program*, Shortage> advance(std::span<const StepRequest> requests,
                                                  std::span<const Draw> draws);
  Logits logits(const Program& program, std::int64_t first, std::int64_t rows) const;
  void keep_state(Sequence& s);
  void keep_older(Sequence& s);
  Sequence& find(SeqId seq);
  const Sequence& find(SeqId seq) const;
  Sequence& usable(SeqId seq);
  void abandon(std::span<const StepRequest> requests) noexcept;
  void check(std::span<const StepRequest> requests);
  void pack(std::span<const StepRequest> requests, std::span<const Draw> draws);
  // Ids [rows, k] of planted experts of a layer.
  void plant(std::size_t layer, std::span<std::int32_t> ids) const;
  // Those of the next step's rows, while a device works on this one: no part of a step's time.
  void plant_ahead(std::size_t rows);
  StepShape padded(StepShape shape, std::size_t sequences) const;
  void pad(StepShape shape);
  void run(Program& program);

  std::shared_ptr<const Model> model_;
  std::shared_ptr<Backend> backend_;
  SessionOptions options_;
  std::int64_t n_ctx_;
  std::vector<std::int64_t> buckets_;  // of decode steps, see BackendInfo
  SequenceMemory memory_;
  Programs programs_;
  std::unordered_map<SeqId, Sequence> sequences_;
  SeqId next_id_ = 0;
  StepInputs step_;
  std::vector<std::vector<std::int32_t>> planted_ahead_;  // [layers]
  std::vector<TapData> taps_;
  std::map<std::string, OpTime> op_times_;
  std::size_t arena_bytes_ = 0;
  std::uint64_t model_hash_;
};

}  // namespace imp
