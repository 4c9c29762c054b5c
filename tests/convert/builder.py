"""Small checkpoints in every dialect that the converter reads, with the values they stand for.

`build` returns the tensors as they lie in the files and, under the same module names, float32
values decoded here with `ml_dtypes`: what a conversion has to reproduce.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.models import tiny_tokenizer
from tests.models.tiny import ngram_constants
from tests.models.tiny_bytes import Raw, raw_i64, write_shards
from tests.models.tiny_recipes import RECIPES, shapes

EXPERTS = 12
HIDDEN = 128
WIDTH = 64  # of a routed expert

_NUMPY = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass
class Built:
    """A checkpoint before it is written. `values` maps modules (no prefix, no `.weight`)."""

    text: dict[str, Any]
    tensors: dict[str, Raw] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    root: dict[str, Any] = field(default_factory=dict)
    prefix: str = "model.language_model."

    def name(self, module: str) -> str:
        """The module's name in the file."""
        outside = module.startswith(("mtp.", "lm_head", "model."))
        return module if outside else self.prefix + module

    def write(self, folder: Path, shards: int = 1) -> Path:
        """Writes config, tokenizer and weights."""
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {"model_type": "qwen4_exp", "text_config": self.text} | self.root
        if self.prefix == "model.":
            config = {"architectures": ["Qwen4ExpForCausalLM"]} | self.text | self.root
        (folder / "config.json").write_text(json.dumps(config))
        tiny_tokenizer.write_tokenizer(folder)
        write_shards(folder, self.tensors, shards)
        return folder


def text_config(**changes: Any) -> dict[str, Any]:
    """Four layers, 2 key and 6 value heads, all optional blocks on."""
    base = RECIPES["base"].text
    return (
        base
        | {
            "num_hidden_layers": 4,
            "layer_types": base["layer_types"][:4],
            "hidden_size": HIDDEN,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "shared_expert_intermediate_size": WIDTH,
        }
        | changes
    )


def raw(values: np.ndarray, dtype: str) -> tuple[Raw, np.ndarray]:
    """Values rounded to a plain type: the tensor, and float32 of what it holds."""
    stored = values.astype(_NUMPY[dtype])
    return Raw(dtype, values.shape, stored.tobytes()), stored.astype(np.float32)


def nvfp4(rng: np.random.Generator, n: int, k: int, *, compressed: bool = False) -> Quantised:
    """Random codes, scales (0, subnormal, 448 among them) and factors; and their float32 values."""
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.integers(0x20, 0x7F, (n, k // 16), dtype=np.uint8)
    scales[0, : min(4, k // 16)] = [0x00, 0x03, 0x7E, 0x80][: min(4, k // 16)]
    factor = np.float32(rng.uniform(1e-4, 1e-3))
    activation = np.float32(rng.uniform(1e-3, 1e-2))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    out = {
        "weight_packed" if compressed else "weight": Raw("U8", packed.shape, packed.tobytes()),
        "weight_scale": Raw("F8_E4M3", scales.shape, scales.tobytes()),
    }
    if compressed:  # their global scales are the reciprocals
        factor, activation = np.float32(1 / factor), np.float32(1 / activation)
        out["weight_global_scale"] = Raw("F32", (1,), factor.tobytes())
        out["input_global_scale"] = Raw("F32", (1,), activation.tobytes())
        factor = np.float32(1) / factor
    else:
        out["weight_scale_2"] = Raw("F32", (), factor.tobytes())
        out["input_scale"] = Raw("F32", (), activation.tobytes())
    e2m1 = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    e4m3 = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return out, e2m1 * np.repeat(e4m3, 16, axis=1) * factor


def fp8(rng: np.random.Generator, n: int, k: int, kind: str) -> Quantised:
    """E4M3 codes with one scale per `tensor`, `channel` or `block` of 128 x 128."""
    codes = rng.integers(0, 0x7F, (n, k), dtype=np.uint8)
    codes |= rng.integers(0, 2, (n, k), dtype=np.uint8) << 7
    grid = {"tensor": (1, 1), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]
    bits, scale = raw(rng.uniform(1e-4, 1e-3, grid), "F32" if kind == "channel" else "BF16")
    if kind == "block":
        spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:n, :k]
    else:
        spread = scale
    shape = (1,) if kind == "tensor" else grid
    out = {
        "weight": Raw("F8_E4M3", (n, k), codes.tobytes()),
        "weight_scale_inv" if kind == "block" else "weight_scale": Raw(
            bits.dtype, shape, bits.data
        ),
    }
    return out, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread


Quantised = tuple[dict[str, Raw], np.ndarray]  # tensors by suffix, and the values they stand for
Quantise = Callable[[np.random.Generator, str, int, int], Quantised | None]


def build(
    *,
    plain: str = "BF16",
    experts: str = "stacked",
    mtp: str = "stacked",
    table: str = "plain",
    dense: Quantise | None = None,
    prefix: str = "model.language_model.",
    seed: int = 0,
    **changes: Any,
) -> Built:
    """A whole checkpoint.

    Args:
        plain: dtype of what is not quantised.
        experts, mtp: stacked, single, nvfp4, compressed or block (FP8); mtp also "" for no head.
        table: plain, fp8, fp8_each (a scale per shard), nvfp4 or whole (not sharded).
        dense: quantises linear maps outside the experts, or leaves them (None).
        changes: of `text_config`.
    """
    rng = np.random.default_rng(seed)
    text = text_config(**changes) | {"mtp_num_hidden_layers": 1 if mtp else 0}
    built = Built(text, prefix=prefix)
    if prefix != "model.":
        built.root["image_token_id"] = tiny_tokenizer.IMAGE_PAD
    for full, shape in shapes(text).items():
        module = full.removesuffix(".weight")
        made = dense(rng, module, *shape) if dense is not None and len(shape) == 2 else None
        if made is None:
            values = rng.normal(0, 0.3, shape)
            tensor, built.values[module] = raw(values, plain)
            built.tensors[built.name(full)] = tensor
            continue
        parts, built.values[module] = made
        built.tensors.update({f"{built.name(module)}.{k}": v for k, v in parts.items()})
    for layer in range(text["num_hidden_layers"]):
        _experts(built, rng, f"layers.{layer}.", experts, plain)
    if mtp:
        _experts(built, rng, "mtp.layers.0.", mtp, plain)
    for index, one_based in enumerate(sorted(text["ple_layer_ids"])):
        _table(built, rng, f"layers.{one_based - 1}.ple.ple_embedding.", index, table, plain)
    return built


def _experts(built: Built, rng: np.random.Generator, prefix: str, form: str, plain: str) -> None:
    count, f, h = built.text["num_experts"], built.text["moe_intermediate_size"], HIDDEN
    base = f"{prefix}mlp.experts"
    if form == "stacked":
        for part, shape in (("gate_up_proj", (count, 2 * f, h)), ("down_proj", (count, h, f))):
            tensor, values = raw(rng.normal(0, 0.3, shape), plain)
            built.tensors[built.name(f"{base}.{part}")] = tensor
            if part == "down_proj":
                built.values[f"{base}.down"] = values
            else:
                built.values[f"{base}.gate"] = values[:, :f]
                built.values[f"{base}.up"] = values[:, f:]
        return
    for part, (n, k) in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f))):
        stack = []
        for e in range(count):
            if form == "single":
                tensor, values = raw(rng.normal(0, 0.3, (n, k)), plain)
                parts = {"weight": tensor}
            elif form == "block":
                parts, values = fp8(rng, n, k, "block")
            else:
                parts, values = nvfp4(rng, n, k, compressed=form == "compressed")
            stack.append(values)
            name = built.name(f"{base}.{e}.{part}_proj")
            built.tensors.update({f"{name}.{key}": v for key, v in parts.items()})
        built.values[f"{base}.{part}"] = np.stack(stack)


