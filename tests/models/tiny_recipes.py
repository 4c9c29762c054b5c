"""Recipes of the tiny checkpoints: the configs, and the shape of every tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.models import tiny_tokenizer as tok

VOCAB = 311  # 304 tokens and 7 rows of padding
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Recipe:
    """text: the keys of `text_config`. experts: how the routed experts are stored."""

    text: dict[str, Any]
    experts: str = "stacked"  # stacked | single | nvfp4
    mtp: str = ""  # absent | fake (one that lacks most tensors) | stacked | block_fp8
    weights: str = "BF16"  # BF16 | F32
    table: str = "weights"  # weights | fp8
    shards: int = 1
    wrapper: bool = True  # ForConditionalGeneration names and a vision tower, or a flat text model
    note: str = field(default="", compare=False)


def _text(**kw: Any) -> dict[str, Any]:
    """Keys common to the recipes; `layers` is a string of L (delta-net) and F (attention)."""
    layers: str = kw.pop("layers")
    factor: float = kw.pop("rotary", 0.25)
    theta: float = kw.pop("theta", 10000000)
    sections: list[int] = kw.pop("sections")
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tok.END_OF_TEXT,
        "eos_token_id": tok.END_OF_TEXT,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hc_count": 4,
        "initializer_range": 0.02,
        "layer_types": [FULL if c == "F" else LINEAR for c in layers],
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "model_type": "qwen4_exp_text",
        "mtp_num_hidden_layers": 0,
        "num_hidden_layers": len(layers),
        "output_gate_type": "sigmoid",
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": sections,
            "partial_rotary_factor": factor,
            "rope_theta": theta,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
    } | kw


_NGRAM = {
    "make_ngram_vocab_size_divisible_by": 128,
    "ngram_size": 3,
    "ple_conv_kernel_size": 4,
    "ple_layer_ids": [2],
    "seed": 1234,
}

RECIPES: dict[str, Recipe] = {
    "base": Recipe(
        _text(
            layers="LLLFLLLF",
            hidden_size=128,
            hc_lowrank=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sections=[2, 1, 1],
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            indexer_n_heads=8,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=32,
            indexer_compress_ratio=4,
            ple_embed_dim=128,
            heads_per_ngram=2,
            ngram_vocab_size_base=211,
            split_ngram_parts=16,
            mtp_num_hidden_layers=1,
            **_NGRAM,
        ),
        mtp="stacked",
        shards=3,
        note="the released BF16 form",
    ),
    "experts512": Recipe(
        _text(
            layers="LLLF",
            hidden_size=64,
            hc_lowrank=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sections=[2, 1, 1],
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            indexer_n_heads=8,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=32,
            indexer_compress_ratio=4,
            ple_embed_dim=64,
            heads_per_ngram=8,
            ngram_vocab_size_base=101,
            split_ngram_parts=4,
            mtp_num_hidden_layers=1,
            **_NGRAM,
        ),
        experts="nvfp4",
        mtp="block_fp8",
        table="fp8",
        shards=2,
        note="ModelOpt mixed precision",
    ),
    "options": Recipe(
        _text(
            layers="LLFLLLFL",
            hidden_size=40,
            hc_count=3,
            hc_lowrank=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=20,
            rotary=0.5,
            theta=10000.0,
            sections=[2, 2, 1],
            linear_conv_kernel_dim=3,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=9,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=28,
            norm_topk_prob=False,
            output_gate_type="silu",
            rms_norm_eps=1e-5,
            indexer_n_heads=7,
            indexer_kv_heads=1,
            indexer_head_dim=12,
            indexer_budget=16,
            indexer_compress_ratio=2,
            ple_embed_dim=48,
            heads_per_ngram=2,
            ngram_vocab_size_base=53,
            split_ngram_parts=4,
            dtype="float32",
            eos_token_id=[tok.END_OF_TEXT, tok.IM_END],
            **_NGRAM | {"ngram_size": 4, "ple_conv_kernel_size": 3, "ple_layer_ids": [6, 1]},
        ),
        experts="single",
        weights="F32",
        shards=2,
        note="every option away from its released value; odd widths",
    ),
    "dense_attention": Recipe(
        _text(
            layers="LLLFLLLF",
            hidden_size=48,
            hc_count=2,
            hc_lowrank=8,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            rotary=1.0,
            sections=[3, 3, 2],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            num_experts=5,
            num_experts_per_tok=5,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=48,
            tie_word_embeddings=True,
        ),
        mtp="fake",
        wrapper=False,
        note="no indexer, no n-gram block, tied embeddings, every expert used",
    ),
}


def shapes(t: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every float tensor of the text model without the routed experts and the n-gram table."""
    h, hc, low = t["hidden_size"], t["hc_count"], t["hc_lowrank"]
    out: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, h)}
    if not t["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCAB, h)
    ngram_layers = {i - 1 for i in t.get("ple_layer_ids", [])}

    def mixer(p: str, inject: bool = True) -> None:
        out[p + "hc_norm.weight"] = (hc * h,)
        out[p + "input_mix_weight_down.weight"] = (low, hc * h)
        out[p + "input_mix_weight_up.weight"] = (hc * h, low)
        if inject:
            out[p + "block_inject_weight.weight"] = (hc, hc * h)

    def attention(p: str) -> None:
        q, kv, d = t["num_attention_heads"], t["num_key_value_heads"], t["head_dim"]
        out[p + "q_proj.weight"] = (2 * q * d, h)
        out[p + "k_proj.weight"] = out[p + "v_proj.weight"] = (kv * d, h)
        out[p + "o_proj.weight"] = (h, q * d)
        out[p + "q_norm.weight"] = out[p + "k_norm.weight"] = (d,)
        if "indexer_n_heads" in t:
            di = t["indexer_head_dim"]
            out[p + "indexer.index_qk_proj.weight"] = ((t["indexer_n_heads"] + 1) * di, h)
            out[p + "indexer.q_layernorm.weight"] = out[p + "indexer.k_layernorm.weight"] = (di,)

    def delta(p: str) -> None:
        hv, dv = t["linear_num_value_heads"], t["linear_value_head_dim"]
        channels = 2 * t["linear_num_key_heads"] * t["linear_key_head_dim"] + hv * dv
        out[p + "in_proj_qkv.weight"] = (channels, h)
        out[p + "in_proj_z.weight"] = (hv * dv, h)
        out[p + "in_proj_a.weight"] = out[p + "in_proj_b.weight"] = (hv, h)
        out[p + "conv1d.weight"] = (channels, 1, t["linear_conv_kernel_dim"])
        out[p + "A_log"] = out[p + "dt_bias"] = (hv,)
        out[p + "norm.weight"] = (dv,)
        out[p + "out_proj.weight"] = (h, hv * dv)

    def layer(p: str, kind: str) -> None:
        mixer(p + "attn_hyper_connection.")
        mixer(p + "mlp_hyper_connection.")
        if kind == FULL:
            attention(p + "self_attn.")
        else:
            delta(p + "linear_attn.")
        ff = t["shared_expert_intermediate_size"]
        out[p + "mlp.gate.weight"] = (t["num_experts"], h)
        out[p + "mlp.shared_expert.gate_proj.weight"] = (ff, h)
        out[p + "mlp.shared_expert.up_proj.weight"] = (ff, h)
        out[p + "mlp.shared_expert.down_proj.weight"] = (h, ff)
        out[p + "mlp.shared_expert_gate.weight"] = (1, h)

    for i, kind in enumerate(t["layer_types"]):
        layer(f"layers.{i}.", kind)
    for i in ngram_layers:
        p = f"layers.{i}.ple."
        out[p + "key_proj.weight"] = (hc * h, t["ple_embed_dim"])
        out[p + "value_proj.weight"] = (h, t["ple_embed_dim"])
        for n in ("norm_key", "norm_query", "norm_conv"):
            out[p + n + ".weight"] = (hc * h,)
        out[p + "conv1d.weight"] = (hc * h, 1, t["ple_conv_kernel_size"])
    mixer("hyper_connection_mixer.", inject=False)
    if t["mtp_num_hidden_layers"]:
        out["mtp.fc_embedding.weight"] = out["mtp.fc_hidden.weight"] = (h, h)
        out["mtp.pre_fc_norm_embedding.weight"] = (h,)
        out["mtp.pre_fc_norm_hidden.weight"] = (hc * h,)
        layer("mtp.layers.0.", FULL)
        mixer("mtp.hyper_connection_mixer.", inject=False)
    return out
