"""Makes the plan of a conversion: finds every tensor's source, chooses its type, checks all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from imp_runtime import _core
from imp_runtime.convert.checkpoint import Checkpoint
from imp_runtime.convert.config import ModelConfig, read_config
from imp_runtime.convert.errors import ConvertError, Problems
from imp_runtime.convert.experts import ExpertSource, expert_modules, find_experts
from imp_runtime.convert.forms import FORM_NVFP4
from imp_runtime.convert.hashes import hash_constants
from imp_runtime.convert.keys import ARCH, add_model_keys
from imp_runtime.convert.mapping import (
    EXPERT_TENSOR,
    SCALE_SLOTS,
    layer_prefix,
    origin,
)
from imp_runtime.convert.metadata import add_general_keys
from imp_runtime.convert.options import ConvertOptions
from imp_runtime.convert.plan import TYPES, ConvertPlan, Output, file_type
from imp_runtime.convert.schemes import IGNORED_SUFFIXES, Source, Sources
from imp_runtime.convert.table import find_table
from imp_runtime.convert.tokenizer import add_tokenizer_keys
from imp_runtime.convert.views import Numbers, View
from imp_runtime.errors import ImpError

NVFP4_BLOCK = 64  # elements of a GGUF NVFP4 block: rows have to be multiples
VISION_PREFIXES = ("visual.", "vision_tower.")
MAX_NAMED = 3  # names that a one-line note gives


def plan(src: str | Path, options: ConvertOptions | None = None) -> ConvertPlan:
    """Reads the headers of a checkpoint folder and decides what a GGUF of it will hold.

    Reads no weights, only headers and single scales.

    Raises:
        ConvertError: listing everything that is missing, unknown, misshapen or contradicting.
    """
    folder = Path(src)
    if not folder.is_dir():
        raise ConvertError(f"{folder} is not a folder with a checkpoint in Hugging Face layout")
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    try:
        return _Planner(folder, config, checkpoint, options or ConvertOptions()).run()
    except BaseException:
        checkpoint.close()
        raise


class _Planner:
    def __init__(
        self, folder: Path, config: ModelConfig, ckpt: Checkpoint, options: ConvertOptions
    ) -> None:
        self.folder = folder
        self.config = config
        self.ckpt = ckpt
        self.options = options
        self.problems = Problems()
        self.sources = Sources(ckpt, config.fp8_block, self.problems)
        self.notes: Counter[str] = Counter()
        self.outputs: list[Output] = []

    def run(self) -> ConvertPlan:
        c = self.config
        constants = [
            hash_constants(self.sources, c, index, layer)
            for index, layer in enumerate(c.ngram_layers)
        ]
        writer, specs, mtp = self._table(constants)
        self.writer = writer
        for spec in specs:
            self._add(spec)
        self._leave_out(mtp)
        self._report_unknown()
        self.problems.raise_if_any(str(self.folder))
        dense = TYPES[self.options.dense]
        for o in self.outputs:
            writer.add_tensor_info(
                o.name, o.dims[::-1], np.dtype(np.float32), o.nbytes, raw_dtype=o.type
            )
        add_general_keys(writer, self.folder, file_type(self.outputs, dense), self.notes)
        self._tag_w4a16()
        notes = [*c.notes, *self.ckpt.notes]
        notes += [text if n == 1 else f"{text} ({n} tensors)" for text, n in self.notes.items()]
        return ConvertPlan(
            self.folder, self.options, c, self.ckpt, writer, self.outputs, constants, mtp,
            self.sources.seen, self.sources.group_scales, notes,
        )  # fmt: skip

    # --- which tensors ---------------------------------------------------------------------------

    def _table(self, constants: Sequence[Any]) -> tuple[gguf.GGUFWriter, list[Any], bool]:
        """The writer with its model keys, the architecture's tensors, and whether MTP is one."""
        choice = self.options.mtp
        layers = self.config.mtp_layers
        offered = layers == 1 and choice != "drop"
        if choice == "require" and layers != 1:
            self.problems.add(f"--mtp require: mtp_num_hidden_layers is {layers}, 1 is needed")
        if choice == "auto" and layers > 1:
            self.notes[f"MTP left out: {layers} MTP layers, 1 is supported"] += 1
        if offered:
            writer, specs = self._ask(constants, mtp=True)
            missing = self._missing_mtp(specs)
            if not missing:
                return writer, specs, True
            named = ", ".join(missing[:MAX_NAMED])
            more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
            if choice == "require":
                self.problems.add(f"--mtp require: the MTP head lacks {named}{more}")
            else:
                self.notes[f"MTP left out: the checkpoint lacks {named}{more}"] += 1
        writer, specs = self._ask(constants, mtp=False)
        return writer, specs, False

    def _ask(self, constants: Sequence[Any], *, mtp: bool) -> tuple[gguf.GGUFWriter, list[Any]]:
        split = self.options.split_max_bytes
        writer = gguf.GGUFWriter(None, ARCH, split_max_size=split)
        add_model_keys(writer, self.config, constants, mtp=mtp)
        add_tokenizer_keys(writer, self.folder, self.config.vocab_size, self.options.pre)
        keys = {name: value.value for name, value in writer.kv_data[0].items()}
        try:
            return writer, list(_core.tensor_table(ARCH, keys))
        except ImpError as error:  # a shape that the runtime does not support
            raise ConvertError(f"{self.folder / 'config.json'}: {error}") from error

    def _missing_mtp(self, specs: Sequence[Any]) -> list[str]:
        missing = []
        for spec in specs:
            match = re.fullmatch(r"blk\.(\d+)\.(.+)", spec.name)
            if match is None or int(match[1]) < self.config.layers:
                continue
            if EXPERT_TENSOR.fullmatch(match[2]):
                wanted = expert_modules(self.sources, "mtp.layers.0.", spec, self.config)
            else:
                wanted = list(origin(spec.name, spec.dims, self.config).modules)
            missing += [m for m in wanted if not self.sources.has(m)]
        return list(dict.fromkeys(missing))

    def _leave_out(self, mtp: bool) -> None:
        """Marks what is not converted on purpose, with one line each."""
        tensors = self.ckpt.tensors
        vision = [n for n in tensors if n.startswith(VISION_PREFIXES)]
        if vision:
            nbytes = sum(tensors[n].nbytes for n in vision)
            self.notes[f"vision left out: {len(vision)} tensors, {nbytes} bytes"] += 1
        scales = [n for n in tensors if n.endswith(IGNORED_SUFFIXES)]
        if scales:
            self.notes[f"cache and attention scales left out: {len(scales)} tensors"] += 1
        heads = [] if mtp else [n for n in tensors if n.startswith("mtp.")]
        if heads and not any("MTP" in n for n in self.notes):
            self.notes[f"MTP left out: {len(heads)} tensors"] += 1
        self.sources.used.update(vision, scales, heads)

    def _report_unknown(self) -> None:
        for name in sorted(set(self.ckpt.tensors) - self.sources.used):
            ref = self.ckpt.tensors[name]
            self.problems.add(f"{ref.name} {list(ref.shape)} is not a tensor of this model")

    # --- one tensor ------------------------------------------------------------------------------

    def _add(self, spec: Any) -> None:
        if spec.role == "table":
            self._add_table(spec)
        elif spec.role == "experts":
            self._add_experts(spec)
        elif spec.name == "output.weight" and not self.sources.has("lm_head"):
            if not self.config.tied_embeddings:
                self.problems.add("lm_head.weight is missing (tie_word_embeddings is false)")
        else:
            self._add_plain(spec)

    def _add_plain(self, spec: Any) -> None:
        where = origin(spec.name, spec.dims, self.config)
        found = [self.sources.find(m, s) for m, s in zip(where.modules, where.shapes, strict=True)]
        sources = tuple(s for s in found if s is not None)
        if len(sources) < len(found):
            return
        dims = tuple(spec.dims)
        if self._stays_nvfp4(spec.name, dims, sources):
            view = where.move([s.native for s in sources])
            self._emit(spec.name, dims, Type.NVFP4, view, spec.role, sources)
            self._emit_scales(spec.name, [sources[0].factor], [sources[0].input_scale])
            return
        views = [s.values() if s.is_nvfp4 else s.native for s in sources]
        wanted = Type.F32 if spec.role in ("vector", "router") else TYPES[self.options.dense]
        kind = self._storable(wanted, dims[0], spec.name)
        if spec.role not in ("vector", "router"):
            for s in sources:
                if s.is_nvfp4 or s.scheme.startswith("FP8"):
                    self.notes[f"{s.scheme} outside the experts decoded to {kind.name}"] += 1
        self._emit(spec.name, dims, kind, where.move(views), spec.role, sources)

    def _stays_nvfp4(self, name: str, dims: tuple[int, ...], sources: Sequence[Source]) -> bool:
        """NVFP4 is kept where GGUF can hold it: a slot for the scale, whole blocks, one factor."""
        if not all(s.is_nvfp4 for s in sources) or not SCALE_SLOTS.fullmatch(name):
            return False
        if name.endswith("ssm_out.weight") and self.config.value_dim % FORM_NVFP4.unit:
            return False
        same = len({s.factor for s in sources}) == 1
        return same and all(s.native.cols % NVFP4_BLOCK == 0 for s in sources)

    def _add_experts(self, spec: Any) -> None:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", spec.name)
        if match is None:
            raise KeyError(spec.name)
        prefix = layer_prefix(int(match[1]), self.config)
        found = find_experts(self.sources, prefix, spec, self.config)
        if found is None:
            return
        dims = tuple(spec.dims)
        if found.is_nvfp4 and dims[0] % NVFP4_BLOCK == 0:
            self._emit(spec.name, dims, Type.NVFP4, found.native(), spec.role, found.sources)
            self._emit_scales(
                spec.name,
                [s.factor for s in found.sources],
                [s.input_scale for s in found.sources],
            )
            return
        kind = self._storable(self._expert_type(found), dims[0], spec.name)
        if not found.is_plain:
            for scheme in found.schemes:
                self.notes[f"{scheme} experts rounded to {kind.name}"] += 1
        self._emit(spec.name, dims, kind, found.values(), spec.role, found.sources)

    def _expert_type(self, found: ExpertSource) -> Type:
        if self.options.experts != "keep":
            return TYPES[self.options.experts]
        plain = {"F32": Type.F32, "F16": Type.F16}
        return plain.get(found.schemes[0], Type.BF16) if len(found.schemes) == 1 else Type.BF16

    def _add_table(self, spec: Any) -> None:
        found = find_table(self.sources, spec, self.config, self.options.ngram)
        if found is None:
            return
        dims = (spec.dims[0], found.view.rows)
        if found.scale is not None:
            name = f"{spec.name}_e4m3"
            self._emit(name, dims, Type.I8, found.view, spec.role, (), found.scheme)
            scale = Numbers([found.scale])
            self._emit(_sibling(spec.name, "scale"), (1,), Type.F32, scale, "scale", (), "F32")
            return
        if self.options.ngram == "auto":  # as stored, else rounded to BF16
            wanted = {"F32": Type.F32, "F16": Type.F16}.get(found.scheme, Type.BF16)
        else:
            wanted = TYPES[self.options.ngram]
        kind = self._storable(wanted, dims[0], spec.name)
        self._emit(spec.name, dims, kind, found.view, spec.role, (), found.scheme)

    # --- output ----------------------------------------------------------------------------------

    def _storable(self, wanted: Type, cols: int, name: str) -> Type:
        """`wanted`, or F16 where a row is not whole blocks of it."""
        block = gguf.GGML_QUANT_SIZES[wanted][0]
        if cols % block == 0:
            return wanted
        self.notes[f"{name} has rows of {cols}, not of whole {wanted.name} blocks: F16"] += 1
        return Type.F16

    def _emit(
        self,
        name: str,
        dims: tuple[int, ...],
        kind: Type,
        view: View,
        role: str,
        sources: tuple[Source, ...],
        scheme: str = "",
    ) -> None:
        if view.rows * view.cols != prod(dims):
            raise AssertionError(f"{name}: {view.rows} x {view.cols} elements for dims {dims}")
        scheme = scheme or " + ".join(dict.fromkeys(s.scheme for s in sources))
        self.outputs.append(Output(name, dims, kind, view, role, scheme))

    def _emit_scales(
        self, name: str, factors: Sequence[float], inputs: Sequence[float | None]
    ) -> None:
        activations = [1.0 if x is None else x for x in inputs]
        for suffix, values in (("scale", factors), ("input_scale", activations)):
            if any(v != 1.0 for v in values):
                view = Numbers(values)
                dims = (len(values),)
                self._emit(_sibling(name, suffix), dims, Type.F32, view, "scale", (), "F32")

    def _tag_w4a16(self) -> None:
        """Tensors whose algorithm keeps activations wide, under llama.cpp's keys for that."""
        modules = self.config.w4a16
        if not modules:
            return
        everything = "" in modules
        bare = tuple(m.replace("language_model.", "").removeprefix("model.") for m in modules)
        names = []
        for o in self.outputs:
            if o.type is not Type.NVFP4:
                continue
            match = re.fullmatch(r"blk\.(\d+)\.(.+)", o.name)
            if match and EXPERT_TENSOR.fullmatch(match[2]):
                own: tuple[str, ...] = (f"{layer_prefix(int(match[1]), self.config)}mlp.experts",)
            else:
                own = origin(o.name, o.dims, self.config).modules
            if everything or any(m == b or m.startswith(b + ".") for m in own for b in bare):
                names.append(o.name)
        if names:
            self.writer.add_array("general.tensor_extra.name", sorted(names))
            self.writer.add_array("general.tensor_extra.prec_a4", [False] * len(names))


def _sibling(name: str, suffix: str) -> str:
    return f"{name.removesuffix('.weight')}.{suffix}"
