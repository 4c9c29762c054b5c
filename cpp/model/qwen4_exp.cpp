// Header and tensor table of qwen4exp. Keys and names are llama.cpp's; what it has no key for
// starts with `imp.`.
#include "cpp/model/qwen4_exp.h"

#include <algorithm>

#include "cpp/core/error.h"
#include "cpp/model/builder.h"

namespace imp {
namespace {

using gguf::KeyValues;

// Reads keys under one prefix and checks each value where it enters.
class Keys {
 public:
  Keys(const KeyValues& kv, std::string prefix) : kv_(kv), prefix_(std::move(prefix)) {}

  std::string key(std::string_view name) const { return prefix_ + std::string(name); }
  std::int64_t size(std::string_view name, std::int64_t most) const {
    return check(name, kv_.need_integer(key(name)), most);
  }
  std::int64_t size_or(std::string_view name, std::int64_t fallback, std::int64_t most) const {
    const auto v = kv_.integer(key(name));
    return v ? check(name, *v, most) : fallback;
  }
  // A number, or an array with the same number for every layer.
  std::int64_t uniform(std::string_view name, std::int64_t most) const {
    const gguf::Value* v = kv_.find(key(name));
    if (v == nullptr || v->type != gguf::ValueType::array) return size(name, most);
    const auto values = *kv_.integers(key(name));
    if (values.empty()) fail(ErrorCode::bad_file, str("key ", key(name), " is an empty array"));
    for (const std::int64_t x : values)
      if (x != values.front())
        fail(ErrorCode::unsupported,
             str("key ", key(name), " differs between layers: ", values.front(), " and ", x));
    return check(name, values.front(), most);
  }

