"""Where each checkpoint tensor lies in a GGUF: the mapping read from the source's side.

The writer asks, for a GGUF tensor, where its rows come from; this asks the opposite with its own
arithmetic, so that a mistake in either shows as a difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.checkpoint import TensorRef
from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.plan import ConvertPlan

F32 = NDArray[np.float32]
Change = Callable[[F32], F32]


@dataclass(frozen=True)
class Place:
    """`count` source rows from `row` on are the GGUF rows from `target_row` on.

    first_col: column of the GGUF tensor where the source's columns start.
    change: what the converter does to values.
    """

    row: int
    count: int
    tensor: str
    target_row: int
    first_col: int = 0
    change: Change | None = None


@dataclass(frozen=True)
class TableShard:
    """A part of an n-gram table; `place` names the tensor of its decoded form."""

    module: str
    ref: TensorRef
    cols: int
    place: Place


def weight_modules(plan: ConvertPlan) -> list[tuple[str, TensorRef]]:
    """Every converted module but the tables, with the tensor of its weights."""
    found = []
    for name, ref in plan.checkpoint.tensors.items():
        if name.startswith(_SKIPPED) or ".ple_embedding." in name:
            continue
        if name.startswith("mtp.") and not plan.mtp:
            continue
        module = name.removesuffix("_packed").removesuffix(".weight")
        if module != name or name.endswith(_BARE):
            found.append((module, ref))
    return found


def table_shards(plan: ConvertPlan) -> list[TableShard]:
    """The parts of every n-gram table in row order."""
    c = plan.config
    shards = []
    for index, layer in enumerate(c.ngram_layers):
        prefix = f"layers.{layer}.ple.ple_embedding.ngram_embedding"
        name = "per_layer_token_embd.weight"
        parts: dict[int, tuple[str, TensorRef]] = {}
        for tensor, ref in plan.checkpoint.tensors.items():
            match = re.fullmatch(re.escape(prefix) + r"(?:\.shard_(\d+))?\.weight", tensor)
            if match:
                parts[int(match[1] or 0)] = (tensor.removesuffix(".weight"), ref)
        row = 0
        for _, (module, ref) in sorted(parts.items()):
            target = name if index == 0 else f"blk.{layer}.{name}"
            place = Place(0, ref.shape[0], target, row)
            shards.append(TableShard(module, ref, c.ngram_row_dim, place))
            row += ref.shape[0]
    return shards


def _plus_one(values: F32) -> F32:
    return values + np.float32(1)


def _minus_exp(values: F32) -> F32:
    exact = [-exp(v) for v in values.reshape(-1).tolist()]
    return np.array(exact, np.float32).reshape(values.shape)


_PLAIN = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "linear_attn.norm": "ssm_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.conv1d": "ple_conv1d",
}
_NORMS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
}
_HYPER = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_SKIPPED = ("visual.", "vision_tower.")
_BARE = (".A_log", ".dt_bias", ".experts.gate_up_proj", ".experts.down_proj")
# modules whose rows are value heads, entirely or after the query and key rows
_HEADS = {
    "linear_attn.in_proj_qkv": "attn_qkv.weight",
    "linear_attn.in_proj_z": "attn_gate.weight",
    "linear_attn.in_proj_a": "ssm_alpha.weight",
    "linear_attn.in_proj_b": "ssm_beta.weight",
    "linear_attn.conv1d": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}


def places(module: str, rows: int, c: ModelConfig) -> Iterator[Place]:
    """Everything that `rows` rows of a module (its name without `.weight`) become.

    Vectors count as rows of one element. The n-gram table is not covered.

    Raises:
        KeyError: for a module that should not have been converted.
    """
    if module.startswith("mtp.") and not module.startswith("mtp.layers.0."):
        yield from _nextn(module.removeprefix("mtp."), rows, f"blk.{c.layers}.nextn.")
        return
    match = re.fullmatch(r"(?:mtp\.)?layers\.(\d+)\.(.+)", module)
    if match is None:
        yield from _simple(module, rows, "", c)
        return
    block = c.layers if module.startswith("mtp.") else int(match[1])
    inner, blk = match[2], f"blk.{block}."
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj", inner)
    if expert is not None:
        yield Place(0, rows, f"{blk}ffn_{expert[2]}_exps.weight", int(expert[1]) * rows)
    elif inner == "mlp.experts.gate_up_proj":
        for e in range(c.experts):
            start = e * 2 * c.expert_ff
            yield Place(start, c.expert_ff, f"{blk}ffn_gate_exps.weight", e * c.expert_ff)
            start += c.expert_ff
            yield Place(start, c.expert_ff, f"{blk}ffn_up_exps.weight", e * c.expert_ff)
    elif inner == "mlp.experts.down_proj":
        yield Place(0, rows, f"{blk}ffn_down_exps.weight", 0)
    elif inner in _HEADS:
        yield from _value_heads(inner, rows, blk, c)
    elif inner == "linear_attn.out_proj":
        yield Place(0, rows, f"{blk}ssm_out.weight", 0, 0, _head_columns(c))
    elif inner == "self_attn.indexer.index_qk_proj":
        queries = c.indexer_heads * c.indexer_dim
        yield Place(0, queries, f"{blk}indexer.q_proj.weight", 0)
        yield Place(queries, rows - queries, f"{blk}indexer.k_proj.weight", 0)
    else:
        yield from _simple(inner, rows, blk, c)


def _simple(inner: str, rows: int, blk: str, c: ModelConfig) -> Iterator[Place]:
    gate, _, part = inner.rpartition(".")
    streams = {
        "attn_hyper_connection": "hc_attn_",
        "mlp_hyper_connection": "hc_ffn_",
        "hyper_connection_mixer": "output_hc_",
    }
    if gate in streams:
        change = _plus_one if part == "hc_norm" else None
        name = f"{blk}{streams[gate]}{_HYPER[part]}.weight"
        yield Place(0, rows, name, 0, 0, change)
    elif inner in _NORMS:
        yield Place(0, rows, f"{blk}{_NORMS[inner]}.weight", 0, 0, _plus_one)
    else:
        yield Place(0, rows, f"{blk}{_PLAIN[inner]}.weight", 0)


def _nextn(inner: str, rows: int, blk: str) -> Iterator[Place]:
    if inner in ("fc_embedding", "fc_hidden"):
        yield Place(0, rows, f"{blk}eh_proj.weight", 0, 0 if inner == "fc_embedding" else rows)
    elif inner in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        name = "enorm" if inner == "pre_fc_norm_embedding" else "hnorm"
        yield Place(0, rows, f"{blk}{name}.weight", 0, 0, _plus_one)
    else:
        part = inner.removeprefix("hyper_connection_mixer.")
        change = _plus_one if part == "hc_norm" else None
        yield Place(0, rows, f"{blk}hc_head_{_HYPER[part]}.weight", 0, 0, change)


def _value_heads(inner: str, rows: int, blk: str, c: ModelConfig) -> Iterator[Place]:
    """Query and key rows stay; value head u = k * repeat + j becomes j * key_heads + k."""
    fused = inner in ("linear_attn.in_proj_qkv", "linear_attn.conv1d")
    start = 2 * c.key_heads * c.key_dim if fused else 0
    head = (rows - start) // c.value_heads
    repeat = c.value_heads // c.key_heads
    change = _minus_exp if inner == "linear_attn.A_log" else None
    name = blk + _HEADS[inner]
    if start:
        yield Place(0, start, name, 0)
    for u in range(c.value_heads):
        tiled = u % repeat * c.key_heads + u // repeat
        yield Place(start + u * head, head, name, start + tiled * head, 0, change)


def _head_columns(c: ModelConfig) -> Change:
    repeat = c.value_heads // c.key_heads

    def change(values: F32) -> F32:
        # columns [key head, repeat, value_dim] -> [repeat, key head, value_dim]
        split = values.reshape(-1, c.key_heads, repeat, c.value_dim)
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(values.shape)

    return change
