"""Tiny checkpoints in the released layout, made from a seed: `write(folder, name)`.

Each recipe is a config and a storage form. The values depend on (recipe, tensor name) alone; they
are scaled so that every block moves the logits and nothing saturates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.models import tiny_bytes as b
from tests.models import tiny_tokenizer as tok
from tests.models.tiny_experts import put_experts, table_fp8
from tests.models.tiny_recipes import RECIPES, Recipe, shapes

__all__ = ["RECIPES", "config", "digest", "tensors", "write"]


def fill(draw: b.Draw, name: str, shape: tuple[int, ...], streams: int) -> np.ndarray:
    """Values of one tensor, float64 [shape]."""
    n = name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
    fan = float(np.prod(shape[1:])) ** -0.5 if len(shape) > 1 else 1.0
    if n == "A_log":
        return draw.uniform(name, shape, -1.5, 1.5)
    if n == "dt_bias":
        return draw.uniform(name, shape, -4.0, -1.0)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + draw.normal(name, shape, 0.15)  # a plain weight
    if n in ("q_norm", "k_norm"):
        return 0.8 + draw.normal(name, shape, 0.15)  # attention that is not flat
    if len(shape) == 1:
        return draw.normal(name, shape, 0.2)
    if n == "embed_tokens":
        return draw.normal(name, shape, 1.0)
    if n == "conv1d":
        return draw.normal(name, shape, 0.5)
    if n == "gate":  # router: the last expert and the ones around 256 win often
        x = draw.normal(name, shape, 2.0 * fan)
        for e in {255, 256, shape[0] - 1} & set(range(shape[0])):
            x[e] *= 2.0
        return x
    gains = {
        "input_mix_weight_down": 1.2 * streams,
        "input_mix_weight_up": 4.0,
        "block_inject_weight": 1.0 * streams,
        "lm_head": 6.0,
        "ngram_embedding": 1.0 / fan,
        "in_proj_a": 0.5,
        "index_qk_proj": 1.5,
        "o_proj": 2.0,
        "out_proj": 1.5,
        "down_proj": 2.5,
        "shared_expert_gate": 2.0,
    }
    return draw.normal(name, shape, gains.get(n, 1.2) * fan)


def tensors(name: str) -> dict[str, b.Raw]:
    """All tensors of a recipe under the names of the checkpoint."""
    r = RECIPES[name]
    t = r.text
    draw = b.Draw(f"tiny/{name}")
    prefix = "model.language_model." if r.wrapper else "model."
    raw = b.raw_bf16 if r.weights == "BF16" else b.raw_f32
    out: dict[str, b.Raw] = {}

    def full_name(n: str) -> str:
        return n if n.startswith(("lm_head", "mtp.")) else prefix + n

    for n, shape in shapes(t).items():
        out[full_name(n)] = raw(fill(draw, n, shape, t["hc_count"]))
    for i in range(t["num_hidden_layers"]):
        p = f"layers.{i}.mlp.experts"
        put_experts(out, draw, p, full_name(p), t, r.experts, raw)
    if r.mtp in ("stacked", "block_fp8"):
        p = "mtp.layers.0.mlp.experts"
        put_experts(out, draw, p, p, t, r.mtp, raw)
    if r.mtp == "fake":
        out["mtp.fc.weight"] = raw(draw.normal("mtp.fc", (8, 16), 0.1))
        out["mtp.norm.weight"] = raw(draw.normal("mtp.norm", (8,), 0.1))
    for index, one_based in enumerate(sorted(t.get("ple_layer_ids", []))):
        p = f"layers.{one_based - 1}.ple.ple_embedding."
        _put_table(out, draw, p, full_name(p), r, index, raw)
    if r.wrapper:
        out["model.visual.patch_embed.proj.weight"] = raw(draw.normal("visual", (8, 4, 4), 0.1))
        out["model.visual.merger.norm.weight"] = raw(draw.normal("visual norm", (8,), 0.1))
    return out


def _put_table(
    out: dict[str, b.Raw],
    draw: b.Draw,
    p: str,
    q: str,
    r: Recipe,
    i: int,
    raw: Callable[[np.ndarray], b.Raw],
) -> None:
    t = r.text
    multipliers, sizes, offsets, rows = ngram_constants(t, i)
    out[q + "layer_multipliers"] = b.raw_i64(multipliers)
    out[q + "ngram_heads_vocab_sizes"] = b.raw_i64(sizes)
    out[q + "ngram_heads_offsets"] = b.raw_i64(offsets)
    values = fill(draw, p + "ngram_embedding.weight", (rows, t["ple_embed_dim"] // len(sizes)), 1)
    parts = t["split_ngram_parts"]
    if rows % parts:
        raise ValueError(f"{rows} table rows do not divide into {parts} shards")
    if r.table == "fp8":
        shards, scale = table_fp8(values)
        out[q + "ngram_embedding.weight_scale"] = scale
        cut = [b.raw_bytes("F8_E4M3", s) for s in np.split(shards, parts)]
    else:
        cut = [raw(s) for s in np.split(values, parts)]
    for k, shard in enumerate(cut):
        out[q + f"ngram_embedding.shard_{k}.weight"] = shard


def ngram_constants(t: dict[str, Any], index: int) -> tuple[list[int], list[int], list[int], int]:
    """(multipliers [ngram_size], head sizes, head offsets, padded rows) of the index-th block."""
    m64, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(v: int) -> int:
        v = (v + gamma) & m64
        v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & m64
        v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & m64
        return v ^ (v >> 31)

    half = max(1, ((1 << 63) - 1) // t["vocab_size"] // 2)
    base = t["seed"] + 10007 * index
    multipliers = [
        2 * (mix((base + gamma * (i + 1)) & m64) % half) + 1 for i in range(t["ngram_size"])
    ]
    heads = (t["ngram_size"] - 1) * t["heads_per_ngram"]
    primes: list[int] = []
    n = t["ngram_vocab_size_base"]
    while len(primes) < (index + 1) * heads:
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            primes.append(n)
        n += 1
    sizes = primes[index * heads :]
    offsets = [sum(sizes[:i]) for i in range(heads)]
    unit = t["make_ngram_vocab_size_divisible_by"]
    return multipliers, sizes, offsets, -(-sum(sizes) // unit) * unit


def config(name: str) -> dict[str, Any]:
    """config.json of a recipe."""
    r = RECIPES[name]
    if not r.wrapper:
        return {"architectures": ["Qwen4ExpForCausalLM"]} | r.text
    out: dict[str, Any] = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": tok.IMAGE_PAD,
        "video_token_id": tok.VIDEO_PAD,
        "vision_start_token_id": tok.VISION_START,
        "vision_end_token_id": tok.VISION_END,
        "text_config": r.text,
        "tie_word_embeddings": r.text["tie_word_embeddings"],
        "vision_config": {"depth": 1, "hidden_size": 8, "model_type": "qwen4_exp"},
    }
    if r.experts == "nvfp4":
        out["quantization_config"] = quantization(r)
    return out


def quantization(r: Recipe) -> dict[str, Any]:
    """ModelOpt's description of a mixed-precision export."""
    p = "model.language_model.layers."
    layers: dict[str, Any] = {
        f"{p}{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}
        for i in range(r.text["num_hidden_layers"])
    }
    layers[f"{p}1.ple.ple_embedding.ngram_embedding"] = {"quant_algo": "FP8"}
    layers["mtp.layers.0.mlp.experts"] = {"quant_algo": "FP8_PB_WO", "block_size": 128}
    ignore = ["lm_head", "model.visual*", "model.language_model.embed_tokens", "*.mlp.gate"]
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ignore,
        "quantized_layers": layers,
        "producer": {"name": "modelopt", "version": "0.40.0"},
    }


def write(folder: Path | str, name: str) -> Path:
    """Writes the checkpoint of RECIPES[name] into `folder` (made if absent); returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    c = config(name)
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    if "quantization_config" in c:
        q = {
            k: v for k, v in c["quantization_config"].items() if k not in ("ignore", "quant_method")
        }
        q["exclude_modules"] = c["quantization_config"]["ignore"]
        text = json.dumps({"producer": q.pop("producer"), "quantization": q}, indent=1)
        (folder / "hf_quant_config.json").write_text(text)
    tok.write_tokenizer(folder)
    b.write_shards(folder, tensors(name), RECIPES[name].shards)
    return folder


def digest(folder: Path | str) -> str:
    """sha256 over the weight files and the config of a checkpoint folder."""
    h = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")) + [Path(folder) / "config.json"]:
        h.update(path.name.encode() + path.read_bytes())
    return h.hexdigest()
