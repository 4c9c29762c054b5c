// Compiled steps by shape. The only place that knows which shapes have been seen.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "cpp/model/builder.h"
#include "cpp/runtime/backend.h"

namespace imp {

struct Tap {
  std::string name;
  Tensor tensor;
  std::size_t node;  // readable right after this node
};

struct Program {
  std::shared_ptr<const Graph> graph;
  std::unique_ptr<Executable> executable;
  StepResults results;
  Tensor ids;  // of Sample, if the shape has it
  std::vector<Tap> taps;
  std::size_t arena_bytes = 0;
};

class Programs {
 public:
  Programs(Backend& backend, const Model& model, const StateLayout& state, std::int64_t context,
           std::vector<std::string> tap_patterns, bool planted_routing = false)
      : backend_(backend),
        model_(model),
        state_(state),
        context_(context),
        patterns_(std::move(tap_patterns)),
        planted_routing_(planted_routing) {}

  // Valid until the next call.
  Program& get(StepShape shape);
  std::int64_t compiled() const { return compiled_; }

 private:
  static constexpr std::size_t most_kept = 64;  // least recently used shapes are dropped
  Program make(StepShape shape) const;
  Backend& backend_;
  const Model& model_;
  const StateLayout& state_;
  std::int64_t context_;
  std::vector<std::string> patterns_;
  bool planted_routing_;
  std::int64_t compiled_ = 0;
  std::list<std::pair<StepShape, Program>> programs_;  // most recent first
};

// Shell-style patterns: `*` any run, `?` any one character.
bool matches(std::string_view pattern, std::string_view text);

}  // namespace imp
