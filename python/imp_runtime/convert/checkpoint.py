"""A checkpoint in Hugging Face layout: which tensors its safetensors files hold, and their bytes.

Headers are read here rather than through `safetensors`, whose numpy side has no FP8 and BF16 and
keeps files mapped: bytes come by `pread` into reusable buffers, so memory stays small.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.errors import ConvertError, Problems

MAX_HEADER_BYTES = 100_000_000  # of one file; the limit of the safetensors library
INDEX_NAME = "model.safetensors.index.json"
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor's bytes are. `shape` is slowest first, `offset` absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def canonical(name: str) -> str:
    """A tensor's name without the wrappers that exports disagree about.

    `model.language_model.layers.0.x`, `model.layers.0.x` and `language_model.model.layers.0.x`
    are all `layers.0.x`.
    """
    return name.replace("language_model.", "").removeprefix("model.")


class Checkpoint:
    """Tensors by canonical name, and their bytes on request. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Reads all headers.

        Raises:
            ConvertError: listing every malformed, missing, truncated or contradicting file.
        """
        self.folder = folder
        self.notes: list[str] = []
        self.tensors: dict[str, TensorRef] = {}
        self.files: list[Path] = []
        self._fds: list[int] = []
        problems = Problems()
        index = self._read_index(problems)
        for path in self._list_files(index, problems):
            self._read_file(path, index, problems)
        if index is not None:
            read = {path.name for path in self.files}
            for name, file in sorted(index.items()):
                ref = self.tensors.get(canonical(name))
                if file in read and (ref is None or ref.name != name):
                    problems.add(f"{INDEX_NAME} places {name} in {file}, which does not hold it")
        if len(problems):
            self.close()
        problems.raise_if_any(str(folder))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def read(self, ref: TensorRef, start: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Bytes `start .. start + nbytes` of a tensor, uint8 [nbytes]."""
        out = np.empty(ref.nbytes - start if nbytes is None else nbytes, np.uint8)
        self.read_into(ref, start, out)
        return out

    def read_into(self, ref: TensorRef, start: int, out: NDArray[Any]) -> None:
        """Fills the contiguous array `out` with a tensor's bytes from byte `start` on.

        Raises:
            ConvertError: if the file became shorter since its header was read.
        """
        view = memoryview(out.reshape(-1).view(np.uint8).data)
        done = 0
        while done < len(view):
            got = os.preadv(self._fds[ref.file], [view[done:]], ref.offset + start + done)
            if got == 0:
                raise ConvertError(
                    f"{self.files[ref.file]}: ends inside {ref.name}, {len(view) - done} of "
                    f"{len(view)} bytes are missing"
                )
            done += got

    def _read_index(self, problems: Problems) -> dict[str, str] | None:
        path = self.folder / INDEX_NAME
        if not path.is_file():
            return None
        try:
            weight_map = json.loads(path.read_bytes())["weight_map"]
            if not isinstance(weight_map, dict) or not all(
                isinstance(v, str) for v in weight_map.values()
            ):
                raise TypeError("weight_map is not an object of file names")
        except (ValueError, KeyError, TypeError) as error:
            problems.add(f"{INDEX_NAME} cannot be read: {error}")
            return {}
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file:
                problems.add(f"{INDEX_NAME} names a file outside the folder: {file}")
            elif not (self.folder / file).is_file():
                count = sum(v == file for v in weight_map.values())
                problems.add(f"{INDEX_NAME} places {count} tensors in {file}, which is missing")
        return weight_map

    def _list_files(self, index: dict[str, str] | None, problems: Problems) -> list[Path]:
        present = sorted(self.folder.glob("*.safetensors"))
        if index is None:
            if not present:
                problems.add("no *.safetensors file is there")
            return present
        named = set(index.values())
        ignored = [p.name for p in present if p.name not in named]
        if ignored:
            self.notes.append(f"not named by {INDEX_NAME}, ignored: {', '.join(ignored)}")
        return [p for p in present if p.name in named]

    def _read_file(self, path: Path, index: dict[str, str] | None, problems: Problems) -> None:
        fd = os.open(path, os.O_RDONLY)
        self._fds.append(fd)
        self.files.append(path)
        size = os.fstat(fd).st_size
        try:
            header, data = _read_header(fd, size)
            refs = _parse(header, len(self.files) - 1, data)
        except ValueError as error:
            problems.add(f"{path.name}: {error}")
            return
        end = max((r.offset + r.nbytes for r in refs), default=data)
        if end != size:
            short = "is cut short" if size < end else "has bytes that no tensor owns"
            problems.add(f"{path.name} {short}: {size} bytes, its header describes {end}")
        for ref in refs:
            if index is not None and index.get(ref.name) != path.name:
                where = index.get(ref.name, "no file")
                problems.add(f"{path.name} holds {ref.name}, {INDEX_NAME} places it in {where}")
            other = self.tensors.get(canonical(ref.name))
            if other is None:
                self.tensors[canonical(ref.name)] = ref
            else:
                problems.add(
                    f"{ref.name} is there twice: in {self.files[other.file].name}"
                    f"{'' if other.name == ref.name else f' as {other.name}'} and in {path.name}"
                )


def _read_header(fd: int, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the data; ValueError says what is wrong."""
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise ValueError(f"{size} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise ValueError(f"is cut short: {size} bytes, its header alone needs {8 + length}")
    try:
        header = json.loads(os.pread(fd, length, 8), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"{key} is twice in the header")
        out[key] = value
    return out


def _parse(header: dict[str, Any], file: int, data: int) -> list[TensorRef]:
    refs = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{name} lacks dtype, shape or data_offsets") from None
        numbers = [begin, end, *shape] if isinstance(shape, list) else [-1]
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{name} has a bad shape {shape} or offsets {begin}, {end}")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{name} has the unknown dtype {dtype}")
        needed = prod(shape) * DTYPE_BYTES[dtype]
        if end - begin != needed:
            raise ValueError(f"{name} has {end - begin} bytes, {dtype} {shape} needs {needed}")
        refs.append(TensorRef(name, dtype, tuple(shape), file, data + begin, needed))
    refs.sort(key=lambda r: (r.offset, r.nbytes))
    for a, b in zip(refs, refs[1:], strict=False):
        if a.offset + a.nbytes > b.offset:
            raise ValueError(f"{a.name} and {b.name} overlap")
    return refs
