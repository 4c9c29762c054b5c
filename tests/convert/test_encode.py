"""Packing and the tables behind it, against gguf-py, ml_dtypes and plain loops."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest

from imp_runtime.convert.encode import pack_nvfp4
from imp_runtime.convert.forms import E2M1, E4M3, FORM_NVFP4
from imp_runtime.convert.verify_decode import e2m1_value, e4m3_value
from imp_runtime.convert.views import tiled_heads


def test_tables_agree_with_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    e4m3 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(E4M3, e4m3)
    np.testing.assert_array_equal(np.array([e4m3_value(c) for c in range(256)]), e4m3)
    e2m1 = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(E2M1, e2m1)
    np.testing.assert_array_equal(np.signbit(E2M1), np.signbit(e2m1))
    np.testing.assert_array_equal(np.array([e2m1_value(c) for c in range(16)]), e2m1)


@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (64, 640), (5, 2560)])
def test_nvfp4_packing(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    rows, cols = shape
    packed = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (rows, cols // 16), dtype=np.uint8)
    scales[0, 0] = 0x80  # negative zero: the sign is dropped
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, cols)
    blocks = pack_nvfp4(packed.view(np.uint64), scales).reshape(rows, cols // 64, 36)
    for row in range(min(rows, 3)):
        for block in range(cols // 64):
            got = blocks[row, block]
            for s in range(4):
                assert got[s] == scales[row, 4 * block + s] & 0x7F
                for j in range(8):
                    at = 64 * block + 16 * s + j
                    byte = got[4 + 8 * s + j]
                    assert (byte & 15, byte >> 4) == (codes[row, at], codes[row, at + 8])
    values = FORM_NVFP4.decode((packed.view(np.uint64), scales))
    theirs = gguf.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(values, theirs)


def test_head_order() -> None:
    assert tiled_heads(2, 6) == [0, 3, 1, 4, 2, 5]
    assert tiled_heads(3, 3) == [0, 1, 2]
    order = tiled_heads(16, 48)
    assert all(order[j * 16 + k] == k * 3 + j for j in range(3) for k in range(16))
