"""Lazy two-dimensional views of checkpoint tensors: rows are read, moved and combined on demand.

A vector of n elements is a view of n rows of one element, so that heads can be reordered alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.checkpoint import DTYPE_BYTES, Checkpoint, TensorRef
from imp_runtime.convert.forms import (
    E4M3,
    F32,
    FORM_E4M3,
    FORM_F32,
    FORM_NVFP4,
    NVFP4_GROUP,
    PLAIN_FORMS,
    Form,
    Tile,
)


class View(ABC):
    """`rows` rows of `cols` elements in one storage form."""

    def __init__(self, form: Form, rows: int, cols: int) -> None:
        self.form = form
        self.rows = rows
        self.cols = cols

    @abstractmethod
    def read_into(self, row: int, tile: Tile) -> None:
        """Fills a contiguous tile with the rows from `row` on."""

    def read(self, row: int, count: int) -> Tile:
        """Rows `row .. row + count`."""
        tile = self.form.empty(count, self.cols)
        self.read_into(row, tile)
        return tile

    def values(self, row: int, count: int) -> F32:
        """The same, decoded: float32 [count, cols]."""
        return self.form.decode(self.read(row, count))


class Stored(View):
    """A tensor of plain floats, or of E4M3 codes whose scale is kept elsewhere."""

    def __init__(self, ckpt: Checkpoint, ref: TensorRef, rows: int, cols: int) -> None:
        super().__init__(PLAIN_FORMS.get(ref.dtype, FORM_E4M3), rows, cols)
        self._ckpt = ckpt
        self._ref = ref
        self._row_bytes = cols * DTYPE_BYTES[ref.dtype]

    def read_into(self, row: int, tile: Tile) -> None:
        """Reads them."""
        self._ckpt.read_into(self._ref, row * self._row_bytes, tile[0])


class StoredNvfp4(View):
    """E2M1 codes and their group scales, without the tensor's own factor."""

    def __init__(self, ckpt: Checkpoint, codes: TensorRef, scales: TensorRef) -> None:
        super().__init__(FORM_NVFP4, codes.shape[0], codes.shape[1] * 2)
        self._ckpt = ckpt
        self._codes = codes
        self._scales = scales

    def read_into(self, row: int, tile: Tile) -> None:
        """Reads codes and scales."""
        self._ckpt.read_into(self._codes, row * self.cols // 2, tile[0])
        self._ckpt.read_into(self._scales, row * (self.cols // NVFP4_GROUP), tile[1])


class Fp8Values(View):
    """E4M3 codes times their scale: one per block of `block` rows and columns, float32 values."""

    def __init__(
        self, ckpt: Checkpoint, ref: TensorRef, scale: F32, block: tuple[int, int]
    ) -> None:
        super().__init__(FORM_F32, ref.shape[0], ref.shape[1])
        self._ckpt = ckpt
        self._ref = ref
        self._scale = scale  # [ceil(rows / block[0]), ceil(cols / block[1])]
        self._block = block

    def read_into(self, row: int, tile: Tile) -> None:
        """Decodes and scales."""
        (out,) = tile
        codes = np.empty(out.shape, np.uint8)
        self._ckpt.read_into(self._ref, row * self.cols, codes)
        np.take(E4M3, codes, out=out, mode="clip")
        scale = self._scale[np.arange(row, row + len(out)) // self._block[0]]
        if scale.shape[1] > 1:
            scale = np.repeat(scale, self._block[1], axis=1)[:, : self.cols]
        out *= scale


class Scaled(View):
    """The values of a view times one factor."""

    def __init__(self, view: View, factor: float) -> None:
        super().__init__(FORM_F32, view.rows, view.cols)
        self._view = view
        self._factor = np.float32(factor)

    def read_into(self, row: int, tile: Tile) -> None:
        """Decodes and multiplies."""
        np.multiply(self._view.values(row, len(tile[0])), self._factor, out=tile[0])


class Mapped(View):
    """An element-wise function of a view's values."""

    def __init__(self, view: View, function: Callable[[F32], F32]) -> None:
        super().__init__(FORM_F32, view.rows, view.cols)
        self._view = view
        self._function = function

    def read_into(self, row: int, tile: Tile) -> None:
        """Decodes and applies the function."""
        tile[0][:] = self._function(self._view.values(row, len(tile[0])))


class Gathered(View):
    """Runs of rows of other views, one after the other: slices, stacks and reordered heads."""

    def __init__(self, runs: Sequence[tuple[View, int, int]]) -> None:
        """`runs`: (view, first row, number of rows); all views share form and width."""
        super().__init__(runs[0][0].form, sum(n for _, _, n in runs), runs[0][0].cols)
        self._runs = runs
        self._starts = [0, *accumulate(n for _, _, n in runs)]

    def read_into(self, row: int, tile: Tile) -> None:
        """Reads from each run that the rows touch."""
        done, count = 0, len(tile[0])
        run = bisect_right(self._starts, row) - 1
        while done < count:
            view, first, rows = self._runs[run]
            skip = row + done - self._starts[run]
            take = min(rows - skip, count - done)
            view.read_into(first + skip, tuple(a[done : done + take] for a in tile))
            done += take
            run += 1


class Columns(View):
    """The column units of a view in another order."""

    def __init__(self, view: View, order: NDArray[np.intp]) -> None:
        super().__init__(view.form, view.rows, view.cols)
        self._view = view
        self._order = order

    def read_into(self, row: int, tile: Tile) -> None:
        """Reads and reorders."""
        for out, array in zip(tile, self._view.read(row, len(tile[0])), strict=True):
            np.take(array, self._order, axis=1, out=out, mode="clip")


class Beside(View):
    """Two views side by side: their columns are concatenated."""

    def __init__(self, left: View, right: View) -> None:
        super().__init__(left.form, left.rows, left.cols + right.cols)
        self._parts = (left, right)

    def read_into(self, row: int, tile: Tile) -> None:
        """Reads both sides."""
        count = len(tile[0])
        read = [v.read(row, count) for v in self._parts]
        for out, left, right in zip(tile, *read, strict=True):
            out[:, : left.shape[1]] = left
            out[:, left.shape[1] :] = right


class Numbers(View):
    """A few float32 numbers that are not a tensor of the checkpoint: [n, 1]."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(FORM_F32, len(values), 1)
        self._values = np.array(values, np.float32).reshape(-1, 1)

    def read_into(self, row: int, tile: Tile) -> None:
        """Copies them."""
        tile[0][:] = self._values[row : row + len(tile[0])]


def as_values(view: View) -> View:
    """The view in float32 form."""
    return view if view.form is FORM_F32 else Mapped(view, lambda v: v)


def tiled_heads(key_heads: int, value_heads: int) -> list[int]:
    """Value heads in GGUF order: entry j * key_heads + k is checkpoint head k * repeat + j.

    GGUF pairs value head u with key head u % key_heads, a checkpoint with u // repeat.
    """
    repeat = value_heads // key_heads
    return [k * repeat + j for j in range(repeat) for k in range(key_heads)]
