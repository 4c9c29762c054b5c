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

std::vector<Tensor> Builder::linears(Tensor x, const std::vector<Map>& maps) {
  Linears op{x, {}};
  std::vector<Tensor> results;
  for (const Map& m : maps) {
    const Weight& w = weight(m.name);
    results.push_back(g.tensor(g.info(x).rows, w.rows));
    op.parts.push_back({&w, results.back(), m.alpha, m.act});
  }
  g.add(std::move(op));
  return results;
}

Tensor Builder::group_norm(Tensor x, const std::string& name, std::int64_t groups) {
  const Tensor y = g.tensor(g.info(x).rows, g.info(x).cols);
  g.add(GroupNorm{x, vector(name), groups, h.norm_eps, y});
  return y;
}

Mixed Builder::residual_read(Streams r, const std::string& prefix, bool inject) {
  const std::int64_t streams = h.residual.streams, n_rows = g.info(r.r).rows;
  if (r.y) {
    const Weight& down = weight(prefix + "down");
    ResidualRead op{r.before, r.y, r.inject, vector(prefix + "norm"), &down};
    op.inject = &weight(prefix + "inject");
    op.up = &weight(prefix + "up");
    op.streams = streams;
    op.eps = h.norm_eps;
    op.n = g.tensor(n_rows, h.wide());
    op.low = g.tensor(n_rows, down.rows);
    op.gate = g.tensor(n_rows, h.wide());
    op.out = r.r;
    op.next_s = g.tensor(n_rows, streams);
    op.x = g.tensor(n_rows, h.hidden);
    const Mixed m{op.x, op.next_s};
    g.add(op);
    return m;
  }
  const float mean = 1.0f / static_cast<float>(streams);
  const Tensor n = group_norm(r.r, prefix + "norm", streams);
  std::vector<Map> maps = {{prefix + "down", mean, Act::silu}};
  if (inject) maps.push_back({prefix + "inject", mean, Act::sigmoid});
  const std::vector<Tensor> read = linears(n, maps);
  Mixed m;
  if (inject) m.inject = read[1];
  m.x = g.tensor(n_rows, h.hidden);
  g.add(LinearMix{read[0], n, &weight(prefix + "up"), streams, g.tensor(n_rows, h.wide()), m.x});
  return m;
}

Streams Builder::residual_write(Tensor r, Tensor y, Tensor inject, bool read_next) {
  const Tensor out = g.alias(r);
  if (read_next) return {out, r, y, inject};
  g.add(ResidualInject{r, y, inject, out});
  return {out};
}

Tensor Builder::delta_net(Tensor x, std::int64_t layer) {
  const DeltaNet& d = h.delta;
  const std::string b = str("blk.", layer, ".");
  const auto l = static_cast<std::size_t>(layer);
  const std::vector<Tensor> in =
      linears(x, {{b + "attn_qkv"}, {b + "attn_gate"}, {b + "ssm_alpha"}, {b + "ssm_beta"}});
  GatedDeltaNet op{in[0], in[1], in[2], in[3]};
  op.conv = vector(b + "ssm_conv1d");
  op.a = model.vector(b + "ssm_a");
  op.dt = model.vector(b + "ssm_dt.bias");
  op.norm = vector(b + "ssm_norm");
  op.kernel = d.conv_kernel;
  op.key_heads = d.key_heads;
  op.value_heads = d.value_heads;
  op.key_dim = d.key_dim;
  op.value_dim = d.value_dim;
  op.conv_state = state.conv[l];
  op.delta_state = state.delta[l];
  op.eps = h.norm_eps;
  op.act = d.gate;
  op.qkv = g.tensor(rows, d.channels());
  op.gates = g.tensor(rows, 2 * d.value_heads);
  op.o = g.tensor(rows, d.inner());
  op.y = g.tensor(rows, d.inner());
  const Tensor y = op.y;
  g.add(op);
  return linear(y, b + "ssm_out");
}

