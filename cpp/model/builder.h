// Appends a model's blocks to a step's graph. Block functions take and return tensors; names make
// taps.
#pragma once

#include <string>
#include <string_view>

#include "cpp/core/error.h"
#include "cpp/graph/graph.h"
#include "cpp/model/model.h"
#include "cpp/model/state.h"

namespace imp {

struct StepShape {
  std::int64_t rows = 0;     // tokens of the step
  std::int64_t outputs = 0;  // rows that want logits; 0 = none
  bool sample = false;       // the step chooses the tokens after them
  friend auto operator<=>(const StepShape&, const StepShape&) = default;
};

struct Streams {
  Tensor r;  // [rows, streams * hidden]
  // A write that the next read carries out, or absent: r aliases `before`, which takes y.
  Tensor before, y, inject;
};

struct Mixed {
  Tensor x;       // [rows, hidden] what the block reads
  Tensor inject;  // [rows, streams] how much of its result each stream takes; absent at the end
};

class Builder {
 public:
  Builder(Graph& graph, const Model& model, const StateLayout& state, StepShape shape,
          bool planted_routing)
      : g(graph),
        model(model),
        h(model.hparams()),
        state(state),
        rows(shape.rows),
        shape(shape),
        planted_routing(planted_routing) {}

  Graph& g;
  const Model& model;
  const HParams& h;
  const StateLayout& state;
  std::int64_t rows;
  StepShape shape;
  bool planted_routing;  // expert ids come with the step

  const Weight& weight(const std::string& name) const { return model.weight(name + ".weight"); }
  Vector vector(const std::string& name) const { return model.vector(name + ".weight"); }
  Tensor named(Tensor t, std::string name) {
    g.name(t, std::move(name));
    return t;
  }

  // A linear map's weight by name, and what happens to its result.
  struct Map {
    std::string name;
    float alpha = 1;
    Act act = Act::none;
  };
  Tensor linear(Tensor x, const std::string& name, float alpha = 1, Act act = Act::none);
  // Several maps of one x, in one op.
  std::vector<Tensor> linears(Tensor x, const std::vector<Map>& maps);
  Tensor group_norm(Tensor x, const std::string& name, std::int64_t groups);
  // Reads the residual streams through the gate `<prefix>{norm,down,up[,inject]}`.
  Mixed residual_read(Streams r, const std::string& prefix, bool inject);
  // Leaves the write to the next read if that follows at once.
  Streams residual_write(Tensor r, Tensor y, Tensor inject, bool read_next);
  Tensor delta_net(Tensor x, std::int64_t layer);
  Tensor attention(Tensor x, Tensor rope, std::int64_t layer);
  Tensor moe(Tensor x, std::int64_t layer);
  Tensor ngram(Tensor r, std::size_t index);
};

}  // namespace imp