def _table(
    built: Built, rng: np.random.Generator, prefix: str, index: int, form: str, plain: str
) -> None:
    text = built.text
    multipliers, sizes, offsets, rows = ngram_constants(text, index)
    name = built.name(prefix)
    built.tensors[name + "layer_multipliers"] = raw_i64(multipliers)
    built.tensors[name + "ngram_heads_vocab_sizes"] = raw_i64(sizes)
    built.tensors[name + "ngram_heads_offsets"] = raw_i64(offsets)
    width, parts = text["ple_embed_dim"] // len(sizes), text["split_ngram_parts"]
    table = name + "ngram_embedding"
    module = prefix + "ngram_embedding"
    if form == "whole":
        tensor, built.values[module] = raw(rng.normal(0, 0.3, (rows, width)), plain)
        built.tensors[table + ".weight"] = tensor
        return
    each = rows // parts
    stack = []
    shared = np.float32(ml_dtypes.bfloat16(rng.uniform(1e-4, 1e-3)))
    for i in range(parts):
        shard = f"{table}.shard_{i}"
        if form == "plain":
            tensor, values = raw(rng.normal(0, 0.3, (each, width)), plain)
            built.tensors[shard + ".weight"] = tensor
        elif form == "nvfp4":
            tensors, values = nvfp4(rng, each, width)
            built.tensors[shard + ".weight"] = tensors["weight"]
            built.tensors[shard + ".weight_scale"] = tensors["weight_scale"]
            built.tensors[shard + ".weight_scale_2"] = tensors["weight_scale_2"]
        else:
            tensors, values = fp8(rng, each, width, "tensor")
            built.tensors[shard + ".weight"] = tensors["weight"]
            if form == "fp8_each":
                built.tensors[shard + ".weight_scale"] = tensors["weight_scale"]
            else:
                codes = np.frombuffer(tensors["weight"].data, ml_dtypes.float8_e4m3fn)
                values = codes.astype(np.float32).reshape(each, width) * shared
        stack.append(values)
    if form == "fp8":
        bits = ml_dtypes.bfloat16(shared)
        built.tensors[table + ".weight_scale"] = Raw("BF16", (1,), np.array(bits).tobytes())
    built.values[module] = np.concatenate(stack)


def add_vision(built: Built) -> None:
    """Two tensors of a vision tower."""
    for name in ("model.visual.patch_embed.proj.weight", "model.visual.merger.norm.weight"):
        built.tensors[name] = raw(np.ones((8, 4)), "BF16")[0]