Tensor Builder::attention(Tensor x, Tensor rope, std::int64_t layer) {
  const Attention& a = h.attention;
  const std::string b = str("blk.", layer, ".");
  const auto l = static_cast<std::size_t>(layer);
  const std::int64_t cache = state.cache[l];
  std::vector<Map> maps = {{b + "attn_q"}, {b + "attn_k"}, {b + "attn_v"}};
  if (a.indexer) maps.insert(maps.end(), {{b + "indexer.q_proj"}, {b + "indexer.k_proj"}});
  const std::vector<Tensor> in = linears(x, maps);
  AttendInputs op{in[0], in[1], in[2], {}, {}, rope};
  op.q_norm = vector(b + "attn_q_norm");
  op.k_norm = vector(b + "attn_k_norm");
  op.layer = cache;
  op.heads = a.heads;
  op.kv_heads = a.kv_heads;
  op.dim = a.head_dim;
  op.rotary_dim = a.rotary_dim;
  op.theta = a.rope_theta;
  op.eps = h.norm_eps;
  op.q = g.tensor(rows, a.heads * a.head_dim);
  op.normed_k = g.tensor(rows, a.kv_heads * a.head_dim);
  op.stored = g.tensor(1, 1);
  if (a.indexer) {
    op.index_q = in[3];
    op.index_raw = in[4];
    op.index_q_norm = vector(b + "indexer.q_norm");
    op.index_k_norm = vector(b + "indexer.k_norm");
    op.index_heads = a.indexer->heads;
    op.index_dim = a.indexer->key_dim;
    op.ratio = a.indexer->ratio;
    op.state = state.index[l];
    op.normed_index_q = g.tensor(rows, op.index_heads * op.index_dim);
    op.keys = g.tensor(1, 1);
  }
  g.add(op);
  Tensor selected;
  if (a.indexer) {
    const std::int64_t blocks = a.indexer->blocks();
    selected =
        named(g.tensor(rows, std::max<std::int64_t>(1, blocks), DType::i32), b + "index_selected");
    g.add(IndexSelect{op.normed_index_q, op.keys, cache, op.index_heads, op.index_dim, op.ratio,
                      blocks, selected});
  }
  const Tensor y = g.tensor(rows, a.heads * a.head_dim);
  g.add(Attend{op.q, op.qg, op.stored, selected, cache, a.heads, a.kv_heads, a.head_dim,
               a.indexer ? a.indexer->ratio : 1, a.indexer ? a.indexer->blocks() : 0, y});
  return linear(y, b + "attn_output");
}

Tensor Builder::moe(Tensor x, std::int64_t layer) {
  const Moe& m = h.moe;
  const std::string b = str("blk.", layer, ".");
  const std::vector<Tensor> in = linears(x, {{b + "ffn_gate_inp"},
                                             {b + "ffn_gate_shexp"},
                                             {b + "ffn_up_shexp"},
                                             {b + "ffn_gate_inp_shexp", 1, Act::sigmoid}});
  const Tensor logits = named(in[0], b + "router_logits");
  const Tensor ids = named(g.tensor(rows, m.used, DType::i32), b + "expert_ids");
  const Tensor weights = named(g.tensor(rows, m.used), b + "expert_weights");
  MoeFfn op{x, logits, ids, weights, in[1], in[2], in[3]};
  op.k = m.used;
  op.renormalise = m.renormalise;
  op.planted = planted_routing ? layer : -1;
  op.gate = &model.experts(b + "ffn_gate_exps.weight");
  op.up = &model.experts(b + "ffn_up_exps.weight");
  op.down = &model.experts(b + "ffn_down_exps.weight");
  op.shared_down = &weight(b + "ffn_down_shexp");
  op.hidden = g.tensor(rows * m.used, m.ff);
  op.up_out = g.tensor(rows * m.used, m.ff);
  op.slots = g.tensor(rows * m.used, h.hidden);
  op.shared_hidden = g.tensor(rows, m.shared_ff);
  op.shared = g.tensor(rows, h.hidden);
  op.y = g.tensor(rows, h.hidden);
  const Tensor y = op.y;
  g.add(op);
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
