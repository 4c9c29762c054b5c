"""Expert ids of real runs: recorded, saved and read back."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from imp_runtime import _core
from imp_runtime.errors import ImpError

if TYPE_CHECKING:
    from imp_runtime.model import Model
    from imp_runtime.planner.sizes import ModelSizes
    from imp_runtime.session import Session

FORMAT = "imp expert trace"
VERSION = 1
MAX_IDS = 1 << 31
"""Expert ids of a file at most."""
MAX_META_BYTES = 1 << 16
"""Of the JSON text."""
_MAX_HEADER_BYTES = 1 << 10  # of an array in the file
_FIELDS = {"ids": ("<u2", 3), "step_rows": ("<i4", 1)}

Ids = npt.NDArray[np.uint16]
ROUTING_PREFIX = "trace:"
"""Begins a routing that names a file of recorded ids."""


@dataclass(frozen=True)
class Trace:
    """Which experts the tokens of a run chose, step by step."""

    ids: Ids
    """uint16 [tokens, layers, k], most wanted first."""
    step_rows: npt.NDArray[np.int32]
    """int32 [steps]: tokens of each step."""
    experts: int
    """Of a layer."""
    model: str
    """Its name, or "planted"."""
    model_hash: int
    """Of its keys and tensors, as in snapshots."""
    text: str
    """Where the tokens came from."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype != np.uint16 or 0 in self.ids.shape:
            raise ImpError(f"expert ids are {self.ids.dtype} {list(self.ids.shape)}")
        if self.step_rows.ndim != 1 or self.step_rows.dtype != np.int32:
            raise ImpError(f"rows of steps are {self.step_rows.dtype} {self.step_rows.ndim}-D")
        if not len(self.step_rows) or int(self.step_rows.min()) < 1:
            raise ImpError("a step of a trace has no tokens")
        rows = int(self.step_rows.sum(dtype=np.int64))
        if rows != len(self.ids):
            raise ImpError(f"steps of {rows} tokens in all, ids of {len(self.ids)}")
        if self.k > self.experts:
            raise ImpError(f"{self.k} experts of {self.experts} a token")
        if int(self.ids.max()) >= self.experts:
            raise ImpError(f"expert {int(self.ids.max())} in a layer of {self.experts}")

    @property
    def layers(self) -> int:
        """Layers with experts."""
        return int(self.ids.shape[1])

    @property
    def k(self) -> int:
        """Experts of a token and layer."""
        return int(self.ids.shape[2])


