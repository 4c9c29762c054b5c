// An architecture: how its header is read, which tensors it has, what a sequence owns, and how a
// step is built. The tensor table is the only one: the loader requires it and the converter writes
// it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpp/gguf/key_values.h"
#include "cpp/graph/tensor.h"
#include "cpp/model/hparams.h"

namespace imp {

enum class Role : std::uint8_t {
  vector,     // norms, biases, small vectors: F32 in a file
  filter,     // convolution taps [channels, taps], any float type
  matrix,     // a linear map, `dense` type; may carry `<name>.scale`
  router,     // a linear map that stays F32
  embedding,  // token rows
  experts,    // one matrix per expert, contiguous; may carry `.scale` [experts]
  table,      // the n-gram table: mapped, never resident
};

struct TensorSpec {
  std::string name;                // GGUF name, with `.weight`
  std::vector<std::int64_t> dims;  // fastest-varying first (ggml's ne)
  Role role;
  bool required = true;  // optional: absent `output.weight` means tied embeddings
};

class Builder;

// Results of a step's graph.
struct StepResults {
  Tensor logits;  // [outputs, vocab]; absent if no row wants them
};

struct Arch {
  std::string_view name;                    // general.architecture
  HParams (*read)(const gguf::KeyValues&);  // fails naming the key and both values
  std::vector<TensorSpec> (*tensors)(const HParams&);
  StepResults (*build)(Builder&);  // one step over a batch of tokens
};

// nullptr if imp does not run it.
const Arch* find_arch(std::string_view name);
std::span<const Arch* const> archs();

// `blk.3.ffn_up_exps.weight` -> `blk.3.ffn_up_exps.scale`
std::string scale_name(std::string_view weight_name);

}  // namespace imp
