"""Where each GGUF tensor of `qwen4exp` comes from: module names and the moves between layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.forms import F32
from imp_runtime.convert.views import (
    Beside,
    Columns,
    Gathered,
    Mapped,
    View,
    as_values,
    tiled_heads,
)

Shape = tuple[int, ...]
Move = Callable[[list[View]], View]

HYPER = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
EXPERT_TENSOR = re.compile(r"ffn_(gate|up|down)_exps\.weight")
# Modules beside which llama.cpp looks for `.scale`; elsewhere NVFP4 has to be decoded.
SCALE_SLOTS = re.compile(
    r"(blk\.\d+\.)?(attn_(q|k|v|output|qkv|gate)|ffn_(gate|up|down)_shexp|ssm_(alpha|beta|out)"
    r"|nextn\.eh_proj|output)\.weight"
)
TABLE_MODULE = "ple.ple_embedding.ngram_embedding"


@dataclass(frozen=True)
class Origin:
    """Modules of a GGUF tensor, the shape each must have, and what is done with their rows."""

    modules: tuple[str, ...]
    shapes: tuple[Shape, ...]
    move: Move


def _first(views: list[View]) -> View:
    return views[0]


def _plus_one(views: list[View]) -> View:
    return Mapped(views[0], lambda v: v + np.float32(1))


def layer_prefix(block: int, config: ModelConfig) -> str:
    """Module prefix of GGUF block `block`: the block after the last layer is the MTP layer."""
    return f"layers.{block}." if block < config.layers else "mtp.layers.0."


def origin(name: str, dims: Sequence[int], config: ModelConfig) -> Origin:
    """Where tensor `name` with GGUF dims (fastest first) comes from; not for experts and table.

    Raises:
        KeyError: for a name that this converter does not know.
    """
    shape = tuple(reversed(dims))
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match is None:
        return _global(name, shape)
    prefix, stem = layer_prefix(int(match[1]), config), match[2]
    if stem.startswith("nextn."):
        return _nextn(stem.removeprefix("nextn."), shape)
    hyper = re.fullmatch(r"hc_(attn|ffn)_(\w+)\.weight", stem)
    if hyper is not None:
        module = "attn" if hyper[1] == "attn" else "mlp"
        return _hyper(f"{prefix}{module}_hyper_connection.", hyper[2], shape)
    return _layer(prefix, stem, shape, config)


def _global(name: str, shape: Shape) -> Origin:
    if name == "token_embd.weight":
        return Origin(("embed_tokens",), (shape,), _first)
    if name == "output.weight":
        return Origin(("lm_head",), (shape,), _first)
    match = re.fullmatch(r"output_hc_(\w+)\.weight", name)
    if match is None:
        raise KeyError(name)
    return _hyper("hyper_connection_mixer.", match[1], shape)


def _hyper(prefix: str, part: str, shape: Shape) -> Origin:
    return Origin((prefix + HYPER[part],), (shape,), _plus_one if part == "norm" else _first)


def _nextn(stem: str, shape: Shape) -> Origin:
    if stem == "eh_proj.weight":
        half = (shape[0], shape[1] // 2)
        return Origin(("mtp.fc_embedding", "mtp.fc_hidden"), (half, half), _beside)
    if stem == "enorm.weight":
        return Origin(("mtp.pre_fc_norm_embedding",), (shape,), _plus_one)
    if stem == "hnorm.weight":
        return Origin(("mtp.pre_fc_norm_hidden",), (shape,), _plus_one)
    match = re.fullmatch(r"hc_head_(\w+)\.weight", stem)
    if match is None:
        raise KeyError(stem)
    return _hyper("mtp.hyper_connection_mixer.", match[1], shape)


def _layer(prefix: str, stem: str, shape: Shape, c: ModelConfig) -> Origin:
    gdn, attn, mlp, ple = (f"{prefix}{m}." for m in ("linear_attn", "self_attn", "mlp", "ple"))
    index_rows = (c.indexer_heads + 1) * c.indexer_dim
    index_shape = (index_rows, c.hidden)
    qk_rows = 2 * c.key_heads * c.key_dim
    tile = _tile_rows

    def one(module: str, move: Move = _first, wanted: Shape = shape) -> Origin:
        return Origin((module,), (wanted,), move)

    table: dict[str, Callable[[], Origin]] = {
        "attn_qkv": lambda: one(gdn + "in_proj_qkv", tile(c, c.value_dim, qk_rows)),
        "attn_gate": lambda: one(gdn + "in_proj_z", tile(c, c.value_dim)),
        "ssm_alpha": lambda: one(gdn + "in_proj_a", tile(c, 1)),
        "ssm_beta": lambda: one(gdn + "in_proj_b", tile(c, 1)),
        "ssm_conv1d": lambda: one(
            gdn + "conv1d", tile(c, c.value_dim, qk_rows), (shape[0], 1, shape[-1])
        ),
        "ssm_dt.bias": lambda: one(gdn + "dt_bias", tile(c, 1)),
        "ssm_a": lambda: one(gdn + "A_log", _decay(c)),
        "ssm_norm": lambda: one(gdn + "norm"),
        "ssm_out": lambda: one(gdn + "out_proj", _tile_columns(c)),
        "attn_q": lambda: one(attn + "q_proj"),
        "attn_k": lambda: one(attn + "k_proj"),
        "attn_v": lambda: one(attn + "v_proj"),
        "attn_output": lambda: one(attn + "o_proj"),
        "attn_q_norm": lambda: one(attn + "q_norm", _plus_one),
        "attn_k_norm": lambda: one(attn + "k_norm", _plus_one),
        "indexer.q_proj": lambda: one(
            attn + "indexer.index_qk_proj", _rows(0, index_rows - c.indexer_dim), index_shape
        ),
        "indexer.k_proj": lambda: one(
            attn + "indexer.index_qk_proj",
            _rows(index_rows - c.indexer_dim, c.indexer_dim),
            index_shape,
        ),
        "indexer.q_norm": lambda: one(attn + "indexer.q_layernorm", _plus_one),
        "indexer.k_norm": lambda: one(attn + "indexer.k_layernorm", _plus_one),
        "ffn_gate_inp": lambda: one(mlp + "gate"),
        "ffn_gate_shexp": lambda: one(mlp + "shared_expert.gate_proj"),
        "ffn_up_shexp": lambda: one(mlp + "shared_expert.up_proj"),
        "ffn_down_shexp": lambda: one(mlp + "shared_expert.down_proj"),
        "ffn_gate_inp_shexp": lambda: one(mlp + "shared_expert_gate", _first, (1, c.hidden)),
        "ple_key": lambda: one(ple + "key_proj"),
        "ple_value": lambda: one(ple + "value_proj"),
        "ple_norm_key": lambda: one(ple + "norm_key", _plus_one),
        "ple_norm_query": lambda: one(ple + "norm_query", _plus_one),
        "ple_norm_conv": lambda: one(ple + "norm_conv", _plus_one),
        "ple_conv1d": lambda: one(ple + "conv1d", _first, (shape[0], 1, shape[-1])),
    }
    return table[stem.removesuffix(".weight")]()


def _rows(first: int, count: int) -> Move:
    return lambda views: Gathered([(views[0], first, count)])


def _tile_rows(c: ModelConfig, head: int, start: int = 0) -> Move:
    """Rows from `start` on are value heads of `head` rows: grouped order to tiled order."""

    def move(views: list[View]) -> View:
        runs = [(views[0], 0, start)] if start else []
        runs += [
            (views[0], start + h * head, head) for h in tiled_heads(c.key_heads, c.value_heads)
        ]
        return Gathered(runs)

    return move


def _tile_columns(c: ModelConfig) -> Move:
    """The same for the columns of the output projection, in the units of the view's form."""

    def move(views: list[View]) -> View:
        units = c.value_dim // views[0].form.unit
        order = np.arange(c.value_heads * units).reshape(c.value_heads, units)
        return Columns(views[0], order[tiled_heads(c.key_heads, c.value_heads)].reshape(-1))

    return move


def _decay(c: ModelConfig) -> Move:
    def minus_exp(values: F32) -> F32:
        # In float64, so that the rounded result does not depend on a library's float32 exp.
        return (-np.exp(values.astype(np.float64))).astype(np.float32)

    return lambda views: Mapped(_tile_rows(c, 1)(views), minus_exp)


def _beside(views: list[View]) -> View:
    if views[0].form is not views[1].form:
        views = [as_values(v) for v in views]
    return Beside(views[0], views[1])
