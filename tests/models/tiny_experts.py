"""Storage forms of the routed experts and of the n-gram table of the tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.models import tiny_bytes as b

GROUP = 16  # NVFP4 values that share a scale
BLOCK = 128  # rows and columns that share an FP8 scale
EDGE_EXPERTS = (3, 256, 511)  # carry the NVFP4 edge cases


def put_experts(
    out: dict[str, b.Raw],
    draw: b.Draw,
    seed_name: str,
    name: str,
    t: dict[str, Any],
    form: str,
    raw: Callable[[np.ndarray], b.Raw],
) -> None:
    """Adds the experts of one layer: form is stacked, single, nvfp4 or block_fp8."""
    e, h, f = t["num_experts"], t["hidden_size"], t["moe_intermediate_size"]
    if form == "nvfp4":
        _put_nvfp4(out, draw, seed_name, name, e, {"gate": (f, h), "up": (f, h), "down": (h, f)})
        return
    gate_up = draw.normal(seed_name + ".gate_up_proj", (e, 2 * f, h), 1.3 * h**-0.5)
    down = draw.normal(seed_name + ".down_proj", (e, h, f), 2.5 * f**-0.5)
    if form == "stacked":
        out[name + ".gate_up_proj"] = raw(gate_up)
        out[name + ".down_proj"] = raw(down)
        return
    for i in range(e):
        for part, w in (("gate", gate_up[i, :f]), ("up", gate_up[i, f:]), ("down", down[i])):
            p = f"{name}.{i}.{part}_proj."
            stored = {"weight": raw(w)} if form == "single" else block_fp8(w)
            out.update({p + k: v for k, v in stored.items()})


def _put_nvfp4(
    out: dict[str, b.Raw],
    draw: b.Draw,
    seed_name: str,
    name: str,
    experts: int,
    shapes: dict[str, tuple[int, int]],
) -> None:
    """Per expert: codes U8 [N, K/2], scales E4M3 [N, K/16], weight_scale_2 and input_scale F32."""
    for part, (n, k) in shapes.items():
        p = f"{seed_name}.{part}"
        codes = (draw.u16(p + ".codes", experts * n * k) >> 12).astype(np.uint8)
        codes = codes.reshape(experts, n, k)
        # As ModelOpt leaves them: the largest block of an expert has 448, the others follow.
        scales = 0x6C + draw.u16(p + ".scales", experts * n * k // GROUP) % 0x12
        scales = scales.astype(np.uint8).reshape(experts, n, k // GROUP)
        scales[:, 0, 0] = 0x7E
        for e in (e for e in EDGE_EXPERTS if e < experts):
            _edge_cases(codes[e], scales[e])
        # rms of a code is 2.93, of a scale about 216
        std = (2.5 if part == "down" else 1.3) * k**-0.5
        scale2 = draw.uniform(p + ".scale2", (experts,), 0.6, 1.6) * (std / (2.93 * 216))
        input_scale = draw.uniform(p + ".input", (experts,), 1e-3, 8e-3)
        packed = b.pack_nibbles(codes)
        for e in range(experts):
            q = f"{name}.{e}.{part}_proj."
            out[q + "weight"] = b.raw_bytes("U8", packed[e])
            out[q + "weight_scale"] = b.raw_bytes("F8_E4M3", scales[e])
            out[q + "weight_scale_2"] = b.raw_f32(scale2[e : e + 1].reshape(()))
            out[q + "input_scale"] = b.raw_f32(input_scale[e : e + 1].reshape(()))


def _edge_cases(codes: np.ndarray, scales: np.ndarray) -> None:
    codes[0, :GROUP] = 8  # a block of negative zeros
    scales[1, 1] = 0x00  # a zero block whose codes are not zero
    codes[2, :GROUP] = 0  # a zero block whose scale is not zero
    scales[3, :4] = (0x01, 0x07, 0x08, 0x04)  # the subnormal scales and the smallest normal one
    scales[4, :2] = 0x7E  # 448
    codes[5, :GROUP] = np.arange(GROUP)  # every code


def block_fp8(w: np.ndarray) -> dict[str, b.Raw]:
    """E4M3 [N, K] and a BF16 multiplier per block of 128 x 128."""
    n, k = w.shape
    rows, cols = -(-n // BLOCK), -(-k // BLOCK)
    scale = np.empty((rows, cols))
    for i in range(rows):
        for j in range(cols):
            block = w[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scale[i, j] = np.abs(block).max() / 448
    bits = b.bf16_bits(scale)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    spread = np.repeat(np.repeat(rounded, BLOCK, 0), BLOCK, 1)[:n, :k]
    return {
        "weight": b.raw_bytes("F8_E4M3", b.e4m3_bits(w / spread)),
        "weight_scale_inv": b.Raw("BF16", scale.shape, bits.astype("<u2").tobytes()),
    }


def table_fp8(values: np.ndarray) -> tuple[np.ndarray, b.Raw]:
    """E4M3 bytes [rows, width] and their one BF16 scale, which is far from 1."""
    bits = b.bf16_bits(np.array([np.abs(values).max() / 448]))
    scale = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    codes = b.e4m3_bits(values / scale)
    codes[:, 0] = np.where(codes[:, 0] % 7 == 0, 0x80, codes[:, 0])  # some negative zeros
    codes[:, 1] = np.where(codes[:, 1] % 7 == 0, 0x03, codes[:, 1])  # some subnormals
    return codes, b.Raw("BF16", (1,), bits.astype("<u2").tobytes())
