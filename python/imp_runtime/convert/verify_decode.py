"""Source values for verification: decoded here by arithmetic, apart from what the writer uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.checkpoint import Checkpoint, TensorRef
from imp_runtime.convert.errors import ConvertError

F32 = NDArray[np.float32]


def e4m3_value(code: int) -> float:
    """Value of one E4M3 code: 1 sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1_value(code: int) -> float:
    """Value of one E2M1 code: 1 sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


_E4M3 = np.array([e4m3_value(c) for c in range(256)], np.float32)
# A byte of codes is two neighbouring columns, the even one low; both floats as one 64-bit item.
_E2M1_PAIRS = (
    np.array([[e2m1_value(b & 15), e2m1_value(b >> 4)] for b in range(256)], np.float32)
    .view(np.uint64)
    .reshape(-1)
)


class SourceValues:
    """Rows of a checkpoint's modules as float32, with every scale applied."""

    def __init__(self, ckpt: Checkpoint, fp8_block: tuple[int, int]) -> None:
        self._ckpt = ckpt
        self._fp8_block = fp8_block
        self._grid: tuple[str, F32] = ("", np.empty(0, np.float32))  # of the last FP8 module

    def number(self, name: str) -> float | None:
        """A tensor of one element, None if it is absent."""
        ref = self._ckpt.tensors.get(name)
        return None if ref is None else float(self._plain(ref, 0, 1)[0])

    def factor(self, module: str) -> float:
        """What a module's NVFP4 values are multiplied with."""
        own = self.number(f"{module}.weight_scale_2")
        if own is not None:
            return own
        inverse = self.number(f"{module}.weight_global_scale")
        return float(np.float32(1) / np.float32(inverse)) if inverse else 1.0

    def input_scale(self, module: str) -> float:
        """A module's activation scale, 1 if it has none."""
        own = self.number(f"{module}.input_scale")
        if own is not None:
            return own
        inverse = self.number(f"{module}.input_global_scale")
        return float(np.float32(1) / np.float32(inverse)) if inverse else 1.0

    def table_scale(self, module: str) -> float | None:
        """The scale of an FP8 table that `module` is a part of."""
        shared = self.number(f"{module.rpartition('.shard_')[0] or module}.weight_scale")
        return self.number(f"{module}.weight_scale") if shared is None else shared

    def rows(self, module: str, ref: TensorRef, row: int, count: int, cols: int) -> F32:
        """Rows of `cols` elements, float32 [count, cols]."""
        if ref.dtype == "U8":
            return self._nvfp4(module, ref, row, count, cols)
        if ref.dtype == "F8_E4M3":
            return self._fp8(module, ref, row, count, cols)
        return self._plain(ref, row * cols, count * cols).reshape(count, cols)

    def _plain(self, ref: TensorRef, start: int, count: int) -> F32:
        if ref.dtype == "F32":
            return self._ckpt.read(ref, start * 4, count * 4).view(np.float32)
        data = self._ckpt.read(ref, start * 2, count * 2)
        if ref.dtype == "F16":
            return data.view(np.float16).astype(np.float32)
        if ref.dtype == "BF16":  # the upper half of a float32
            wide = np.zeros((count, 2), np.uint16)
            wide[:, 1] = data.view(np.uint16)
            return wide.view(np.float32).reshape(-1)
        raise ConvertError(f"{ref.name}: {ref.dtype} cannot be verified")

    def _nvfp4(self, module: str, ref: TensorRef, row: int, count: int, cols: int) -> F32:
        codes = self._ckpt.read(ref, row * cols // 2, count * cols // 2)
        values = _E2M1_PAIRS.take(codes).view(np.float32).reshape(-1, 16)
        scales = self._ckpt.tensors[f"{module}.weight_scale"]
        groups = self._ckpt.read(scales, row * cols // 16, count * cols // 16)
        values *= _E4M3.take(groups)[:, None]
        values *= np.float32(self._shared(module))
        return values.reshape(count, cols)

    def _fp8(self, module: str, ref: TensorRef, row: int, count: int, cols: int) -> F32:
        values = _E4M3.take(self._ckpt.read(ref, row * cols, count * cols)).reshape(count, cols)
        scale = self._fp8_scale(module)
        if scale.size == 1:
            return values * scale.reshape(())
        if scale.shape == (ref.shape[0], 1) and not self._has_inverse(module):
            return values * scale[row : row + count]
        height, width = self._fp8_block
        for i in range(row // height, (row + count - 1) // height + 1):
            part = slice(max(0, i * height - row), (i + 1) * height - row)
            for j in range(scale.shape[1]):
                values[part, j * width : (j + 1) * width] *= scale[i, j]
        return values

    def _shared(self, module: str) -> float:
        """The NVFP4 factor of a module, or of the table that a shard belongs to."""
        if f"{module}.weight_scale_2" in self._ckpt.tensors or ".shard_" not in module:
            return self.factor(module)
        return self.factor(module.rpartition(".shard_")[0])

    def _has_inverse(self, module: str) -> bool:
        return f"{module}.weight_scale_inv" in self._ckpt.tensors

    def _fp8_scale(self, module: str) -> F32:
        """The scale grid of an FP8 module, [rows or blocks, blocks]."""
        known, grid = self._grid
        if known == module:
            return grid
        name = next(
            n
            for m in (module, module.rpartition(".shard_")[0])
            for n in (f"{m}.weight_scale_inv", f"{m}.weight_scale")
            if n in self._ckpt.tensors
        )
        ref = self._ckpt.tensors[name]
        grid = self._plain(ref, 0, ref.count)
        grid = grid.reshape(ref.shape if len(ref.shape) == 2 else (-1, 1))
        self._grid = (module, grid)
        return grid
