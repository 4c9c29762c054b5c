// Qwen3.8-Flash-Next (HF `qwen4_exp`, GGUF `qwen4exp`): gated delta-net and sparse attention layers
// over several residual streams, a routed and a shared expert in each, a hashed n-gram block, an
// optional MTP layer.
#pragma once

#include "cpp/model/arch.h"

namespace imp {

extern const Arch qwen4_exp;

// Name of the table of the index-th n-gram layer. A table has at least the rows of its spec,
// usually a few more.
std::string ngram_table_name(std::size_t index, std::int64_t layer);

}  // namespace imp
