"""How values are stored while they travel from a checkpoint to a GGUF, and how to decode them.

A tile is a tuple of arrays that share rows (axis 0) and units (axis 1); a unit is the smallest run
of consecutive elements of a row that can be moved by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tile = tuple[NDArray[Any], ...]
F32 = NDArray[np.float32]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NVFP4_GROUP = 16  # elements that share one E4M3 scale


def _e4m3_table() -> F32:
    code = np.arange(256, dtype=np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[code & 127 == 127] = np.nan
    return np.where(code >= 128, -value, value).astype(np.float32)


E4M3 = _e4m3_table()  # float32 [256], by code


@dataclass(frozen=True)
class Form:
    """A storage form: dtypes of a tile's arrays, elements per unit, and the decoder to float32."""

    name: str
    dtypes: tuple[type[np.generic], ...]
    unit: int
    decode: Callable[[Tile], F32]

    def empty(self, rows: int, cols: int) -> Tile:
        """An uninitialised tile for `rows` rows of `cols` elements."""
        return tuple(np.empty((rows, cols // self.unit), d) for d in self.dtypes)


def _bf16(tile: Tile) -> F32:
    return (tile[0].astype(np.uint32) << 16).view(np.float32)


def _nvfp4(tile: Tile) -> F32:
    codes, scales = tile
    pairs = codes.view(np.uint8)  # even column in the low nibble
    values = np.empty((*pairs.shape, 2), np.float32)
    values[..., 0] = E2M1[pairs & 15]
    values[..., 1] = E2M1[pairs >> 4]
    grouped = values.reshape(len(codes), -1, NVFP4_GROUP)
    grouped *= E4M3[scales][..., None]
    return grouped.reshape(len(codes), -1)


FORM_F32 = Form("F32", (np.float32,), 1, lambda tile: np.asarray(tile[0], np.float32))
FORM_F16 = Form("F16", (np.float16,), 1, lambda tile: tile[0].astype(np.float32))
FORM_BF16 = Form("BF16", (np.uint16,), 1, _bf16)
FORM_E4M3 = Form("FP8", (np.uint8,), 1, lambda tile: E4M3[tile[0]])
# Codes as the checkpoint packs them (8 bytes a group), one scale byte a group.
FORM_NVFP4 = Form("NVFP4", (np.uint64, np.uint8), NVFP4_GROUP, _nvfp4)

PLAIN_FORMS = {"F32": FORM_F32, "F16": FORM_F16, "BF16": FORM_BF16}
