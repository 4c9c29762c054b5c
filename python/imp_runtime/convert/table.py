"""The n-gram table: its shards in order, in whatever scheme they are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from imp_runtime.convert.checkpoint import TensorRef
from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.errors import ConvertError
from imp_runtime.convert.forms import PLAIN_FORMS
from imp_runtime.convert.mapping import TABLE_MODULE
from imp_runtime.convert.options import NgramChoice
from imp_runtime.convert.schemes import FP8_TENSOR, NVFP4_MODELOPT, Sources
from imp_runtime.convert.views import Gathered, Scaled, Stored, StoredNvfp4, View


@dataclass(frozen=True)
class Table:
    """Rows of the table. With `scale`, `view` holds raw E4M3 codes and a row is codes * scale."""

    view: View
    scheme: str
    scale: float | None = None


def padded_rows(spec: Any, config: ModelConfig) -> int:
    """Rows of the table as the model allocates it: those its heads use, padded."""
    return -(-int(spec.dims[1]) // config.ngram_pad) * config.ngram_pad


def find_table(
    sources: Sources, spec: Any, config: ModelConfig, choice: NgramChoice
) -> Table | None:
    """The table of one n-gram layer; None (and problems) if it is not usable.

    Raises:
        ConvertError: if `choice` is fp8 and the checkpoint's table is not.
    """
    module = f"layers.{_layer(spec, config)}.{TABLE_MODULE}"
    modules = _shards(sources, module)
    found = _find(sources, spec, config, choice, module, modules)
    if found is None:
        for m in (module, *modules):
            sources.give_up(m)
    return found


def _find(
    sources: Sources,
    spec: Any,
    config: ModelConfig,
    choice: NgramChoice,
    module: str,
    modules: list[str],
) -> Table | None:
    refs = [sources.ckpt.tensors.get(f"{m}.weight") for m in modules]
    present = [r for r in refs if r is not None]
    if not present:
        sources.problems.add(f"{module}.weight or {module}.shard_0.weight is missing")
        return None
    for m, ref in zip(modules, refs, strict=True):
        if ref is None:
            sources.problems.add(f"{m}.weight is missing")
    sources.used.update(f"{m}.weight" for m in modules)
    if len(present) < len(refs) or not _fits(sources, spec, config, module, present):
        return None
    dtype = present[0].dtype
    if dtype == "F8_E4M3":
        return _fp8(sources, module, modules, present, choice)
    if choice == "fp8":
        raise ConvertError(f"--ngram fp8: the table of {module} is {dtype}, not F8_E4M3")
    if dtype == "U8":
        return _nvfp4(sources, module, modules, present)
    sources.seen[dtype] += len(present)
    views = [Stored(sources.ckpt, r, *_shape(r)) for r in present]
    return Table(Gathered([(v, 0, v.rows) for v in views]), dtype)


def _layer(spec: Any, config: ModelConfig) -> int:
    match = re.match(r"blk\.(\d+)\.", spec.name)
    return int(match[1]) if match else config.ngram_layers[0]


def _shards(sources: Sources, module: str) -> list[str]:
    """Shard modules by number (their order in the files is lexicographic), or the whole table."""
    shard = re.compile(re.escape(module) + r"\.shard_(\d+)\.weight")
    numbers = [int(m[1]) for name in sources.ckpt.tensors if (m := shard.fullmatch(name))]
    if not numbers:
        return [module]
    return [f"{module}.shard_{i}" for i in range(max(numbers) + 1)]


def _shape(ref: TensorRef) -> tuple[int, int]:
    return ref.shape[0], ref.shape[1] * (2 if ref.dtype == "U8" else 1)


def _fits(
    sources: Sources, spec: Any, config: ModelConfig, module: str, refs: list[TensorRef]
) -> bool:
    width = int(spec.dims[0])
    good = True
    for ref in refs:
        if ref.dtype not in (*PLAIN_FORMS, "F8_E4M3", "U8") or ref.dtype != refs[0].dtype:
            sources.problems.add(f"{ref.name} is {ref.dtype}, {refs[0].name} is {refs[0].dtype}")
            good = False
        elif len(ref.shape) != 2 or _shape(ref)[1] != width:
            sources.problems.add(f"{ref.name} is {list(ref.shape)}, rows of {width} are needed")
            good = False
    rows, wanted = sum(r.shape[0] for r in refs if r.shape), padded_rows(spec, config)
    if good and rows != wanted:
        sources.problems.add(
            f"{module} has {rows} rows in {len(refs)} parts, its heads need {wanted}"
        )
        good = False
    return good


def _fp8(
    sources: Sources, module: str, modules: list[str], refs: list[TensorRef], choice: NgramChoice
) -> Table | None:
    each = f"{modules[0]}.weight_scale" in sources.ckpt.tensors
    owners = modules if each else [module]
    scales = [sources.scalar(f"{m}.weight_scale") for m in owners]
    known = [s for s in scales if s is not None]
    if len(known) < len(scales):
        return None
    sources.seen[FP8_TENSOR] += len(refs)
    views: list[View] = [Stored(sources.ckpt, r, *_shape(r)) for r in refs]
    if choice in ("auto", "fp8"):
        if len(set(known)) > 1:
            raise ConvertError(
                f"{module}: its shards have different scales ({known[0]} to {known[-1]}), which "
                "--ngram fp8 cannot keep; choose --ngram bf16"
            )
        return Table(Gathered([(v, 0, v.rows) for v in views]), FP8_TENSOR, known[0])
    if len(known) == 1:
        known *= len(views)
    scaled = [Scaled(v, s) for v, s in zip(views, known, strict=True)]
    return Table(Gathered([(v, 0, v.rows) for v in scaled]), FP8_TENSOR)


def _nvfp4(
    sources: Sources, module: str, modules: list[str], refs: list[TensorRef]
) -> Table | None:
    shared = f"{module}.weight_scale_2" in sources.ckpt.tensors
    views: list[View] = []
    for m, ref in zip(modules, refs, strict=True):
        scales = sources.ckpt.tensors.get(f"{m}.weight_scale")
        sources.used.add(f"{m}.weight_scale")
        factor = sources.scalar(f"{module if shared else m}.weight_scale_2")
        wanted = (ref.shape[0], ref.shape[1] // 8)
        if scales is None or scales.dtype != "F8_E4M3" or scales.shape != wanted:
            got = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            sources.problems.add(f"{m}.weight_scale is {got}, F8_E4M3 {list(wanted)} is needed")
        elif factor is not None:
            views.append(Scaled(StoredNvfp4(sources.ckpt, ref, scales), factor))
            sources.group_scales.append(scales)
    if len(views) < len(refs):
        return None
    sources.seen[NVFP4_MODELOPT] += len(refs)
    return Table(Gathered([(v, 0, v.rows) for v in views]), NVFP4_MODELOPT)