 private:
  std::int64_t check(std::string_view name, std::int64_t v, std::int64_t most) const {
    if (v < 1 || v > most)
      fail(ErrorCode::unsupported, str("key ", key(name), " is ", v, ", imp takes 1 to ", most));
    return v;
  }
  const KeyValues& kv_;
  std::string prefix_;
};

void require(bool ok, const std::string& sentence) {
  if (!ok) fail(ErrorCode::unsupported, sentence);
}

Act gate_activation(const KeyValues& kv) {
  const std::string name = kv.string("imp.output_gate_type").value_or("sigmoid");
  if (name == "sigmoid") return Act::sigmoid;
  require(name == "silu" || name == "swish",
          str("imp.output_gate_type is '", name, "', imp knows sigmoid and silu"));
  return Act::silu;
}

std::vector<bool> recurrent_layers(const KeyValues& kv, const Keys& keys, std::int64_t layers) {
  if (auto flags = kv.booleans(keys.key("attention.recurrent_layers"))) {
    require(std::ssize(*flags) >= layers,
            str("key ", keys.key("attention.recurrent_layers"), " has ", flags->size(),
                " entries for ", layers, " layers"));
    flags->resize(static_cast<std::size_t>(layers));
    return *flags;
  }
  const std::int64_t interval = keys.size_or("full_attention_interval", 4, max_layers);
  std::vector<bool> flags(static_cast<std::size_t>(layers));
  for (std::int64_t l = 0; l < layers; ++l)
    flags[static_cast<std::size_t>(l)] = (l + 1) % interval != 0;
  return flags;
}

std::optional<Indexer> indexer(const KeyValues& kv, const Keys& keys, HParams& h) {
  if (!kv.has(keys.key("attention.indexer.head_count"))) return std::nullopt;
  Indexer x;
  x.heads = keys.size("attention.indexer.head_count", max_width);
  x.key_dim = keys.size("attention.indexer.key_length", max_width);
  x.budget = keys.size("attention.indexer.top_k", std::int64_t{1} << 31);
  const auto ratios =
      kv.integers(keys.key("attention.compress_ratios")).value_or(std::vector<std::int64_t>{});
  for (std::int64_t l = 0; l < h.layers && l < std::ssize(ratios); ++l) {
    const std::int64_t r = ratios[static_cast<std::size_t>(l)];
    if (h.recurrent[static_cast<std::size_t>(l)] || r == 0) continue;
    require(x.ratio == 0 || x.ratio == r,
            str("compress ratios ", x.ratio, " and ", r, " in one model"));
    x.ratio = r;
  }
  if (x.ratio == 0) {  // some converters write zeros although the layers are indexed
    x.ratio = 4;
    if (std::ranges::find(h.recurrent, false) != h.recurrent.end())
      h.notes.push_back(
          "all compress ratios are 0 although the file has an indexer: using 4 tokens per block");
  }
  require(x.ratio >= 1 && x.ratio <= max_index_ratio,
          str("compress ratio ", x.ratio, ", imp takes 1 to ", max_index_ratio));
  require(x.budget % x.ratio == 0,
          str("indexer budget ", x.budget, " is not a multiple of the ratio ", x.ratio));
  require(x.key_dim >= h.attention.rotary_dim,
          str("indexer key length ", x.key_dim, " is below the rotary dimension ",
              h.attention.rotary_dim));
  return x;
}

std::optional<Ngram> ngram(const KeyValues& kv, const Keys& keys, const HParams& h) {
  const auto layers = kv.integers(keys.key("ple.layers")).value_or(std::vector<std::int64_t>{});
  if (layers.empty()) return std::nullopt;
  Ngram g;
  g.size = keys.size("ple.ngram_size", max_ngram_size);
  require(g.size >= 2, str("n-gram size ", g.size, ", at least 2 needed"));
  g.heads_per_ngram = keys.size("ple.heads_per_ngram", max_ngram_heads);
  require(g.heads() <= max_ngram_heads,
          str(g.heads(), " n-gram heads, imp takes up to ", max_ngram_heads));
  g.conv_kernel = keys.size("ple.conv_kernel", max_conv_kernel);
  g.row_dim = keys.size("embedding_length_per_layer_input", max_width);
  g.boundary_token = kv.need_integer(keys.key("ple.eos_token_id"));
  require(
      g.boundary_token >= 0 && g.boundary_token < h.vocab,
      str("n-gram boundary token ", g.boundary_token, " is outside the vocabulary of ", h.vocab));
  const auto part = [&](std::string_view name, std::int64_t each) {
    auto v = kv.unsigneds(keys.key(name)).value_or(std::vector<std::uint64_t>{});
    require(std::ssize(v) == each * std::ssize(layers),
            str("key ", keys.key(name), " has ", v.size(), " entries, ", each * std::ssize(layers),
                " needed"));
    return v;
  };
  const auto multipliers = part("ple.layer_multipliers", g.size);
  const auto sizes = part("ple.head_vocab_sizes", g.heads());
  const auto offsets = part("ple.head_offsets", g.heads());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    NgramLayer n;
    n.layer = layers[i];
    require(n.layer >= 0 && n.layer < h.layers, str("n-gram layer ", n.layer, " of ", h.layers));
    require(i == 0 || n.layer > layers[i - 1], "n-gram layers are not ascending");
    const auto slice = [i](const std::vector<std::uint64_t>& v, std::int64_t each) {
      const auto first = v.begin() + static_cast<std::int64_t>(i) * each;
      return std::vector<std::uint64_t>(first, first + each);
    };
    n.multipliers = slice(multipliers, g.size);
    n.vocab_sizes = slice(sizes, g.heads());
    n.offsets = slice(offsets, g.heads());
    for (std::size_t k = 0; k < n.offsets.size(); ++k) {
      require(n.vocab_sizes[k] > 0, str("n-gram head ", k, " has an empty vocabulary"));
      constexpr std::uint64_t most_rows = 0x7fffffff;
      require(n.offsets[k] <= most_rows && n.vocab_sizes[k] <= most_rows - n.offsets[k],
              str("n-gram head ", k, " ends at row ", n.offsets[k] + n.vocab_sizes[k],
                  ", imp takes up to ", most_rows));
    }
    g.layers.push_back(std::move(n));
  }
  return g;
}

std::int64_t vocabulary(const KeyValues& kv, const Keys& keys) {
  if (kv.has(keys.key("vocab_size"))) return keys.size("vocab_size", max_vocab);
  const auto tokens = kv.strings("tokenizer.ggml.tokens");
  if (!tokens)
    fail(ErrorCode::bad_file,
         str("neither ", keys.key("vocab_size"), " nor tokenizer.ggml.tokens is there"));
  require(!tokens->empty() && std::ssize(*tokens) <= max_vocab,
          str("vocabulary of ", tokens->size(), " tokens, imp takes 1 to ", max_vocab));
  return std::ssize(*tokens);
}

HParams read(const KeyValues& kv) {
  const Keys keys(kv, "qwen4exp.");
  HParams h;
  h.arch = "qwen4exp";
  h.vocab = vocabulary(kv, keys);
  h.hidden = keys.size("embedding_length", max_width);
  const std::int64_t blocks = keys.size("block_count", max_layers);
  h.mtp_layers = kv.integer(keys.key("nextn_predict_layers")).value_or(0);
  require(h.mtp_layers >= 0 && h.mtp_layers <= 1 && h.mtp_layers < blocks,
          str(h.mtp_layers, " MTP layers of ", blocks, " blocks; imp takes 0 or 1"));
  h.layers = blocks - h.mtp_layers;
  h.context_length = keys.size("context_length", std::int64_t{1} << 31);
  h.norm_eps = static_cast<float>(kv.need_number(keys.key("attention.layer_norm_rms_epsilon")));
  require(h.norm_eps >= 0 && h.norm_eps < 1, str("norm epsilon ", h.norm_eps));
  const std::string act = kv.string("imp.hidden_act").value_or("silu");
  require(act == "silu", str("imp.hidden_act is '", act, "', imp knows silu"));
  h.recurrent = recurrent_layers(kv, keys, h.layers);

  Attention& a = h.attention;
  a.heads = keys.uniform("attention.head_count", max_width);
  a.kv_heads = keys.uniform("attention.head_count_kv", max_width);
  a.head_dim = keys.size("attention.key_length", max_width);
  require(keys.size("attention.value_length", max_width) == a.head_dim,
          "key and value lengths differ");
  require(a.heads % a.kv_heads == 0,
          str(a.heads, " query heads do not divide into ", a.kv_heads, " KV heads"));
  a.rotary_dim = keys.size("rope.dimension_count", max_width);
  require(a.rotary_dim <= a.head_dim && a.rotary_dim % 2 == 0,
          str("rotary dimension ", a.rotary_dim, " of a head of ", a.head_dim));
  a.rope_theta = kv.need_number(keys.key("rope.freq_base"));
  require(a.rope_theta > 1, str("rope base ", a.rope_theta));
  a.indexer = indexer(kv, keys, h);

  DeltaNet& d = h.delta;
  d.conv_kernel = keys.size("ssm.conv_kernel", max_conv_kernel);
  d.key_heads = keys.size("ssm.group_count", max_width);
  d.value_heads = keys.size("ssm.time_step_rank", max_width);
  d.key_dim = keys.size("ssm.state_size", max_width);
  const std::int64_t inner = keys.size("ssm.inner_size", max_width);
  require(inner % d.value_heads == 0,
          str("inner size ", inner, " does not divide into ", d.value_heads, " heads"));
  require(d.value_heads % d.key_heads == 0,
          str(d.value_heads, " value heads do not divide into ", d.key_heads));
  d.value_dim = inner / d.value_heads;
  d.gate = gate_activation(kv);

  h.residual.streams = keys.size("hyper_connection.count", max_streams);
  require(h.residual.streams > 1, "one residual stream; at least 2 needed");
  h.residual.low_rank = keys.size("hyper_connection.low_rank", max_width);
  require(h.wide() <= max_width, str("residual width ", h.wide(), ", imp takes up to ", max_width));

  Moe& m = h.moe;
  m.experts = keys.size("expert_count", max_experts);
  m.used = keys.size("expert_used_count", max_experts);
  require(m.used <= m.experts, str(m.used, " experts used of ", m.experts));
  m.ff = keys.uniform("expert_feed_forward_length", max_width);
  m.shared_ff = keys.uniform("expert_shared_feed_forward_length", max_width);
  m.renormalise = kv.boolean("imp.norm_topk_prob").value_or(true);

  h.ngram = ngram(kv, keys, h);
  return h;
}

class Table {
 public:
  explicit Table(const HParams& h) : h_(h) {}

