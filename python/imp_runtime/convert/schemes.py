"""Which quantisation scheme each tensor of a checkpoint is in, decided from its dtype and the
tensors beside it.

`Sources.find` takes one module (`layers.3.mlp.shared_expert.up_proj`) with the shape that the
architecture wants, consumes its tensors, and notes what does not fit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.checkpoint import Checkpoint, TensorRef
from imp_runtime.convert.errors import Problems
from imp_runtime.convert.forms import E4M3, F32, FORM_NVFP4, NVFP4_GROUP, PLAIN_FORMS
from imp_runtime.convert.views import Fp8Values, Scaled, Stored, StoredNvfp4, View, as_values

NVFP4_MODELOPT = "NVFP4 (ModelOpt)"
NVFP4_COMPRESSED = "NVFP4 (compressed-tensors)"
FP8_TENSOR = "FP8 per tensor"
FP8_CHANNEL = "FP8 per channel"
FP8_BLOCK = "FP8 in blocks"

COMPANIONS = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
)
# Scales of activations, caches and attention: not weights, never converted.
IGNORED_SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".output_scale")


@dataclass(frozen=True)
class Source:
    """One module's weights.

    native: rows as stored (NVFP4 without its factor, everything else with all scales applied).
    factor: what NVFP4 values are multiplied with.
    input_scale: the activation scale beside NVFP4 weights, dequantisation side.
    """

    scheme: str
    native: View
    factor: float = 1.0
    input_scale: float | None = None

    @property
    def is_nvfp4(self) -> bool:
        """Whether the weights can move without being decoded."""
        return self.native.form is FORM_NVFP4

    def values(self) -> View:
        """Rows as float32, all scales applied."""
        return Scaled(self.native, self.factor) if self.is_nvfp4 else as_values(self.native)


class Sources:
    """Finds modules in a checkpoint and remembers which tensors were used."""

    def __init__(self, ckpt: Checkpoint, fp8_block: tuple[int, int], problems: Problems) -> None:
        self.ckpt = ckpt
        self.problems = problems
        self.used: set[str] = set()
        self.seen: Counter[str] = Counter()
        self._fp8_block = fp8_block
        self._found: dict[str, Source | None] = {}
        self.group_scales: list[TensorRef] = []  # block scales to look at before writing

    def has(self, module: str) -> bool:
        """Whether a module's weight is there in any scheme."""
        names = self.ckpt.tensors
        return any(n in names for n in (f"{module}.weight", f"{module}.weight_packed", module))

    def find(self, module: str, shape: tuple[int, ...]) -> Source | None:
        """The module's weights as rows of `shape[-1]` (a vector: rows of 1); None if unusable."""
        if module not in self._found:
            self._found[module] = self._resolve(module, shape)
            if self._found[module] is None:
                self.give_up(module)
        return self._found[module]

    def give_up(self, module: str) -> None:
        """Keeps the tensors beside an unusable module from being reported as unknown."""
        self.used.update(f"{module}.{name}" for name in COMPANIONS)

    def _resolve(self, module: str, shape: tuple[int, ...]) -> Source | None:
        packed = self._take(f"{module}.weight_packed")
        ref = packed or self._take(f"{module}.weight") or self._take(module)
        if ref is None:
            self.problems.add(f"{module}.weight is missing")
            return None
        if ref.dtype in ("U8", "F8_E4M3") and len(ref.shape) != 2:
            self.problems.add(
                f"{ref.name} is {ref.dtype} {list(ref.shape)}, quantised weights need 2 dimensions"
            )
            source = None
        elif packed is not None or ref.dtype == "U8":
            source = self._nvfp4(module, ref, shape, packed is not None)
        elif ref.dtype == "F8_E4M3":
            source = self._fp8(module, ref, shape)
        elif ref.dtype in PLAIN_FORMS:
            source = self._plain(ref, shape)
        else:
            self.problems.add(f"{ref.name} has dtype {ref.dtype}, which is not supported here")
            source = None
        if source is not None:
            self.seen[source.scheme] += 1
        return source

    def scalar(self, name: str) -> float | None:
        """A scale of one element; None (and a problem) if it is not usable."""
        return self._scalar(name, needed=True)

    def take_integers(self, name: str, count: int) -> tuple[int, ...] | None:
        """An I64 tensor of `count` elements, None if it is absent."""
        ref = self._take(name)
        if ref is None:
            return None
        if ref.dtype not in ("I64", "U64") or ref.count != count:
            self.problems.add(
                f"{ref.name} is {ref.dtype} {list(ref.shape)}, I64 [{count}] is needed"
            )
            return None
        return tuple(int(v) for v in self.ckpt.read(ref).view(np.int64))

    def _take(self, name: str) -> TensorRef | None:
        ref = self.ckpt.tensors.get(name)
        if ref is not None:
            self.used.add(name)
        return ref

    def _plain(self, ref: TensorRef, shape: tuple[int, ...]) -> Source | None:
        squeezed = tuple(n for n in ref.shape if n != 1)
        if squeezed != tuple(n for n in shape if n != 1):
            self._misshapen(ref, shape)
            return None
        cols = shape[-1] if len(shape) > 1 else 1
        return Source(ref.dtype, Stored(self.ckpt, ref, ref.count // cols, cols))

    def _nvfp4(
        self, module: str, ref: TensorRef, shape: tuple[int, ...], compressed: bool
    ) -> Source | None:
        rows, cols = _matrix(shape)
        if ref.dtype != "U8" or ref.shape != (rows, cols // 2) or cols % NVFP4_GROUP:
            self._misshapen(ref, (rows, cols // 2), "U8, two codes a byte")
            return None
        scales = self._take(f"{module}.weight_scale")
        groups = (rows, cols // NVFP4_GROUP)
        if scales is None:
            self.problems.add(f"{module}.weight_scale is missing beside the NVFP4 codes")
        elif scales.dtype != "F8_E4M3" or scales.shape != groups:
            self._misshapen(scales, groups, "F8_E4M3")
            scales = None
        weight_name, input_name = (
            ("weight_global_scale", "input_global_scale")
            if compressed
            else ("weight_scale_2", "input_scale")
        )
        factor = self._scalar(f"{module}.{weight_name}", needed=True)
        given = self._scalar(f"{module}.{input_name}", needed=False)
        if factor is None or scales is None:
            return None
        if compressed:  # their global scales are reciprocals
            if factor == 0 or given == 0:
                self.problems.add(f"{module}.{weight_name} or its input scale is 0, a reciprocal")
                return None
            factor = float(np.float32(1) / np.float32(factor))
            given = None if given is None else float(np.float32(1) / np.float32(given))
        self.group_scales.append(scales)
        scheme = NVFP4_COMPRESSED if compressed else NVFP4_MODELOPT
        return Source(scheme, StoredNvfp4(self.ckpt, ref, scales), factor, given)

    def _fp8(self, module: str, ref: TensorRef, shape: tuple[int, ...]) -> Source | None:
        rows, cols = _matrix(shape)
        if ref.shape != (rows, cols):
            self._misshapen(ref, shape)
            return None
        self._take(f"{module}.input_scale")  # of activations; imp computes in float32
        inverse = self._take(f"{module}.weight_scale_inv")
        scale_ref = inverse or self._take(f"{module}.weight_scale")
        if scale_ref is None:
            self.problems.add(f"{ref.name} is FP8 and has no weight_scale or weight_scale_inv")
            return None
        height, width = self._fp8_block
        grid = (-(-rows // height), -(-cols // width))
        given = scale_ref.shape
        if given == grid and inverse is not None:
            scheme, block = FP8_BLOCK, (height, width)
        elif scale_ref.count == 1:
            scheme, grid, block = FP8_TENSOR, (1, 1), (rows, cols)
        elif given in ((rows, 1), (rows,)):
            scheme, grid, block = FP8_CHANNEL, (rows, 1), (1, cols)
        elif given == grid:
            scheme, block = FP8_BLOCK, (height, width)
        else:
            self._misshapen(scale_ref, grid, f"for blocks of {height} x {width}")
            return None
        scale = self._floats(scale_ref)
        if scale is None:
            return None
        return Source(scheme, Fp8Values(self.ckpt, ref, scale.reshape(grid), block))

    def _scalar(self, name: str, *, needed: bool) -> float | None:
        ref = self._take(name)
        if ref is None:
            if needed:
                self.problems.add(f"{name} is missing")
            return None
        if ref.count != 1:
            self.problems.add(f"{ref.name} has shape {list(ref.shape)}, one number is needed")
            return None
        values = self._floats(ref)
        return None if values is None else float(values[0])

    def _floats(self, ref: TensorRef) -> F32 | None:
        """A scale tensor as float32 [count]; a problem if it is not finite or negative."""
        form = PLAIN_FORMS.get(ref.dtype)
        if form is None:
            self.problems.add(f"{ref.name} has dtype {ref.dtype}, a float type is needed")
            return None
        values = form.decode((self.ckpt.read(ref).view(form.dtypes[0]),))
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            first = float(values[bad][0])
            self.problems.add(
                f"{ref.name} holds {int(bad.sum())} bad scales of {ref.count}, the first is "
                f"{first if isfinite(first) else 'not finite'}"
            )
            return None
        return values

    def _misshapen(self, ref: TensorRef, shape: tuple[int, ...], extra: str = "") -> None:
        wanted = f"{list(shape)}{' ' + extra if extra else ''}"
        self.problems.add(f"{ref.name} is {ref.dtype} {list(ref.shape)}, {wanted} is needed")


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (shape[0], 1)


def bad_group_scales(codes: NDArray[Any]) -> int:
    """How many E4M3 block scales are NaN or negative (ggml's are unsigned)."""
    return int(((codes & 0x7F == 0x7F) | (codes > 0x80)).sum())


def is_nan_code(codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which E4M3 codes are NaN."""
    return np.isnan(E4M3)[codes]
