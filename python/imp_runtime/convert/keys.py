"""Model keys of a `qwen4exp` GGUF: llama.cpp's names and types, and `imp.*` for what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import gguf
from gguf import GGUFValueType

from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.ngram import HashConstants

ARCH = "qwen4exp"


def converter_version() -> str:
    """What `imp.converter` says."""
    try:
        return f"imp-runtime {version('imp-runtime')}"
    except PackageNotFoundError:  # run from the source tree
        return "imp-runtime (source tree)"


def add_model_keys(
    writer: gguf.GGUFWriter, c: ModelConfig, constants: Sequence[HashConstants], *, mtp: bool
) -> None:
    """Adds every `qwen4exp.*` and `imp.*` key but `imp.eos_token_ids`.

    constants: one per n-gram layer, in layer order.
    mtp: whether the MTP layer follows the last decoder layer.
    """
    extra = 1 if mtp else 0
    numbers = {
        "block_count": c.layers + extra,
        "context_length": c.context_length,
        "embedding_length": c.hidden,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.rotary_dim,
        "expert_count": c.experts,
        "expert_used_count": c.experts_used,
        "expert_feed_forward_length": c.expert_ff,
        "expert_shared_feed_forward_length": c.shared_ff,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.key_dim,
        "ssm.group_count": c.key_heads,
        "ssm.time_step_rank": c.value_heads,
        "ssm.inner_size": c.value_heads * c.value_dim,
        "full_attention_interval": c.full_attention_interval,
        "hyper_connection.count": c.hc_count,
        "hyper_connection.low_rank": c.hc_lowrank,
    }
    if mtp:
        numbers["nextn_predict_layers"] = extra
    if c.indexer_heads:
        numbers["attention.indexer.head_count"] = c.indexer_heads
        numbers["attention.indexer.key_length"] = c.indexer_dim
        numbers["attention.indexer.top_k"] = c.indexer_budget
    for name, value in numbers.items():
        writer.add_uint32(f"{ARCH}.{name}", value)
    writer.add_float32(f"{ARCH}.rope.freq_base", c.rope_theta)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", c.norm_eps)
    recurrent = [*c.recurrent, *[False] * extra]
    _array(writer, "attention.recurrent_layers", recurrent, GGUFValueType.BOOL)
    _array(writer, "rope.dimension_sections", c.rope_sections, GGUFValueType.INT32)
    if c.indexer_heads:
        ratios = [0 if r else c.indexer_ratio for r in c.recurrent] + [0] * extra
        _array(writer, "attention.compress_ratios", ratios, GGUFValueType.INT32)
    if c.ngram_layers:
        _add_ngram_keys(writer, c, constants)
    writer.add_string("imp.output_gate_type", c.output_gate_type)
    writer.add_bool("imp.norm_topk_prob", c.norm_topk_prob)
    writer.add_string("imp.hidden_act", c.hidden_act)
    writer.add_string("imp.converter", converter_version())


def _add_ngram_keys(
    writer: gguf.GGUFWriter, c: ModelConfig, constants: Sequence[HashConstants]
) -> None:
    _array(writer, "ple.layers", c.ngram_layers, GGUFValueType.INT32)
    numbers = {
        "ple.ngram_size": c.ngram_size,
        "ple.heads_per_ngram": c.heads_per_ngram,
        "ple.conv_kernel": c.ngram_conv_kernel,
        "ple.eos_token_id": c.boundary_token,
        "embedding_length_per_layer_input": c.ngram_row_dim,
    }
    if c.image_token is not None:
        numbers["ple.image_token_id"] = c.image_token
    for name, value in numbers.items():
        writer.add_uint32(f"{ARCH}.{name}", value)
    for name, field in (
        ("ple.layer_multipliers", "multipliers"),
        ("ple.head_offsets", "offsets"),
        ("ple.head_vocab_sizes", "vocab_sizes"),
    ):
        values = [v for one in constants for v in getattr(one, field)]
        _array(writer, name, values, GGUFValueType.UINT64)


def _array(
    writer: gguf.GGUFWriter, name: str, values: Sequence[int], element: GGUFValueType
) -> None:
    writer.add_key_value(f"{ARCH}.{name}", list(values), GGUFValueType.ARRAY, element)
