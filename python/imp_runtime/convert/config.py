"""The shape of a `qwen4_exp` model as `config.json` states it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imp_runtime.convert.errors import ConvertError, Problems

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
FULL_ATTENTION = ("full_attention", "indexed_attention", "qwen_sparse_attention")
MAX_LAYERS = 1024  # decoder layers


@dataclass(frozen=True)
class ModelConfig:
    """`config.json` with defaults filled in. Widths are elements, layers are numbered from 0."""

    vocab_size: int
    hidden: int
    layers: int
    recurrent: tuple[bool, ...]
    full_attention_interval: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rope_sections: tuple[int, ...]
    context_length: int
    norm_eps: float
    hidden_act: str
    output_gate_type: str
    conv_kernel: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    experts: int
    experts_used: int
    expert_ff: int
    shared_ff: int
    norm_topk_prob: bool
    hc_count: int
    hc_lowrank: int
    indexer_heads: int  # 0: no indexer
    indexer_dim: int
    indexer_budget: int
    indexer_ratio: int
    ngram_layers: tuple[int, ...]
    ngram_size: int
    heads_per_ngram: int
    ngram_embed_dim: int
    ngram_conv_kernel: int
    ngram_base: int
    ngram_pad: int
    ngram_seed: int
    boundary_token: int
    image_token: int | None
    tied_embeddings: bool
    mtp_layers: int
    fp8_block: tuple[int, int]
    w4a16: tuple[str, ...]  # modules whose NVFP4 weights must not meet 4-bit activations
    notes: tuple[str, ...]

    @property
    def ngram_heads(self) -> int:
        """Table rows read per token."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_row_dim(self) -> int:
        """Width of a table row."""
        return self.ngram_embed_dim // self.ngram_heads


class _Reader:
    """Typed look-ups in one JSON object that note what is wrong."""

    def __init__(self, values: dict[str, Any], problems: Problems) -> None:
        self.values = values
        self.problems = problems

    def size(self, key: str, fallback: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.values.get(key)
        if value is None:
            value = fallback
        if type(value) is int and value >= least:
            return value
        self.problems.add(f"{key} is {value!r}, a whole number of at least {least} is needed")
        return least

    def number(self, key: str, fallback: float | None = None) -> float:
        """A number."""
        value = self.values.get(key)
        if value is None:
            value = fallback
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        self.problems.add(f"{key} is {value!r}, a number is needed")
        return 1.0

    def text(self, key: str, fallback: str) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return fallback
        if isinstance(value, str):
            return value
        self.problems.add(f"{key} is {value!r}, a string is needed")
        return fallback

    def integers(self, key: str, fallback: list[int]) -> list[int]:
        """A list of integers."""
        value = self.values.get(key)
        if value is None:
            return fallback
        if isinstance(value, list) and all(type(v) is int for v in value):
            return list(value)
        self.problems.add(f"{key} is {value!r}, a list of whole numbers is needed")
        return fallback

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty if absent."""
        value = self.values.get(key)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.problems.add(f"{key} is {value!r}, an object is needed")
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConvertError: if it is missing or not one.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConvertError(f"{path} is missing") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ConvertError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path} is not a JSON object")
    return value


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` (and `hf_quant_config.json`) of a checkpoint folder.

    Raises:
        ConvertError: listing every value that is missing, malformed or not supported.
    """
    root = read_json(folder / "config.json")
    problems = Problems()
    outer = _Reader(root, problems)
    text = outer.mapping("text_config") or root
    r = _Reader(text, problems)
    kind = root.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConvertError(
            f"{folder / 'config.json'}: model_type {kind!r} is not supported, "
            f"imp converts {' and '.join(MODEL_TYPES)}"
        )
    notes: list[str] = []
    layers = min(r.size("num_hidden_layers"), MAX_LAYERS + 1)
    if layers > MAX_LAYERS:
        problems.add(f"num_hidden_layers is {text['num_hidden_layers']}, at most {MAX_LAYERS}")
    interval = r.size("full_attention_interval", 4)
    rope = r.mapping("rope_parameters") or r.mapping("rope_scaling")
    p = _Reader({**text, **rope}, problems)
    rope_type = p.text("rope_type", "default")
    if rope_type != "default":
        problems.add(f"rope_type is {rope_type!r}, only 'default' is supported")
    if text.get("attention_bias"):
        problems.add("attention_bias is true, only models without biases are supported")
    head_dim = r.size("head_dim", 256)
    sections = p.integers("mrope_section", [11, 11, 10])
    indexer = _indexer(r, problems)
    ngram_layers = _ngram_layers(r, layers, problems)
    hidden = r.size("hidden_size")
    ngram_size = r.size("ngram_size", 3, least=2)
    per_ngram = r.size("heads_per_ngram", 8)
    embed = r.size("ple_embed_dim", hidden)
    if embed % ((ngram_size - 1) * per_ngram):
        problems.add(
            f"ple_embed_dim {embed} does not divide into {(ngram_size - 1) * per_ngram} heads"
        )
    quant = _quantisation(root, folder)
    config = ModelConfig(
        vocab_size=r.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        recurrent=_recurrent(text, layers, interval, problems),
        full_attention_interval=interval,
        heads=r.size("num_attention_heads"),
        kv_heads=r.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * p.number("partial_rotary_factor", 1.0)),
        rope_theta=p.number("rope_theta"),
        rope_sections=tuple((sections + [0, 0, 0, 0])[:4]),
        context_length=r.size("max_position_embeddings", 32768),
        norm_eps=r.number("rms_norm_eps", 1e-6),
        hidden_act=r.text("hidden_act", "silu"),
        output_gate_type=r.text("output_gate_type", r.text("hidden_act", "silu")),
        conv_kernel=r.size("linear_conv_kernel_dim", 4),
        key_heads=r.size("linear_num_key_heads", 16),
        value_heads=r.size("linear_num_value_heads", 32),
        key_dim=r.size("linear_key_head_dim", 128),
        value_dim=r.size("linear_value_head_dim", 128),
        experts=r.size("num_experts"),
        experts_used=r.size("num_experts_per_tok"),
        expert_ff=r.size("moe_intermediate_size"),
        shared_ff=r.size("shared_expert_intermediate_size"),
        norm_topk_prob=text.get("norm_topk_prob") is not False,
        hc_count=r.size("hc_count", 4, least=2),
        hc_lowrank=r.size("hc_lowrank", 320),
        indexer_heads=indexer[0],
        indexer_dim=indexer[1],
        indexer_budget=indexer[2],
        indexer_ratio=indexer[3],
        ngram_layers=ngram_layers,
        ngram_size=ngram_size,
        heads_per_ngram=per_ngram,
        ngram_embed_dim=embed,
        ngram_conv_kernel=r.size("ple_conv_kernel_size", 4),
        ngram_base=r.size("ngram_vocab_size_base", 20_000_000),
        ngram_pad=r.size("make_ngram_vocab_size_divisible_by", 128),
        ngram_seed=r.size("seed", 1234, least=0),
        boundary_token=_boundary_token(text, root, bool(ngram_layers), notes, problems),
        image_token=_image_token(text, root, problems),
        tied_embeddings=bool(root.get("tie_word_embeddings", text.get("tie_word_embeddings"))),
        mtp_layers=r.size("mtp_num_hidden_layers", 0, least=0),
        fp8_block=_fp8_block(quant, problems),
        w4a16=_w4a16(quant),
        notes=tuple(notes),
    )
    if config.value_heads % config.key_heads:
        problems.add(
            f"linear_num_value_heads {config.value_heads} is not a multiple of "
            f"linear_num_key_heads {config.key_heads}"
        )
    problems.raise_if_any(str(folder / "config.json"))
    return config


