"""The whole model composed of `tests/ops/refs.py`, float64, for one sequence from its start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.models.checkpoint import Arrays
from tests.ops import refs
from tests.ops.refs import F64

Config = dict[str, Any]


class Reference:
    """c: the text config. w: arrays as `checkpoint.load` returns them."""

    def __init__(self, c: Config, w: Arrays) -> None:
        self.c, self.w = c, w
        self.eps: float = c["rms_norm_eps"]
        self.streams: int = c["hc_count"]
        rope = c["rope_parameters"]
        self.rotary = int(c["head_dim"] * rope["partial_rotary_factor"]), float(rope["rope_theta"])

    def forward(self, tokens: Sequence[int]) -> tuple[F64, dict[str, F64]]:
        """(logits [T, V], taps by name [T, width])"""
        c, w = self.c, self.w
        taps: dict[str, F64] = {}
        r = refs.embed(w["embed_tokens.weight"], tokens, self.streams)
        ngram_layers = sorted(set(c.get("ple_layer_ids") or []))
        for i, kind in enumerate(c["layer_types"]):
            if i + 1 in ngram_layers:
                r = r + self.ngram(f"layers.{i}.ple.", r, tokens)
            r = self.layer(f"layers.{i}.", f"blk.{i}.", kind, r, taps)
        h, _ = self.mix("hyper_connection_mixer.", r)
        taps["result_norm"] = h
        return refs.linear(h, w.get("lm_head.weight", w["embed_tokens.weight"])), taps

    def mtp(self, next_tokens: Sequence[int], r: F64) -> F64:
        """next_tokens [T] (t_{i+1}), r [T, S*H] after the last layer -> logits [T, V]"""
        w = self.w
        e = refs.rms_norm(
            w["embed_tokens.weight"][np.asarray(next_tokens)],
            1 + w["mtp.pre_fc_norm_embedding.weight"],
            self.eps,
        )
        n = refs.rms_norm(r, 1 + w["mtp.pre_fc_norm_hidden.weight"], self.eps)
        h = refs.linear(n.reshape(len(r), self.streams, -1), w["mtp.fc_hidden.weight"])
        x = (h + refs.linear(e, w["mtp.fc_embedding.weight"])[:, None]).reshape(r.shape)
        x = self.layer("mtp.layers.0.", "mtp.", "full_attention", x, {})
        y, _ = self.mix("mtp.hyper_connection_mixer.", x)
        return refs.linear(y, w.get("lm_head.weight", w["embed_tokens.weight"]))

    def mix(self, p: str, r: F64) -> tuple[F64, F64 | None]:
        w = self.w
        return refs.residual_mix(
            r,
            1 + w[p + "hc_norm.weight"],
            w[p + "input_mix_weight_down.weight"],
            w[p + "input_mix_weight_up.weight"],
            w.get(p + "block_inject_weight.weight"),
            self.eps,
            self.streams,
        )

    def layer(self, p: str, tap: str, kind: str, r: F64, taps: dict[str, F64]) -> F64:
        x, s = self.mix(p + "attn_hyper_connection.", r)
        delta = kind == "linear_attention"
        y = self.delta(p + "linear_attn.", x) if delta else self.attention(p + "self_attn.", x)
        assert s is not None
        r = refs.residual_inject(r, y, s)
        taps[tap + "attn_out"] = y
        x, s = self.mix(p + "mlp_hyper_connection.", r)
        y = self.experts(p + "mlp.", x)
        assert s is not None
        r = refs.residual_inject(r, y, s)
        taps[tap + "ffn_out"] = y
        taps[tap + "residual"] = r
        return r

    def delta(self, p: str, x: F64) -> F64:
        c, w = self.c, self.w
        hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        taps = w[p + "conv1d.weight"][:, 0]
        m = refs.linear(x, w[p + "in_proj_qkv.weight"])
        y, _ = refs.conv_silu(m, np.zeros((taps.shape[1] - 1, m.shape[1])), taps)
        a = refs.linear(x, w[p + "in_proj_a.weight"])
        b = refs.linear(x, w[p + "in_proj_b.weight"])
        rate = -np.exp(w[p + "A_log"])
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        q, k, v, g, beta = refs.delta_inputs(y, a, b, rate, w[p + "dt_bias"], hk, dk)
        q, k = (refs.spread_heads(u, hv, tiled=False) for u in (q, k))
        o, _ = refs.delta_chunked(q, k, v, g, beta, np.zeros((hv, dk, dv)))
        z = refs.linear(x, w[p + "in_proj_z.weight"]).reshape(o.shape)
        gate = c.get("output_gate_type") or c["hidden_act"]
        o = refs.gated_norm(o, z, w[p + "norm.weight"], self.eps, gate)
        return refs.linear(o.reshape(len(x), -1), w[p + "out_proj.weight"])

    def attention(self, p: str, x: F64) -> F64:
        c, w = self.c, self.w
        t, d = len(x), c["head_dim"]
        positions = range(t)
        qg = refs.linear(x, w[p + "q_proj.weight"]).reshape(t, -1, 2 * d)

        def rotated(u: F64, norm: str) -> F64:
            return refs.head_norm_rope(u, 1 + w[p + norm], self.eps, positions, *self.rotary)

        q = rotated(qg[..., :d], "q_norm.weight")
        k = rotated(refs.linear(x, w[p + "k_proj.weight"]).reshape(t, -1, d), "k_norm.weight")
        v = refs.linear(x, w[p + "v_proj.weight"]).reshape(t, -1, d)
        visible = [np.arange(i + 1) for i in range(t)]
        if p + "indexer.index_qk_proj.weight" in w:
            di, ratio = c["indexer_head_dim"], c["indexer_compress_ratio"]
            iqk = refs.linear(x, w[p + "indexer.index_qk_proj.weight"])
            iq = rotated(iqk[:, :-di].reshape(t, -1, di), "indexer.q_layernorm.weight")
            norm = 1 + w[p + "indexer.k_layernorm.weight"]
            keys = refs.block_keys(iqk[:, -di:], norm, self.eps, ratio, *self.rotary)
            most = c["indexer_budget"] // ratio
            visible = [
                refs.selected_keys(
                    i, refs.block_scores(iq[i], keys[: (i + 1) // ratio]), most, ratio
                )
                for i in range(t)
            ]
        o = refs.attention(q, k, v, visible) * refs.sigmoid(qg[..., d:])
        return refs.linear(o.reshape(t, -1), w[p + "o_proj.weight"])

    def experts(self, p: str, x: F64) -> F64:
        c, w = self.c, self.w
        f = c["moe_intermediate_size"]
        ids, weights = refs.route(
            refs.linear(x, w[p + "gate.weight"]),
            c["num_experts_per_tok"],
            c.get("norm_topk_prob", True),
        )
        gate_up, down = w[p + "experts.gate_up_proj"], w[p + "experts.down_proj"]
        rows = refs.experts(x, ids, gate_up[:, :f], gate_up[:, f:], down)
        parts = (w[p + f"shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down"))
        shared = refs.expert_ffn(x, *parts)
        logit = refs.linear(x, w[p + "shared_expert_gate.weight"])[:, 0]
        return refs.combine(rows, weights, shared, logit)

    def ngram(self, p: str, r: F64, tokens: Sequence[int]) -> F64:
        c, w = self.c, self.w
        e = p + "ple_embedding."
        boundary = c["eos_token_id"]
        boundary = boundary[0] if isinstance(boundary, list) else boundary
        n = c["ngram_size"]
        constants = (w[e + s] for s in ("layer_multipliers", "ngram_heads_vocab_sizes"))
        multipliers, sizes = ([int(i) for i in v] for v in constants)
        offsets = [int(i) for i in w[e + "ngram_heads_offsets"]]
        context = [boundary] * (n - 1)
        rows = refs.ngram_rows(tokens, context, multipliers, sizes, offsets, boundary)
        x = w[e + "ngram_embedding.weight"][rows].reshape(len(r), -1)
        key = refs.linear(x, w[p + "key_proj.weight"])
        value = refs.linear(x, w[p + "value_proj.weight"])
        norm_key, norm_query = (1 + w[p + f"norm_{s}.weight"] for s in ("key", "query"))
        gated = refs.ngram_gate(key, value, r, norm_key, norm_query, self.eps, self.streams)
        taps = w[p + "conv1d.weight"][:, 0]
        history = np.zeros(((taps.shape[1] - 1) * n, r.shape[1]))
        norm = 1 + w[p + "norm_conv.weight"]
        return refs.ngram_conv(gated, norm, taps, history, self.eps, self.streams, n)[0]
