"""Reads a tiny checkpoint back as float64 arrays, whatever form its tensors are stored in."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.ops import refs

Arrays = dict[str, refs.F64]
PARTS = ("gate_proj", "up_proj", "down_proj")


def raw_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], refs.U8]]:
    """name -> (safetensors dtype, shape, bytes uint8 [n]) of every shard in `folder`"""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.read_bytes()
        (length,) = struct.unpack_from("<Q", blob)
        for name, t in json.loads(blob[8 : 8 + length]).items():
            if name != "__metadata__":
                a, e = (8 + length + o for o in t["data_offsets"])
                out[name] = (t["dtype"], tuple(t["shape"]), np.frombuffer(blob[a:e], np.uint8))
    return out


def load(folder: Path | str) -> tuple[dict[str, Any], Arrays]:
    """(text config, arrays). Names lack `model.language_model.`; experts are stacked under
    `...mlp.experts.gate_up_proj` [E, 2F, H] and `.down_proj` [E, H, F]; the n-gram table is whole,
    `...ngram_embedding.weight`; hash constants stay int64."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    raw = raw_tensors(folder)
    out: Arrays = {}
    for name, (dtype, shape, data) in raw.items():
        short = re.sub(r"^model\.(language_model\.)?", "", name)
        if dtype in ("BF16", "F32", "I64") and not short.startswith("visual."):
            out[short] = _plain(dtype, data).reshape(shape)
        elif dtype in ("U8", "F8_E4M3") and name.endswith(".weight"):
            out[short] = _scaled(raw, name)
    _stack_experts(out)
    _join_table(out)
    return config.get("text_config", config), out


def _plain(dtype: str, data: refs.U8) -> Any:
    if dtype == "I64":
        return np.frombuffer(data.tobytes(), "<i8")
    return refs.decode_bf16(data) if dtype == "BF16" else refs.decode_f32(data)


def _scaled(raw: dict[str, tuple[str, tuple[int, ...], refs.U8]], name: str) -> refs.F64:
    dtype, shape, data = raw[name]

    def other(suffix: str) -> refs.F64:
        d, s, x = raw[name.removesuffix("weight") + suffix]
        return np.asarray(_plain(d, x)).reshape(s)

    if dtype == "U8":
        _, scale_shape, scales = raw[name + "_scale"]
        scale2 = float(other("weight_scale_2"))
        return refs.decode_modelopt_nvfp4(data.reshape(shape), scales.reshape(scale_shape), scale2)
    codes = data.reshape(shape)
    if name + "_scale_inv" in raw:
        return refs.decode_block_fp8(codes, other("weight_scale_inv"))
    return refs.decode_e4m3(codes)  # a shard of the n-gram table: the scale is one for all


def _stack_experts(out: Arrays) -> None:
    pattern = re.compile(r"(.*\.mlp\.experts)\.0\.gate_proj\.weight")
    for p in [m[1] for m in map(pattern.fullmatch, list(out)) if m]:
        count = sum(1 for n in out if re.fullmatch(re.escape(p) + r"\.\d+\.gate_proj\.weight", n))
        gate, up, down = (
            np.stack([out.pop(f"{p}.{e}.{part}.weight") for e in range(count)]) for part in PARTS
        )
        out[p + ".gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[p + ".down_proj"] = down


def _join_table(out: Arrays) -> None:
    for p in [n.removesuffix(".shard_0.weight") for n in out if n.endswith(".shard_0.weight")]:
        count = sum(1 for n in out if n.startswith(p + ".shard_"))
        table = np.concatenate([out.pop(f"{p}.shard_{i}.weight") for i in range(count)])
        out[p + ".weight"] = table * out.pop(p + ".weight_scale", np.ones(1))