def _recurrent(
    text: dict[str, Any], layers: int, interval: int, problems: Problems
) -> tuple[bool, ...]:
    types = text.get("layer_types")
    if types is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        count = len(types) if isinstance(types, list) else 0
        problems.add(f"layer_types has {count} entries for {layers} layers")
        return (True,) * layers
    for kind in types:
        if kind != "linear_attention" and kind not in FULL_ATTENTION:
            problems.add(f"layer_types has the unknown entry {kind!r}")
    return tuple(kind == "linear_attention" for kind in types)


def _indexer(r: _Reader, problems: Problems) -> tuple[int, int, int, int]:
    keys = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    absent = [k for k in keys if r.values.get(k) is None]
    if len(absent) == len(keys):
        return (0, 0, 0, 0)
    if absent:
        problems.add(f"{', '.join(absent)} missing although other indexer values are there")
        return (0, 0, 0, 0)
    if r.size("indexer_kv_heads", 1) != 1:
        problems.add(f"indexer_kv_heads is {r.values['indexer_kv_heads']}, only 1 is supported")
    return (r.size(keys[0]), r.size(keys[1]), r.size(keys[2]), r.size(keys[3]))


def _ngram_layers(r: _Reader, layers: int, problems: Problems) -> tuple[int, ...]:
    ids = sorted(set(r.integers("ple_layer_ids", [])))
    for one_based in ids:
        if not 1 <= one_based <= layers:
            problems.add(f"ple_layer_ids names layer {one_based}, the model has 1 to {layers}")
    return tuple(i - 1 for i in ids)


def _boundary_token(
    text: dict[str, Any], root: dict[str, Any], needed: bool, notes: list[str], problems: Problems
) -> int:
    value = text.get("eos_token_id", root.get("eos_token_id"))
    if isinstance(value, list) and value:
        if len(value) > 1:
            notes.append(f"eos_token_id lists {value}: {value[0]} cuts the n-gram windows")
        value = value[0]
    if type(value) is int and value >= 0:
        return value
    if needed:
        problems.add(f"eos_token_id is {value!r}, the n-gram block needs it as its boundary")
    return 0


def _image_token(text: dict[str, Any], root: dict[str, Any], problems: Problems) -> int | None:
    value = root.get("image_token_id", text.get("image_token_id"))
    if value is None or (type(value) is int and value >= 0):
        return value
    problems.add(f"image_token_id is {value!r}, a token id is needed")
    return None


def _quantisation(root: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What config.json and hf_quant_config.json say, the first one winning."""
    merged: dict[str, Any] = {}
    path = folder / "hf_quant_config.json"
    if path.is_file():
        inner = read_json(path).get("quantization")
        merged.update(inner if isinstance(inner, dict) else {})
    quant = root.get("quantization_config")
    merged.update(quant if isinstance(quant, dict) else {})
    return merged


def _fp8_block(quant: dict[str, Any], problems: Problems) -> tuple[int, int]:
    value = quant.get("weight_block_size")
    if value is None:
        return (128, 128)
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
        return (value[0], value[1])
    problems.add(f"weight_block_size is {value!r}, two positive numbers are needed")
    return (128, 128)


def _w4a16(quant: dict[str, Any]) -> tuple[str, ...]:
    layers = quant.get("quantized_layers")
    entries = layers.items() if isinstance(layers, dict) else ()
    modules = [
        name for name, e in entries if isinstance(e, dict) and e.get("quant_algo") == "W4A16_NVFP4"
    ]
    if quant.get("quant_algo") == "W4A16_NVFP4":
        modules.append("")
    return tuple(modules)
