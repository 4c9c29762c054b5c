// The shape of a model, one plain struct per block. Blocks that a model lacks are absent, not zero.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpp/ops/act.h"
#include "cpp/ops/recurrent.h"

namespace imp {

// QSA: each query attends to the `budget / ratio` best blocks of `ratio` tokens, and to the
// incomplete last block.
struct Indexer {
  std::int64_t heads = 0;  // index query heads; one index key head
  std::int64_t key_dim = 0;
  std::int64_t budget = 0;  // tokens taken from complete blocks
  std::int64_t ratio = 0;   // tokens per block
  std::int64_t blocks() const { return budget / ratio; }
};

struct Attention {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t rotary_dim = 0;  // dims 0..rotary_dim of a head are rotated, as halves
  double rope_theta = 0;
  std::optional<Indexer> indexer;
};

struct DeltaNet {
  std::int64_t conv_kernel = 0;
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;  // value head u uses key head u % key_heads
  std::int64_t key_dim = 0;      // of one head
  std::int64_t value_dim = 0;
  Act gate = Act::sigmoid;  // of the output gate
  std::int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  std::int64_t inner() const { return value_heads * value_dim; }
};

struct GatedResidual {
  std::int64_t streams = 0;
  std::int64_t low_rank = 0;
};

struct Moe {
  std::int64_t experts = 0;
  std::int64_t used = 0;
  std::int64_t ff = 0;         // width of a routed expert
  std::int64_t shared_ff = 0;  // width of the shared expert
  bool renormalise = true;     // selected probabilities sum to 1
};

struct NgramLayer {
  std::int64_t layer = 0;                  // 0-based; the block runs at this layer's start
  std::vector<std::uint64_t> multipliers;  // [size]
  std::vector<std::uint64_t> vocab_sizes;  // [heads]
  std::vector<std::uint64_t> offsets;      // [heads]
};

struct Ngram {
  std::int64_t size = 0;  // largest n-gram; also the dilation of the convolution
  std::int64_t heads_per_ngram = 0;
  std::int64_t conv_kernel = 0;
  std::int64_t row_dim = 0;         // width of a table row
  std::int64_t boundary_token = 0;  // cuts the window; also stands for the tokens before the first
  std::vector<NgramLayer> layers;
  std::int64_t heads() const { return (size - 1) * heads_per_ngram; }
  std::int64_t embed_dim() const { return heads() * row_dim; }
  std::int64_t conv_history() const { return (conv_kernel - 1) * size; }
};

struct HParams {
  std::string arch;
  std::int64_t vocab = 0;
  std::int64_t hidden = 0;
  std::int64_t layers = 0;          // without MTP layers
  std::int64_t mtp_layers = 0;      // 0 or 1
  std::int64_t context_length = 0;  // tokens it was trained for
  float norm_eps = 0;
  std::vector<bool> recurrent;  // [layers] delta-net (true) or attention
  Attention attention;
  DeltaNet delta;
  GatedResidual residual;
  Moe moe;
  std::optional<Ngram> ngram;
  std::vector<std::string> notes;  // what the reader had to decide by itself; shown once at load

  std::int64_t wide() const { return residual.streams * hidden; }  // width of the residual streams
};

// Limits that the code relies on; checked when the header is read.
inline constexpr std::int64_t max_layers = 1024;
inline constexpr std::int64_t max_vocab = 1 << 24;
inline constexpr std::int64_t max_width = 1 << 20;  // any row of activations
inline constexpr std::int64_t max_experts = 65536;
inline constexpr std::int64_t max_streams = 64;
inline constexpr std::int64_t max_ngram_size = 8;
inline constexpr std::int64_t max_ngram_heads = 64;
inline constexpr std::int64_t max_index_ratio = 1024;

}  // namespace imp