  std::vector<TensorSpec> take() {
    add("token_embd.weight", {h_.hidden, h_.vocab}, Role::embedding);
    add("output.weight", {h_.hidden, h_.vocab}, Role::matrix, false);
    hyper("output_hc_", false);
    if (h_.ngram)
      for (std::size_t i = 0; i < h_.ngram->layers.size(); ++i) ngram(i);
    for (std::int64_t l = 0; l < h_.layers; ++l)
      layer(l, h_.recurrent[static_cast<std::size_t>(l)]);
    if (h_.mtp_layers > 0) mtp(h_.layers);
    return std::move(specs_);
  }

 private:
  void add(std::string name, std::vector<std::int64_t> dims, Role role, bool required = true) {
    specs_.push_back({std::move(name), std::move(dims), role, required});
  }
  // The read gate of the residual streams: `<prefix>norm`, `down`, `up` and, inside a layer,
  // `inject`.
  void hyper(const std::string& prefix, bool inject) {
    add(prefix + "norm.weight", {h_.wide()}, Role::vector);
    add(prefix + "down.weight", {h_.wide(), h_.residual.low_rank}, Role::matrix);
    add(prefix + "up.weight", {h_.residual.low_rank, h_.wide()}, Role::matrix);
    if (inject) add(prefix + "inject.weight", {h_.wide(), h_.residual.streams}, Role::matrix);
  }
  void layer(std::int64_t l, bool recurrent) {
    const std::string b = str("blk.", l, ".");
    hyper(b + "hc_attn_", true);
    hyper(b + "hc_ffn_", true);
    recurrent ? delta(b) : attention(b);
    moe(b);
  }
  void delta(const std::string& b) {
    const DeltaNet& d = h_.delta;
    add(b + "attn_qkv.weight", {h_.hidden, d.channels()}, Role::matrix);
    add(b + "attn_gate.weight", {h_.hidden, d.inner()}, Role::matrix);
    add(b + "ssm_alpha.weight", {h_.hidden, d.value_heads}, Role::matrix);
    add(b + "ssm_beta.weight", {h_.hidden, d.value_heads}, Role::matrix);
    add(b + "ssm_conv1d.weight", {d.conv_kernel, d.channels()}, Role::vector);
    add(b + "ssm_dt.bias", {d.value_heads}, Role::vector);
    add(b + "ssm_a", {d.value_heads}, Role::vector);
    add(b + "ssm_norm.weight", {d.value_dim}, Role::vector);
    add(b + "ssm_out.weight", {d.inner(), h_.hidden}, Role::matrix);
  }
  void attention(const std::string& b) {
    const Attention& a = h_.attention;
    add(b + "attn_q.weight", {h_.hidden, 2 * a.heads * a.head_dim}, Role::matrix);
    add(b + "attn_k.weight", {h_.hidden, a.kv_heads * a.head_dim}, Role::matrix);
    add(b + "attn_v.weight", {h_.hidden, a.kv_heads * a.head_dim}, Role::matrix);
    add(b + "attn_output.weight", {a.heads * a.head_dim, h_.hidden}, Role::matrix);
    add(b + "attn_q_norm.weight", {a.head_dim}, Role::vector);
    add(b + "attn_k_norm.weight", {a.head_dim}, Role::vector);
    if (!a.indexer) return;
    add(b + "indexer.q_proj.weight", {h_.hidden, a.indexer->heads * a.indexer->key_dim},
        Role::matrix);
    add(b + "indexer.k_proj.weight", {h_.hidden, a.indexer->key_dim}, Role::matrix);
    add(b + "indexer.q_norm.weight", {a.indexer->key_dim}, Role::vector);
    add(b + "indexer.k_norm.weight", {a.indexer->key_dim}, Role::vector);
  }
  void moe(const std::string& b) {
    const Moe& m = h_.moe;
    add(b + "ffn_gate_inp.weight", {h_.hidden, m.experts}, Role::router);
    add(b + "ffn_gate_exps.weight", {h_.hidden, m.ff, m.experts}, Role::experts);
    add(b + "ffn_up_exps.weight", {h_.hidden, m.ff, m.experts}, Role::experts);
    add(b + "ffn_down_exps.weight", {m.ff, h_.hidden, m.experts}, Role::experts);
    add(b + "ffn_gate_shexp.weight", {h_.hidden, m.shared_ff}, Role::matrix);
    add(b + "ffn_up_shexp.weight", {h_.hidden, m.shared_ff}, Role::matrix);
    add(b + "ffn_down_shexp.weight", {m.shared_ff, h_.hidden}, Role::matrix);
    add(b + "ffn_gate_inp_shexp.weight", {h_.hidden}, Role::router);
  }
  void ngram(std::size_t i) {
    const Ngram& g = *h_.ngram;
    const std::string b = str("blk.", g.layers[i].layer, ".");
    std::int64_t rows = 0;
    for (std::size_t k = 0; k < g.layers[i].offsets.size(); ++k)
      rows = std::max(
          rows, static_cast<std::int64_t>(g.layers[i].offsets[k] + g.layers[i].vocab_sizes[k]));
    add(ngram_table_name(i, g.layers[i].layer), {g.row_dim, rows}, Role::table);
    add(b + "ple_key.weight", {g.embed_dim(), h_.wide()}, Role::matrix);
    add(b + "ple_value.weight", {g.embed_dim(), h_.hidden}, Role::matrix);
    add(b + "ple_norm_key.weight", {h_.wide()}, Role::vector);
    add(b + "ple_norm_query.weight", {h_.wide()}, Role::vector);
    add(b + "ple_norm_conv.weight", {h_.wide()}, Role::vector);
    add(b + "ple_conv1d.weight", {g.conv_kernel, h_.wide()}, Role::filter);
  }
  void mtp(std::int64_t l) {
    layer(l, false);
    const std::string b = str("blk.", l, ".nextn.");
    add(b + "eh_proj.weight", {2 * h_.hidden, h_.hidden}, Role::matrix);
    add(b + "enorm.weight", {h_.hidden}, Role::vector);
    add(b + "hnorm.weight", {h_.wide()}, Role::vector);
    hyper(b + "hc_head_", false);
  }

