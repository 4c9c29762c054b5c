// Building: lifetimes are recorded as nodes are added.
#include "cpp/graph/graph.h"

#include <algorithm>
#include <limits>

#include "cpp/core/error.h"

namespace imp {

std::size_t Graph::index(Tensor t) const {
  if (t.id < 0 || static_cast<std::size_t>(t.id) >= tensors_.size())
    fail(ErrorCode::internal, str("tensor ", t.id, " of a graph with ", tensors_.size()));
  return static_cast<std::size_t>(t.id);
}

Tensor Graph::tensor(std::int64_t rows, std::int64_t cols, DType dtype) {
  if (rows < 0 || cols <= 0)
    fail(ErrorCode::internal, str("tensor of shape [", rows, ", ", cols, "]"));
  tensors_.push_back({.rows = rows, .cols = cols, .dtype = dtype});
  return {static_cast<std::int32_t>(tensors_.size()) - 1};
}

Tensor Graph::alias(Tensor base) {
  TensorInfo copy = info(base);
  copy.name.clear();
  copy.base = root(base);
  copy.writer = copy.last = -1;
  tensors_.push_back(std::move(copy));
  return {static_cast<std::int32_t>(tensors_.size()) - 1};
}

Tensor Graph::root(Tensor t) const { return info(t).base ? info(t).base : t; }

void Graph::touch(Tensor t) {
  const auto node = static_cast<std::int32_t>(nodes_.size());
  for (const Tensor x : {t, root(t)})
    tensors_[index(x)].last = std::max(tensors_[index(x)].last, node);
}

void Graph::keep(Tensor t) {
  tensors_[index(root(t))].last = std::numeric_limits<std::int32_t>::max();
}

void Graph::add(Op op) {
  std::visit(
      [this](const auto& o) {
        o.visit(
            [this](Tensor t) {
              if (info(t).writer < 0)
                fail(ErrorCode::internal, str("tensor ", t.id, " is read before it is written"));
              touch(t);
            },
            [this](Tensor t) {
              TensorInfo& x = tensors_[index(t)];
              if (x.writer >= 0)
                fail(ErrorCode::internal, str("tensor ", t.id, " is written twice"));
              x.writer = static_cast<std::int32_t>(nodes_.size());
              touch(t);
            });
      },
      op);
  nodes_.push_back({std::move(op)});
}

std::string_view op_name(const Op& op) {
  static constexpr std::string_view names[] = {
      "Feed",        "EmbedStreams", "NgramRows",    "GatherOutputs",  "Linear",
      "SwiGlu",      "GroupNorm",    "ResidualMix",  "ResidualInject", "ConvSilu",
      "DeltaRule",   "GatedNorm",    "RopeTable",    "HeadNormRope",   "KvStore",
      "IndexKeys",   "IndexSelect",  "Attend",       "Route",          "ExpertFfn",
      "Combine",     "NgramGate",    "NgramConv",    "Linears",        "LinearMix",
      "InjectNorm",  "MoeFfn",       "AttendInputs", "Sample",         "GatedDeltaNet",
      "ResidualRead"};
  static_assert(std::size(names) == std::variant_size_v<Op>);
  return names[op.index()];
}

}  // namespace imp
