// The blocks of the qwen4 family, each a few op calls.
#include "cpp/model/builder.h"

#include "cpp/model/qwen4_exp.h"

namespace imp {

Tensor Builder::linear(Tensor x, const std::string& name, float alpha, Act act) {
  const Weight& w = weight(name);
  const Tensor y = g.tensor(g.info(x).rows, w.rows);
  g.add(Linear{x, &w, y, alpha, act});
  return y;
}

Tensor Builder::group_norm(Tensor x, const std::string& name, std::int64_t groups) {
  const Tensor y = g.tensor(g.info(x).rows, g.info(x).cols);
  g.add(GroupNorm{x, vector(name), groups, h.norm_eps, y});
  return y;
}

Mixed Builder::residual_read(Tensor r, const std::string& prefix, bool inject) {
  const std::int64_t streams = h.residual.streams;
  const float mean = 1.0f / static_cast<float>(streams);
  const Tensor n = group_norm(r, prefix + "norm", streams);
  const Tensor low = linear(n, prefix + "down", mean, Act::silu);
  const Tensor gate = linear(low, prefix + "up");
  Mixed m;
  m.x = g.tensor(g.info(r).rows, h.hidden);
  g.add(ResidualMix{n, gate, streams, m.x});
  if (inject) m.inject = linear(n, prefix + "inject", mean, Act::sigmoid);
  return m;
}

Tensor Builder::residual_write(Tensor r, Tensor y, Tensor inject) {
  const Tensor out = g.alias(r);
  g.add(ResidualInject{r, y, inject, out});
  return out;
}

Tensor Builder::delta_net(Tensor x, std::int64_t layer) {
  const DeltaNet& d = h.delta;
  const std::string b = str("blk.", layer, ".");
  const auto l = static_cast<std::size_t>(layer);
  const Tensor mixed = linear(x, b + "attn_qkv");
  const Tensor z = linear(x, b + "attn_gate");
  const Tensor alpha = linear(x, b + "ssm_alpha");
  const Tensor beta = linear(x, b + "ssm_beta");
  const Tensor qkv = g.tensor(rows, d.channels());
  g.add(ConvSilu{mixed, vector(b + "ssm_conv1d"), d.conv_kernel, state.conv[l], qkv});
  const Tensor gates = g.tensor(rows, 2 * d.value_heads);
  const Tensor o = g.tensor(rows, d.inner());
  g.add(DeltaRule{qkv, alpha, beta, model.vector(b + "ssm_a"), model.vector(b + "ssm_dt.bias"),
                  d.key_heads, d.value_heads, d.key_dim, d.value_dim, state.delta[l], gates, o});
  const Tensor y = g.tensor(rows, d.inner());
  g.add(GatedNorm{o, z, vector(b + "ssm_norm"), d.value_dim, h.norm_eps, d.gate, y});
  return linear(y, b + "ssm_out");
}

Tensor Builder::attention(Tensor x, Tensor rope, std::int64_t layer) {
  const Attention& a = h.attention;
  const std::string b = str("blk.", layer, ".");
  const auto l = static_cast<std::size_t>(layer);
  const std::int64_t cache = state.cache[l];
  const Tensor qg = linear(x, b + "attn_q");
  const Tensor k_raw = linear(x, b + "attn_k");
  const Tensor v = linear(x, b + "attn_v");
  const Tensor q = g.tensor(rows, a.heads * a.head_dim);
  g.add(HeadNormRope{qg, rope, vector(b + "attn_q_norm"), a.heads, a.head_dim, 2 * a.head_dim,
                     a.rotary_dim, h.norm_eps, q});
  const Tensor k = g.tensor(rows, a.kv_heads * a.head_dim);
  g.add(HeadNormRope{k_raw, rope, vector(b + "attn_k_norm"), a.kv_heads, a.head_dim, a.head_dim,
                     a.rotary_dim, h.norm_eps, k});
  const Tensor stored = g.tensor(1, 1);
  g.add(KvStore{k, v, cache, a.kv_heads * a.head_dim, stored});
  Tensor selected;
  if (a.indexer) {
    const Indexer& x_ = *a.indexer;
    const Tensor iq_raw = linear(x, b + "indexer.q_proj");
    const Tensor iq = g.tensor(rows, x_.heads * x_.key_dim);
    g.add(HeadNormRope{iq_raw, rope, vector(b + "indexer.q_norm"), x_.heads, x_.key_dim, x_.key_dim,
                       a.rotary_dim, h.norm_eps, iq});
    const Tensor raw = linear(x, b + "indexer.k_proj");
    const Tensor keys = g.tensor(1, 1);
    g.add(IndexKeys{raw, vector(b + "indexer.k_norm"), cache, x_.key_dim, x_.ratio, a.rotary_dim,
                    a.rope_theta, h.norm_eps, state.index[l], keys});
    selected = named(g.tensor(rows, std::max<std::int64_t>(1, x_.blocks()), DType::i32),
                     b + "index_selected");
    g.add(IndexSelect{iq, keys, cache, x_.heads, x_.key_dim, x_.ratio, x_.blocks(), selected});
  }
  const Tensor y = g.tensor(rows, a.heads * a.head_dim);
  g.add(Attend{q, qg, stored, selected, cache, a.heads, a.kv_heads, a.head_dim,
               a.indexer ? a.indexer->ratio : 1, a.indexer ? a.indexer->blocks() : 0, y});
  return linear(y, b + "attn_output");
}

Tensor Builder::moe(Tensor x, std::int64_t layer) {
  const Moe& m = h.moe;
  const std::string b = str("blk.", layer, ".");
  const Tensor logits = named(linear(x, b + "ffn_gate_inp"), b + "router_logits");
  const Tensor ids = named(g.tensor(rows, m.used, DType::i32), b + "expert_ids");
  const Tensor weights = named(g.tensor(rows, m.used), b + "expert_weights");
  g.add(Route{logits, m.used, m.renormalise, ids, weights});
  const Tensor slots = g.tensor(rows * m.used, h.hidden);
  g.add(ExpertFfn{x, ids, &model.experts(b + "ffn_gate_exps.weight"),
                  &model.experts(b + "ffn_up_exps.weight"),
                  &model.experts(b + "ffn_down_exps.weight"), g.tensor(rows * m.used, m.ff),
                  g.tensor(rows * m.used, m.ff), slots});
  const Tensor gate = linear(x, b + "ffn_gate_shexp");
  const Tensor up = linear(x, b + "ffn_up_shexp");
  const Tensor hidden = g.tensor(rows, m.shared_ff);
  g.add(SwiGlu{gate, up, hidden});
  const Tensor shared = linear(hidden, b + "ffn_down_shexp");
  const Tensor shared_gate = linear(x, b + "ffn_gate_inp_shexp", 1, Act::sigmoid);
  const Tensor y = g.tensor(rows, h.hidden);
  g.add(Combine{slots, weights, shared, shared_gate, y});
  return y;
}

Tensor Builder::ngram(Tensor r, std::size_t index) {
  const Ngram& n = *h.ngram;
  const std::int64_t layer = n.layers[index].layer, streams = h.residual.streams;
  const std::string b = str("blk.", layer, ".");
  const Weight& table = model.weight(ngram_table_name(index, layer));
  const Tensor e = named(g.tensor(rows, n.embed_dim()), b + "ngram_embed");
  g.add(NgramRows{&table, n.heads(), static_cast<std::int64_t>(index), e});
  const Tensor key = linear(e, b + "ple_key");
  const Tensor v = linear(e, b + "ple_value");
  const Tensor value = g.tensor(rows, h.wide());
  const Tensor normed = g.tensor(rows, h.wide());
  g.add(NgramGate{r, key, v, vector(b + "ple_norm_key"), vector(b + "ple_norm_query"),
                  vector(b + "ple_norm_conv"), streams, h.norm_eps, value, normed});
  const Tensor out = g.alias(r);
  g.add(NgramConv{r, value, normed, vector(b + "ple_conv1d"), n.conv_kernel, n.size,
                  state.ngram[index], out});
  return out;
}

}  // namespace imp
