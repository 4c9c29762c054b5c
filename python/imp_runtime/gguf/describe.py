"""Sums a GGUF file up: what it holds, what it costs, whether imp runs it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.gguf.kinds import Kind, Layout, is_scale, split_layer
from imp_runtime.gguf.sequence import SequenceCost, positive, sequence_cost, whole


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file."""

    name: str
    kind: Kind
    type: str
    dims: tuple[int, ...]
    """Fastest-varying first."""
    parameters: int
    """Elements; 0 for the scales of another tensor."""
    bytes: int
    shard: int
    offset: int
    """Bytes from the start of the shard."""


@dataclass(frozen=True)
class Group:
    """All tensors of one kind and type."""

    kind: Kind
    type: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Support:
    """Whether imp runs the file."""

    ok: bool
    reason: str
    """One sentence why not; empty if it does."""
    notes: tuple[str, ...] = ()
    """What the loader had to decide by itself."""


@dataclass(frozen=True)
class Description:
    """What a GGUF file holds and needs. Sizes are in bytes."""

    path: Path
    files: tuple[Path, ...]
    file_bytes: int
    version: int
    architecture: str
    name: str
    keys: Mapping[str, Any]
    """As `Gguf.keys()`."""
    key_types: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    groups: tuple[Group, ...]
    experts: int
    """Routed experts per layer; 0 if there are none."""
    experts_used: int
    context_length: int | None
    vocab_size: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: bool
    sequence: SequenceCost | None
    support: Support

    def _sum(self, field: str, kinds: Iterable[Kind]) -> int:
        wanted = frozenset(kinds)
        return sum(getattr(group, field) for group in self.groups if group.kind in wanted)

    @property
    def parameters(self) -> int:
        """All elements of all weights."""
        return self._sum("parameters", Kind)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output matrix as well."""
        return not any(group.kind is Kind.OUTPUT for group in self.groups)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: of the experts those used, no look-ups."""
        idle = {Kind.NGRAM_TABLE, Kind.MTP, Kind.VISION, Kind.EXPERTS}
        if not self.tied:
            idle.add(Kind.EMBEDDING)
        routed = self._sum("parameters", [Kind.EXPERTS])
        if self.experts:
            routed = routed * min(self.experts_used, self.experts) // self.experts
        return self._sum("parameters", set(Kind) - idle) + routed

    @property
    def tensor_bytes(self) -> int:
        """All tensors."""
        return self._sum("bytes", Kind)

    @property
    def table_bytes(self) -> int:
        """The n-gram tables: mapped, read row by row, never resident."""
        return self._sum("bytes", [Kind.NGRAM_TABLE])

    @property
    def weight_bytes(self) -> int:
        """Everything but the tables: mapped and read again and again, so it should fit in RAM."""
        return self.tensor_bytes - self.table_bytes

    @property
    def expert_bytes(self) -> int:
        """Routed experts, which a GPU plan may leave in host memory."""
        return self._sum("bytes", [Kind.EXPERTS])

    @property
    def dense_bytes(self) -> int:
        """What a GPU plan keeps in VRAM: all but experts, tables, look-ups, MTP and vision."""
        elsewhere = {Kind.EXPERTS, Kind.NGRAM_TABLE, Kind.MTP, Kind.VISION}
        if not self.tied:
            elsewhere.add(Kind.EMBEDDING)
        return self._sum("bytes", set(Kind) - elsewhere)

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per parameter, scales included; 0 without tensors."""
        return 8 * self.tensor_bytes / self.parameters if self.parameters else 0.0


def describe(path: str | os.PathLike[str]) -> Description:
    """Read the header of a GGUF file, of any shard of a split one, and sum it up.

    Raises:
        ImpError: the file is missing, damaged, or of a version that imp does not read.
    """
    return describe_open(_core.Gguf.open(path), path, _support(path))


def describe_open(file: _core.Gguf, path: str | os.PathLike[str], support: Support) -> Description:
    """Sum up an open file, or a model in memory.

    Args:
        file: its header and tensors.
        path: what it is called.
        support: what the loader says.
    """
    keys: dict[str, Any] = file.keys()
    arch = _text(keys, "general.architecture")
    tensors = tuple(tensors_of(file, keys, arch))
    tokens = keys.get("tokenizer.ggml.tokens")
    experts = positive(keys, f"{arch}.expert_count") or 0
    return Description(
        path=Path(path),
        files=tuple(file.files),
        file_bytes=sum(shard.stat().st_size for shard in file.files),
        version=file.version,
        architecture=arch,
        name=_text(keys, "general.name"),
        keys=keys,
        key_types=file.key_types(),
        tensors=tensors,
        groups=_groups(tensors),
        experts=experts,
        experts_used=positive(keys, f"{arch}.expert_used_count") or experts,
        context_length=positive(keys, f"{arch}.context_length"),
        vocab_size=len(tokens) if isinstance(tokens, list) else None,
        bos_token_id=whole(keys.get("tokenizer.ggml.bos_token_id")),
        eos_token_id=whole(keys.get("tokenizer.ggml.eos_token_id")),
        chat_template=isinstance(keys.get("tokenizer.chat_template"), str),
        sequence=sequence_cost(keys, arch),
        support=support,
    )


def _text(keys: Mapping[str, Any], key: str) -> str:
    value = keys.get(key)
    return value if isinstance(value, str) else ""


def tensors_of(file: _core.Gguf, keys: Mapping[str, Any], arch: str) -> Iterable[Tensor]:
    """Every tensor and what it is for."""
    infos = file.tensors()
    layers = positive(keys, f"{arch}.block_count")
    mtp = positive(keys, f"{arch}.nextn_predict_layers")
    split = (split_layer(info.name) for info in infos)
    layout = Layout(
        recurrent=frozenset(n for n, rest in split if n is not None and rest.startswith("ssm_")),
        mtp_from=layers - mtp if layers and mtp and mtp < layers else None,
        has_ngram=f"{arch}.ple.ngram_size" in keys,
    )
    for info in infos:
        yield Tensor(
            name=info.name,
            kind=layout.kind(info.name),
            type=info.type,
            dims=tuple(info.dims),
            parameters=0 if is_scale(info.name) else info.n_elems,
            bytes=info.n_bytes,
            shard=info.shard,
            offset=info.offset,
        )


def _groups(tensors: Iterable[Tensor]) -> tuple[Group, ...]:
    found: dict[tuple[Kind, str], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.kind, tensor.type), []).append(tensor)
    order = list(Kind)
    return tuple(
        Group(kind, type_, len(all_), sum(t.parameters for t in all_), sum(t.bytes for t in all_))
        for (kind, type_), all_ in sorted(
            found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    )


def _support(path: str | os.PathLike[str]) -> Support:
    """What the loader itself says."""
    try:
        model = _core.Model.load(os.fspath(path))
    except ImpError as error:
        return Support(False, str(error).removeprefix(f"{os.fspath(path)}: "))
    return Support(True, "", tuple(model.notes))
