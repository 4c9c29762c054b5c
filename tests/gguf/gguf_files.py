"""Writes GGUF files for the tests."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

QUANT = gguf.GGMLQuantizationType


class Writer(gguf.GGUFWriter):  # type: ignore[misc]
    """A GGUFWriter that closes itself: `with Writer(path, arch) as w: ...` writes the file."""

    def __init__(self, path: Path, arch: str = "test", **options: Any) -> None:
        super().__init__(path, arch, **options)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.write_header_to_file()
            self.write_kv_data_to_file()
            self.write_tensors_to_file()
        self.close()


def every_type(path: Path) -> dict[str, tuple[str, Any]]:
    """A file with a key of every type; returns key -> (type name, value)."""
    expected = {
        "v.u8": ("u8", 255),
        "v.i8": ("i8", -128),
        "v.u16": ("u16", 65535),
        "v.i16": ("i16", -32768),
        "v.u32": ("u32", 2**32 - 1),
        "v.i32": ("i32", -(2**31)),
        "v.f32": ("f32", 0.5),
        "v.bool": ("bool", True),
        "v.string": ("string", "Ġtext\n"),
        "v.u64": ("u64", 2**64 - 1),
        "v.i64": ("i64", -(2**63)),
        "v.f64": ("f64", 0.1),
        "v.strings": ("string[]", ["a", "", "ü"]),
        "v.nested": ("array[]", [[1, 2], [3]]),
    }
    arrays = {
        "u8[]": np.array([0, 255], np.uint8),
        "i8[]": np.array([-128, 127], np.int8),
        "u16[]": np.array([65535], np.uint16),
        "i16[]": np.array([-32768], np.int16),
        "u32[]": np.array([2**32 - 1], np.uint32),
        "i32[]": np.array([-(2**31), 1], np.int32),
        "f32[]": np.array([0.5, -np.inf], np.float32),
        "bool[]": np.array([True, False, True]),
        "u64[]": np.array([2**64 - 1], np.uint64),
        "i64[]": np.array([-(2**63)], np.int64),
        "f64[]": np.array([0.1], np.float64),
    }
    value_types = {t.name.lower(): t for t in gguf.GGUFValueType}
    long = {"u": "uint", "i": "int", "f": "float"}
    with Writer(path) as w:
        for key, (kind, value) in expected.items():
            if kind in ("string[]", "array[]"):
                w.add_array(key, value)
            else:
                name = kind if kind in ("bool", "string") else long[kind[0]] + kind[1:]
                w.add_key_value(key, value, value_types[name])
        for kind, value in arrays.items():
            name = "bool" if kind == "bool[]" else long[kind[0]] + kind[1:-2]
            w.add_key_value(
                f"a.{kind}", value.tolist(), value_types["array"], sub_type=value_types[name]
            )
            expected[f"a.{kind}"] = (kind, value)
    return expected


def small(path: Path, arch: str = "test") -> None:
    """A file with some keys and tensors of several types."""
    rng = np.random.default_rng(1)
    with Writer(path, arch) as w:
        w.add_uint32(f"{arch}.block_count", 2)
        w.add_array("list", [1, 2, 3])
        w.add_array("flags", [True, False])
        w.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
        for name in ("NVFP4", "Q8_0", "Q4_K", "BF16"):
            block, size = gguf.GGML_QUANT_SIZES[QUANT[name]]
            rows = rng.integers(0, 256, (3, 2 * size), np.uint8)
            w.add_tensor(f"blk.0.{name}.weight", rows, raw_dtype=QUANT[name])
        w.add_tensor("norm.weight", np.ones(5, np.float32))


def header(n_tensors: int, n_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text
