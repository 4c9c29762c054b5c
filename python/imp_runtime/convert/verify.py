"""Compares a written GGUF with its checkpoint, value by value, nothing sampled.

The GGUF side is decoded by the runtime's own reader (`_core.Gguf`), the source side by
`verify_decode`, and the walk goes from checkpoint tensors to GGUF rows (`verify_places`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from imp_runtime import _core
from imp_runtime.convert.checkpoint import TensorRef
from imp_runtime.convert.errors import Problems
from imp_runtime.convert.keys import ARCH
from imp_runtime.convert.pipeline import in_order
from imp_runtime.convert.plan import ConvertPlan
from imp_runtime.convert.progress import Progress
from imp_runtime.convert.verify_compare import difference
from imp_runtime.convert.verify_decode import SourceValues
from imp_runtime.convert.verify_places import (
    Place,
    TableShard,
    places,
    table_shards,
    weight_modules,
)
from imp_runtime.convert.write import chunks

F32 = NDArray[np.float32]

REOPEN_BYTES = 512 << 20  # the mapping is dropped this often, so that its pages do not pile up


def verify(plan: ConvertPlan, path: Path, progress: Progress) -> int:
    """Compares every value of the GGUF at `path` (its first shard) with the plan's checkpoint.

    Returns: the number of values compared.

    Raises:
        ConvertError: naming the tensors that differ, with the first difference of each.
    """
    return _Verifier(plan, path, progress).run()


@dataclass(frozen=True)
class _Step:
    """Source rows to compare; `raw` ones are bytes that must be equal as they are."""

    module: str
    ref: TensorRef
    cols: int
    place: Place
    raw: bool = False

    @property
    def nbytes(self) -> int:
        return self.ref.nbytes * self.place.count * self.cols // max(1, self._elements)

    @property
    def _elements(self) -> int:
        return self.ref.count * (2 if self.ref.dtype == "U8" else 1)


class _Verifier:
    def __init__(self, plan: ConvertPlan, path: Path, progress: Progress) -> None:
        self.plan = plan
        self.path = path
        self.progress = progress
        self.problems = Problems()
        self.source = SourceValues(plan.checkpoint, plan.config.fp8_block)
        self.file = _core.Gguf.open(path)
        self.infos = {t.name: (str(t.type), tuple(t.dims)) for t in self.file.tensors()}
        self.scales = {
            name: self.file.decode(name, 0, 1)[0]
            for name in self.infos
            if name.endswith((".scale", ".input_scale"))
        }

    def run(self) -> int:
        self._check_header()
        self.problems.raise_if_any(f"{self.path.name} differs from its plan")
        compared: Counter[str] = Counter()
        different: set[str] = set()
        modules = weight_modules(self.plan)
        tables = table_shards(self.plan)
        total = sum(ref.nbytes for _, ref in modules) + sum(t.ref.nbytes for t in tables)
        self.progress.begin("verifying", total)
        since_open = 0
        for step, sentence in in_order(self._compare, self._steps(modules, tables)):
            tensor = step.place.tensor
            compared[tensor] += step.place.count * step.cols
            if sentence is not None and tensor not in different:
                different.add(tensor)
                self.problems.add(sentence)
            self.progress.advance(step.nbytes)
            since_open += self._mapped_bytes(step)
            if since_open >= REOPEN_BYTES:
                self.file, since_open = _core.Gguf.open(self.path), 0
        self.progress.end()
        self._check_input_scales([module for module, _ in modules])
        for name, (_, dims) in self.infos.items():
            if name not in self.scales and compared[name] != prod(dims):
                self.problems.add(f"{name}: {compared[name]} of {prod(dims)} values compared")
        self.problems.raise_if_any(f"{self.path.name} differs from {self.plan.source}")
        return compared.total()

    def _mapped_bytes(self, step: _Step) -> int:
        """Bytes of the GGUF that a step touched."""
        kind = self.infos.get(step.place.tensor, ("F32", ()))[0]
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        return step.place.count * step.cols * size // block

    def _check_header(self) -> None:
        """Tensors, shapes and types as planned, and the hash constants exactly."""
        planned = {o.name: (o.type.name, o.dims) for o in self.plan.outputs}
        for name in sorted(planned.keys() | self.infos.keys()):
            if planned.get(name) != self.infos.get(name):
                self.problems.add(f"{name} is {self.infos.get(name)}, planned {planned.get(name)}")
        keys = self.file.keys()
        ckpt = self.plan.checkpoint
        for key, stored, field in (
            ("layer_multipliers", "layer_multipliers", "multipliers"),
            ("head_vocab_sizes", "ngram_heads_vocab_sizes", "vocab_sizes"),
            ("head_offsets", "ngram_heads_offsets", "offsets"),
        ):
            wanted: list[int] = []
            for layer, constants in zip(
                self.plan.config.ngram_layers, self.plan.constants, strict=True
            ):
                ref = ckpt.tensors.get(f"layers.{layer}.ple.ple_embedding.{stored}")
                own = getattr(constants, field) if ref is None else ckpt.read(ref).view("<u8")
                wanted += [int(v) for v in own]
            got = [int(v) for v in keys.get(f"{ARCH}.ple.{key}", ())]
            if got != wanted:
                self.problems.add(f"{ARCH}.ple.{key} is {got}, the checkpoint has {wanted}")

    def _steps(
        self, modules: list[tuple[str, TensorRef]], tables: list[TableShard]
    ) -> Iterator[_Step]:
        for module, ref in modules:
            cols = 1 if len(ref.shape) < 2 else ref.shape[-1] * (2 if ref.dtype == "U8" else 1)
            rows = ref.count * (2 if ref.dtype == "U8" else 1) // cols
            for place in places(module, rows, self.plan.config):
                yield from _cut(_Step(module, ref, cols, place))
        for shard in tables:
            raw = f"{shard.place.tensor}_e4m3" in self.infos
            place = shard.place
            if raw:
                place = Place(place.row, place.count, f"{place.tensor}_e4m3", place.target_row)
            yield from _cut(_Step(shard.module, shard.ref, shard.cols, place, raw))

    def _compare(self, step: _Step) -> str | None:
        """None if the rows are equal (within the type's rounding), otherwise a sentence."""
        p = step.place
        if p.tensor not in self.infos:
            return f"{p.tensor} is missing, {step.module} belongs there"
        kind, dims = self.infos[p.tensor]
        if step.raw:
            return self._compare_raw(step)
        wanted = self.source.rows(step.module, step.ref, p.row, p.count, step.cols)
        if p.change is not None:
            wanted = p.change(wanted)
        got = self._decoded(p, step.cols, dims)
        if got is None:
            return f"{p.tensor} has dims {list(dims)}, rows from {p.target_row} on do not fit"
        exact = kind in ("F32", "NVFP4", step.ref.dtype) and "A_log" not in step.module
        return difference(p, kind, wanted, got, exact=exact)

    def _compare_raw(self, step: _Step) -> str | None:
        p = step.place
        start, count = p.target_row * step.cols, p.count * step.cols
        got = self.file.data(p.tensor)[start : start + count]
        wanted = self.plan.checkpoint.read(step.ref, p.row * step.cols, count)
        if not np.array_equal(got, wanted):
            at = int(np.flatnonzero(got != wanted)[0]) if len(got) == len(wanted) else len(got)
            return f"{p.tensor} differs from {step.ref.name} at byte {start + at}"
        scale_name = p.tensor.removesuffix(".weight_e4m3") + ".scale"
        scale, own = self.scales.get(scale_name), self.source.table_scale(step.module)
        if scale is None or float(scale[0]) != own:
            return f"{scale_name} is {None if scale is None else float(scale[0])}, not {own}"
        return None

    def _decoded(self, p: Place, cols: int, dims: tuple[int, ...]) -> F32 | None:
        """The GGUF's rows of a place, times its `.scale`; None if they are outside the tensor."""
        if cols == 1 and dims[0] != 1:  # a vector
            flat = self.file.decode(p.tensor, 0, 1)[0, p.target_row : p.target_row + p.count]
            return flat.reshape(-1, 1) if len(flat) == p.count else None
        if p.target_row + p.count > prod(dims[1:]) or p.first_col + cols > dims[0]:
            return None
        rows: F32 = self.file.decode(p.tensor, p.target_row, p.count)
        scale = self.scales.get(p.tensor.removesuffix(".weight") + ".scale")
        if scale is not None:
            each = dims[1] if len(scale) > 1 else prod(dims[1:])
            owner = np.arange(p.target_row, p.target_row + p.count) // each
            rows *= scale[owner][:, None]
        return rows[:, p.first_col : p.first_col + cols]

    def _check_input_scales(self, modules: list[str]) -> None:
        """Activation scales: one per module that kept its NVFP4 form, 1 where none is stored."""
        wanted: dict[str, dict[int, float]] = {}
        for module in modules:
            place = next(iter(places(module, 1, self.plan.config)))
            if self.infos.get(place.tensor, ("", ()))[0] == "NVFP4":
                name = place.tensor.removesuffix(".weight") + ".input_scale"
                expert = place.target_row if "_exps" in name else 0
                wanted.setdefault(name, {})[expert] = self.source.input_scale(module)
        for name in wanted.keys() | {n for n in self.scales if n.endswith(".input_scale")}:
            values = np.array([v for _, v in sorted(wanted.get(name, {}).items())], np.float32)
            got = self.scales.get(name, np.ones_like(values))
            if not np.array_equal(got, values):
                self.problems.add(f"{name} differs from the checkpoint's activation scales")


def _cut(step: _Step) -> Iterator[_Step]:
    """A step in pieces of bounded size."""
    p = step.place
    for row, count in chunks(p.count, step.cols):
        piece = Place(p.row + row, count, p.tensor, p.target_row + row, p.first_col, p.change)
        yield _Step(step.module, step.ref, step.cols, piece, step.raw)
