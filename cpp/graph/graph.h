// A step as a list of typed op calls. Append-only, static shapes, every tensor written once; never
// rewritten.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/graph/tensor.h"
#include "cpp/ops/all.h"

namespace imp {

struct TensorInfo {
  std::string name;  // empty for unnamed intermediates
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  DType dtype = DType::f32;  // f32 or i32
  Tensor base;               // the tensor whose memory this one shares, if any
  std::int32_t writer = -1;  // node
  std::int32_t last = -1;    // last node that touches it
  std::size_t bytes() const { return static_cast<std::size_t>(rows * cols) * 4; }
};

struct Node {
  Op op;
};

class Graph {
 public:
  // Tensors are made before the op that writes them.
  Tensor tensor(std::int64_t rows, std::int64_t cols, DType dtype = DType::f32);
  Tensor alias(Tensor base);
  // Adds a node; fails (internal) if it reads a tensor that nobody wrote or writes one twice.
  void add(Op op);
  void name(Tensor t, std::string name) { tensors_[index(t)].name = std::move(name); }
  // A kept tensor lives to the end of the graph: results, and intermediates that somebody wants to
  // see.
  void keep(Tensor t);

  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo& info(Tensor t) const { return tensors_[index(t)]; }
  Tensor root(Tensor t) const;

 private:
  std::size_t index(Tensor t) const;
  void touch(Tensor t);
  std::vector<TensorInfo> tensors_;
  std::vector<Node> nodes_;
};

// Where each tensor lives in one arena. Tensors whose lifetimes overlap never share bytes.
struct Plan {
  std::vector<std::size_t> offsets;  // per tensor
  std::size_t bytes = 0;
};
Plan plan(const Graph&);

// One line per node: op, tensors with shapes and offsets.
std::string print(const Graph&, const Plan&);

}  // namespace imp
