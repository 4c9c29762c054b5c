"""Tiles to the bytes that a GGUF holds."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from imp_runtime.convert.errors import ConvertError
from imp_runtime.convert.forms import (
    F32,
    FORM_BF16,
    FORM_E4M3,
    FORM_F16,
    FORM_F32,
    FORM_NVFP4,
    Form,
    Tile,
)
from imp_runtime.convert.schemes import is_nan_code

Bytes = NDArray[np.uint8]

MAX_F16 = 65504.0
# Largest magnitude that a type can hold; Q8_0 keeps a block's largest value over 127 as F16.
MAX_MAGNITUDE = {Type.F16: MAX_F16, Type.BF16: 3.3895e38, Type.Q8_0: MAX_F16 * 127}
SAME = {Type.F32: FORM_F32, Type.F16: FORM_F16, Type.BF16: FORM_BF16}  # moved, not converted

_LOW = np.uint64(0x0F0F0F0F)
_FOUR = np.uint64(4)
_HALF = np.uint64(32)


def encode(name: str, form: Form, kind: Type, tile: Tile) -> Bytes:
    """Bytes of a tile as GGUF type `kind`, uint8 [n].

    Raises:
        ConvertError: naming the tensor, if it holds NaN or infinity or a value beyond the type.
    """
    if form is FORM_NVFP4 and kind is Type.NVFP4:
        return pack_nvfp4(*tile)
    if form is FORM_E4M3 and kind is Type.I8:
        if is_nan_code(tile[0]).any():
            raise ConvertError(f"{name} would hold NaN: its FP8 codes contain 0x7f or 0xff")
        return tile[0].reshape(-1)
    if SAME.get(kind) is form:
        _check_finite(name, form, tile)
        return tile[0].reshape(-1).view(np.uint8)
    values = form.decode(tile)
    _check_range(name, kind, values)
    return np.asarray(gguf.quantize(values, kind)).reshape(-1).view(np.uint8)


def pack_nvfp4(codes: NDArray[np.uint64], scales: Bytes) -> Bytes:
    """Checkpoint NVFP4 to GGUF blocks of 64 elements: 4 scale bytes, then 32 code bytes.

    A checkpoint pairs neighbours in a byte (even column low); a GGUF pairs elements j and j + 8 of
    a group of 16. Codes do not change, scales lose their (unused) sign bit.

    Args:
        codes: uint64 [rows, groups], the 8 bytes of each group of 16 elements.
        scales: uint8 [rows, groups], groups a multiple of 4.
    """
    rows, groups = codes.shape
    blocks = np.empty((rows, groups // 4, 36), np.uint8)
    np.bitwise_and(scales.reshape(rows, -1, 4), 0x7F, out=blocks[..., :4])
    # Byte i of the group holds elements 2i, 2i + 1; the low word elements 0-7, the high one 8-15.
    even = (codes & _LOW) | ((codes >> _HALF & _LOW) << _FOUR)
    odd = ((codes >> _FOUR) & _LOW) | (codes >> _HALF & (_LOW << _FOUR))
    out = _spread(even)
    out |= _spread(odd) << np.uint64(8)
    blocks[..., 4:] = out.view(np.uint8).reshape(rows, -1, 32)
    return blocks.reshape(-1)


def _spread(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The 4 low bytes of each word at every second byte."""
    words = (words | words << np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (words | words << np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)


def _check_finite(name: str, form: Form, tile: Tile) -> None:
    if form is FORM_BF16:
        finite = (tile[0] & 0x7F80 != 0x7F80).all()
    else:
        finite = np.isfinite(tile[0]).all()
    if not finite:
        raise ConvertError(f"{name} would hold NaN or infinity: its source does")


def _check_range(name: str, kind: Type, values: F32) -> None:
    largest = max(float(values.max(initial=0)), -float(values.min(initial=0)))
    if not np.isfinite(largest):
        raise ConvertError(f"{name} would hold NaN or infinity: its source does")
    limit = MAX_MAGNITUDE.get(kind, np.inf)
    if largest > limit:
        raise ConvertError(f"{name} holds {largest:g}, {kind.name} reaches {limit:g}")