def record(
    model: Model,
    tokens: Sequence[int],
    *,
    text: str,
    step: int = 512,
    decode: bool = False,
    generate: int = 0,
    n_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Run tokens through a model and keep what its routers chose.

    Args:
        model: with experts.
        tokens: the prompt.
        text: where they came from, for the trace.
        step: tokens of a prefill step.
        decode: one token a step from the first on.
        generate: tokens to choose greedily after them, one a step.
        n_threads: None = all.
        progress: called with (tokens done, tokens in all).

    Raises:
        ImpError: a token that is none, more tokens than the model's context, or no experts.
    """
    if not len(tokens):
        raise ImpError(f"{text}: no tokens to record")
    total, rows = len(tokens) + generate, 1 if decode else min(step, len(tokens))
    parts: list[Ids] = []
    from imp_runtime.session import Session  # plans, which sessions use, know traces

    with Session(
        model, n_ctx=total, n_ubatch=rows, n_threads=n_threads, taps=["blk.*.expert_ids"]
    ) as session:
        model_hash = session.core.model_hash
        with session.open() as seq:
            chosen = np.asarray(tokens, np.int32)
            logits = np.empty((0, 0), np.float32)
            done = 0
            while done < total:
                part = chosen[done : done + rows]
                if not len(part):  # the prompt is over
                    part = np.array([np.argmax(logits[-1])], np.int32)
                logits = seq.extend(part, outputs="last")
                parts.append(_layers(session, model))
                done += len(part)
                if progress is not None:
                    progress(done, total)
    arch = model.arch
    return Trace(
        np.concatenate(parts),
        np.array([len(p) for p in parts], np.int32),
        int(model.keys[f"{arch}.expert_count"]),
        str(model.keys.get("general.name", "")),
        model_hash,
        text,
    )


def _layers(session: Session, model: Model) -> Ids:
    taps = session.taps()
    if not taps:
        raise ImpError(f"{model.path}: the model has no experts")
    by_layer = sorted(taps, key=lambda name: int(name.split(".")[1]))
    return np.stack([taps[name] for name in by_layer], axis=1).astype(np.uint16)


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; a file that is there is replaced when the new one is whole.

    Raises:
        ImpError: it has more ids than a file may hold.
        OSError: the file cannot be written.
    """
    if trace.ids.size > MAX_IDS:
        raise ImpError(f"{path}: {trace.ids.size} expert ids, a file holds at most {MAX_IDS}")
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "model": trace.model,
        "model_hash": trace.model_hash,
        "text": trace.text,
        "experts": trace.experts,
        "layers": trace.layers,
        "k": trace.k,
    }
    data = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    if len(data) > MAX_META_BYTES:
        raise ImpError(f"{path}: {len(data)} bytes of names, a file holds at most {MAX_META_BYTES}")
    part = Path(f"{os.fspath(path)}.part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, ids=trace.ids, step_rows=trace.step_rows, meta=data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace.

    Raises:
        ImpError: the file is no trace, of another version, damaged, or its parts do not fit.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return _load(file, os.fspath(path))


def routing(name: str, sizes: Callable[[], ModelSizes]) -> Trace | None:
    """The recorded ids that a routing names: "trace:FILE". None for any other routing.

    Args:
        name: of a routing, as for Session.
        sizes: of the model whose experts are chosen.

    Raises:
        ImpError: as load(), or the trace is of another shape than the model (naming both), or the
            name is of no routing.
        OSError: as load().
    """
    if not name.startswith(ROUTING_PREFIX):
        if name != "model":  # refuses other names
            _core.PlantedRouting(layers=1, experts=1, k=1, curve=name, seed=0)
        return None
    path = name.removeprefix(ROUTING_PREFIX)
    trace, model = load(path), sizes()
    found = (trace.layers, trace.experts, trace.k)
    wanted = (model.expert_layers, model.experts, model.experts_used)
    if found != wanted:
        raise ImpError(f"{path}: a trace of {_shape(*found)}; {model.name} has {_shape(*wanted)}")
    return trace


def _shape(layers: int, experts: int, k: int) -> str:
    return f"{layers} layers, {k} of {experts} experts"


def _load(file: IO[bytes], path: str) -> Trace:
    try:
        with zipfile.ZipFile(file) as archive:
            meta = _meta(_array(archive, "meta", "|u1", 1, MAX_META_BYTES).tobytes())
            shape = (meta["layers"], meta["k"])
            ids = _array(archive, "ids", *_FIELDS["ids"], MAX_IDS, shape)
            rows = _array(archive, "step_rows", *_FIELDS["step_rows"], len(ids))
        return Trace(
            ids,
            rows,
            meta["experts"],
            meta["model"],
            meta["model_hash"],
            meta["text"],
        )
    except ImpError as error:
        raise ImpError(f"{path}: {error}") from None
    except Exception as error:  # zipfile and numpy raise many types for damaged bytes
        raise ImpError(f"{path}: not a trace of experts ({error})") from None


def _array(
    archive: zipfile.ZipFile,
    name: str,
    dtype: str,
    dims: int,
    most: int,
    tail: tuple[int, ...] | None = None,
) -> npt.NDArray[Any]:
    """An array of the file, its header checked before memory is taken for it."""
    if f"{name}.npy" not in archive.namelist():
        raise ImpError(f"not a trace of experts: it has no '{name}'")
    with archive.open(f"{name}.npy") as file:
        shape, found = _header(file)
        if found != np.dtype(dtype) or len(shape) != dims:
            raise ImpError(f"'{name}' is {found} {list(shape)}, {dtype} in {dims}-D needed")
        if tail is not None and shape[1:] != tail:
            raise ImpError(f"'{name}' is {list(shape)}, its header says {list(tail)} a token")
        count = 1
        for n in shape:
            count *= n
        if not 0 < count <= most:
            raise ImpError(f"'{name}' has {count} values, 1 to {most} can be")
        stored = archive.getinfo(f"{name}.npy").file_size
        if stored > count * found.itemsize + _MAX_HEADER_BYTES:
            raise ImpError(f"'{name}' takes {stored} bytes for {count} values")
        data = bytearray()
        while len(data) < count * found.itemsize:  # grows with what is there, not what is claimed
            part = file.read(min(1 << 24, count * found.itemsize - len(data)))
            if not part:
                raise ImpError(f"'{name}' ends after {len(data)} of {count * found.itemsize} bytes")
            data += part
        if file.read(1):  # the end of the file is where its checksum is compared
            raise ImpError(f"'{name}' has more bytes than its {count} values")
    return np.frombuffer(bytes(data), found).reshape(shape)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ImpError(f"an array of npy version {version[0]}.{version[1]}, 1.0 needed")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(
        file, max_header_size=_MAX_HEADER_BYTES
    )
    if fortran:
        raise ImpError("an array in column order, rows needed")
    return shape, dtype


def _meta(data: bytes) -> dict[str, Any]:
    meta = json.loads(data)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ImpError("not a trace of experts")
    if meta.get("version") != VERSION:
        raise ImpError(f"a trace of version {meta.get('version')}, this imp reads {VERSION}")
    kinds = {"model": str, "text": str, "model_hash": int, "experts": int, "layers": int, "k": int}
    for key, kind in kinds.items():
        if type(meta.get(key)) is not kind:
            raise ImpError(f"the trace's '{key}' is {meta.get(key)!r}")
    return meta
