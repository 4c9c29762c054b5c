"""Bytes of a tiny checkpoint: seeded values, BF16, E4M3 and ModelOpt NVFP4 codes, the safetensors
container. Only integer and correctly rounded float operations, so that the bytes are the same on
every machine and numpy version."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

UNIFORM_STD = ((65536**2 - 1) / 12) ** 0.5  # of one uint16


@dataclass(frozen=True)
class Raw:
    """A tensor as it lies in the file. dtype is safetensors' name, data is little endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Draw:
    """Random values that depend on (seed, name) alone: no order between tensors."""

    def __init__(self, seed: str) -> None:
        self.seed = seed

    def u16(self, name: str, count: int) -> np.ndarray:
        """uint16 [count]"""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        state = np.random.RandomState(np.frombuffer(digest, "<u4"))
        return np.frombuffer(state.bytes(2 * count), "<u2")

    def uniform(self, name: str, shape: Sequence[int], low: float, high: float) -> np.ndarray:
        """float64 [shape] in [low, high)"""
        u = self.u16(name, int(np.prod(shape))).reshape(shape).astype(np.float64)
        return low + u / 65536 * (high - low)

    def normal(self, name: str, shape: Sequence[int], std: float) -> np.ndarray:
        """float64 [shape], mean 0; the sum of four uniforms, cut at 3.46 std"""
        u = self.u16(name, 4 * int(np.prod(shape))).reshape(4, *shape).astype(np.float64)
        return (u.sum(0) - 2 * 65535) * (std / (2 * UNIFORM_STD))


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float -> uint16, round to nearest even. x finite."""
    b = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)


# The 127 values of bytes 0x00..0x7E.
E4M3_POSITIVE = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)]
)[:127]


def e4m3_bits(x: np.ndarray) -> np.ndarray:
    """float -> E4M3 byte, nearest, ties to the even byte, saturating at 448; keeps -0."""
    a = np.minimum(np.abs(np.asarray(x, np.float64)), 448.0)
    high = np.clip(np.searchsorted(E4M3_POSITIVE, a), 1, 126)
    below, above = a - E4M3_POSITIVE[high - 1], E4M3_POSITIVE[high] - a
    up = (above < below) | ((above == below) & (high % 2 == 0))
    byte = np.where(up, high, high - 1)
    return (byte | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """ModelOpt order: uint8 codes [..., K] -> bytes [..., K/2], even column in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def raw_bf16(x: np.ndarray) -> Raw:
    return Raw("BF16", x.shape, bf16_bits(x).astype("<u2").tobytes())


def raw_f32(x: np.ndarray) -> Raw:
    return Raw("F32", np.shape(x), np.asarray(x, "<f4").tobytes())


def raw_i64(x: Sequence[int]) -> Raw:
    return Raw("I64", (len(x),), np.asarray(x, "<i8").tobytes())


def raw_bytes(dtype: str, x: np.ndarray) -> Raw:
    return Raw(dtype, x.shape, np.ascontiguousarray(x, np.uint8).tobytes())


def write_safetensors(path: Path, tensors: dict[str, Raw]) -> None:
    """One file; tensors in name order, header padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(tensors):
        t = tensors[name]
        header[name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [at, at + len(t.data)],
        }
        at += len(t.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.write(b"".join(tensors[name].data for name in sorted(tensors)))


def write_shards(folder: Path, tensors: dict[str, Raw], count: int) -> None:
    """`count` files of about the same size and their index, or one `model.safetensors`."""
    if count == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    total = sum(len(t.data) for t in tensors.values())
    shards: list[dict[str, Raw]] = [{}]
    size = 0
    for name in sorted(tensors):
        if size >= total * len(shards) / count and len(shards) < count:
            shards.append({})
        shards[-1][name] = tensors[name]
        size += len(tensors[name].data)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
