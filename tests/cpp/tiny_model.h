// A tiny qwen4exp model: header keys, and a GGUF file with random weights.
#pragma once

#include <bit>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/error.h"
#include "cpp/model/arch.h"
#include "cpp/model/model.h"
#include "tests/cpp/gguf_bytes.h"
#include "tests/cpp/temp_dir.h"

namespace imp::test {

inline constexpr const char* tiny_arch = "qwen4exp";

// Keys by short name, with or without the architecture's prefix.
class Header {
 public:
  Header& number(const std::string& name, std::int64_t v) {
    return set(name, {gguf::ValueType::i64, v});
  }
  Header& real(const std::string& name, double v) { return set(name, {gguf::ValueType::f64, v}); }
  Header& flag(const std::string& name, bool v) { return set(name, {gguf::ValueType::boolean, v}); }
  Header& text(const std::string& name, std::string v) {
    return set(name, {gguf::ValueType::string, std::move(v)});
  }
  Header& numbers(const std::string& name, std::vector<std::int64_t> v) {
    return set(name, {gguf::ValueType::array, gguf::Array{gguf::ValueType::i64, std::move(v)}});
  }
  Header& flags(const std::string& name, std::vector<std::uint8_t> v) {
    return set(name, {gguf::ValueType::array, gguf::Array{gguf::ValueType::boolean, std::move(v)}});
  }
  Header& texts(const std::string& name, std::vector<std::string> v) {
    return set(name, {gguf::ValueType::array, gguf::Array{gguf::ValueType::string, std::move(v)}});
  }
  Header& without(const std::string& name) {
    gguf::KeyValues rest;
    for (const auto& [key, value] : keys_.map())
      if (key != full(name)) rest.set(key, value);
    keys_ = rest;
    return *this;
  }

  const gguf::KeyValues& keys() const { return keys_; }
  HParams read() const { return find_arch(tiny_arch)->read(keys_); }
  // imp.* and names with a colon in front are whole keys.
  static std::string full(const std::string& name) {
    if (name.starts_with(":")) return name.substr(1);
    return name.starts_with("imp.") ? name : str(tiny_arch, ".", name);
  }

 private:
  Header& set(const std::string& name, gguf::Value value) {
    keys_.set(full(name), std::move(value));
    return *this;
  }
  gguf::KeyValues keys_;
};

// Four layers (three delta-nets, one attention with an indexer), an n-gram block in layer 1.
inline Header tiny_header() {
  Header h;
  h.text(":general.architecture", tiny_arch);
  h.number("vocab_size", 32).number("embedding_length", 16).number("block_count", 4);
  h.number("context_length", 256).real("attention.layer_norm_rms_epsilon", 1e-6);
  h.number("attention.head_count", 2).number("attention.head_count_kv", 1);
  h.number("attention.key_length", 8).number("attention.value_length", 8);
  h.number("rope.dimension_count", 4).real("rope.freq_base", 1e6);
  h.number("attention.indexer.head_count", 2).number("attention.indexer.key_length", 8);
  h.number("attention.indexer.top_k", 8).numbers("attention.compress_ratios", {0, 0, 0, 4});
  h.number("ssm.conv_kernel", 4).number("ssm.group_count", 1).number("ssm.time_step_rank", 2);
  h.number("ssm.state_size", 8).number("ssm.inner_size", 16);
  h.number("hyper_connection.count", 2).number("hyper_connection.low_rank", 4);
  h.number("expert_count", 4).number("expert_used_count", 2);
  h.number("expert_feed_forward_length", 8).number("expert_shared_feed_forward_length", 8);
  h.numbers("ple.layers", {1}).number("ple.ngram_size", 3).number("ple.heads_per_ngram", 2);
  h.number("ple.conv_kernel", 4).number("embedding_length_per_layer_input", 4);
  h.number("ple.eos_token_id", 0).numbers("ple.layer_multipliers", {7919, 104729, 1299709});
  h.numbers("ple.head_vocab_sizes", {11, 13, 17, 19}).numbers("ple.head_offsets", {0, 11, 24, 41});
  return h;
}

inline void put_value(gguf::test::Bytes& out, const std::string& key, const gguf::Value& value) {
  out.key(key, value.type);
  if (const auto* a = std::get_if<gguf::Array>(&value.data)) {
    out.array(a->element, a->size());
    for (const std::int64_t x : std::get<std::vector<std::int64_t>>(a->data)) out.put(x);
  } else if (const auto* s = std::get_if<std::string>(&value.data)) {
    out.string(*s);
  } else if (const auto* d = std::get_if<double>(&value.data)) {
    out.put(*d);
  } else {
    out.put(std::get<std::int64_t>(value.data));
  }
}

// Writes the model, all weights F32, and loads it.
inline std::shared_ptr<const Model> tiny_model(const TempDir& dir,
                                               const Header& header = tiny_header()) {
  const std::vector<TensorSpec> specs = find_arch(tiny_arch)->tensors(header.read());
  gguf::test::Bytes out;
  out.header(specs.size(), header.keys().map().size());
  for (const auto& [key, value] : header.keys().map()) put_value(out, key, value);
  std::vector<std::uint64_t> sizes;
  std::uint64_t offset = 0;
  for (const TensorSpec& spec : specs) {
    std::uint64_t n = 1;
    for (const std::int64_t d : spec.dims) n *= static_cast<std::uint64_t>(d);
    out.tensor(spec.name, {spec.dims.begin(), spec.dims.end()}, 0, offset);
    sizes.push_back(n);
    offset += (n * 4 + 31) / 32 * 32;
  }
  std::mt19937 rng(1);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    out.pad();
    const bool decay = specs[i].name.ends_with("ssm_a");
    for (std::uint64_t k = 0; k < sizes[i]; ++k) {
      const float x = std::uniform_real_distribution<float>(-1, 1)(rng);
      out.put(decay ? -0.5f - 0.5f * x * x : 0.5f * x);
    }
  }
  out.pad();
  const std::string bytes(reinterpret_cast<const char*>(out.span().data()), out.size());
  return Model::load(dir.write("tiny.gguf", bytes));
}

}  // namespace imp::test