  const HParams& h_;
  std::vector<TensorSpec> specs_;
};

std::vector<TensorSpec> tensors(const HParams& h) { return Table(h).take(); }

StepResults build(Builder& b) {
  const HParams& h = b.h;
  Streams r{b.g.tensor(b.rows, h.wide())};
  b.g.add(EmbedStreams{&b.weight("token_embd"), h.residual.streams, r.r});
  const Tensor rope = b.g.tensor(b.rows, h.attention.rotary_dim);
  b.g.add(RopeTable{h.attention.rotary_dim, h.attention.rope_theta, rope});

  std::size_t next_ngram = 0;
  for (std::int64_t l = 0; l < h.layers; ++l) {
    const std::string blk = str("blk.", l, ".");
    const auto has_ngram = [&](std::int64_t layer) {
      return h.ngram && next_ngram < h.ngram->layers.size() &&
             h.ngram->layers[next_ngram].layer == layer;
    };
    if (has_ngram(l)) r = {b.named(b.ngram(r.r, next_ngram++), blk + "ngram_out")};
    const bool recurrent = h.recurrent[static_cast<std::size_t>(l)];
    Mixed m = b.residual_read(r, blk + "hc_attn_", true);
    b.named(m.x, blk + "attn_in");
    const Tensor mixer = recurrent ? b.delta_net(m.x, l) : b.attention(m.x, rope, l);
    r = b.residual_write(r.r, b.named(mixer, blk + "attn_out"), m.inject, true);
    m = b.residual_read(r, blk + "hc_ffn_", true);
    b.named(m.x, blk + "ffn_in");
    // The n-gram block and the last layer's choice of rows come between a write and its next read.
    const bool read_next = l + 1 < h.layers && !has_ngram(l + 1);
    r = b.residual_write(r.r, b.named(b.moe(m.x, l), blk + "ffn_out"), m.inject, read_next);
    b.named(r.r, blk + "residual");
  }
  if (b.shape.outputs == 0) return {};
  const Tensor last = b.g.tensor(b.shape.outputs, h.wide());
  b.g.add(GatherOutputs{r.r, last});
  const Mixed final_mix = b.residual_read({last}, "output_hc_", false);
  b.named(final_mix.x, "result_norm");
  return {b.named(b.linear(final_mix.x, "output"), "logits")};
}

}  // namespace

std::string ngram_table_name(std::size_t index, std::int64_t layer) {
  return index == 0 ? "per_layer_token_embd.weight"
                    : str("blk.", layer, ".per_layer_token_embd.weight");
}

const Arch qwen4_exp = {"qwen4exp", read, tensors, build};

}  // namespace imp
