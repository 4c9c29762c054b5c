"""A sequence outside of its session."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from imp_runtime import _core
from imp_runtime.errors import ImpError


@dataclass(frozen=True)
class Snapshot:
    """All that a sequence owns, as bytes with a versioned header and a checksum.

    Attributes:
        data: what Session.restore() and write() take.
        name: what error messages call it.
    """

    data: bytes
    name: str = "the snapshot"

    @cached_property
    def info(self) -> tuple[int, list[int]]:
        """(hash of its model, its tokens). Raises ImpError if the bytes are damaged."""
        return _core.snapshot_info(self.data, self.name)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the sequence. Raises ImpError if the bytes are damaged."""
        return list(self.info[1])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file; a file of that name is replaced only when the new one is whole.

        Raises:
            ImpError: the file cannot be written.
        """
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            try:
                part.write_bytes(self.data)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise ImpError(f"{target}: {error.strerror}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read and check a file.

        Raises:
            ImpError: it cannot be read, or is not a whole and intact snapshot.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ImpError(f"{path}: {error.strerror}") from error
        snapshot = cls(data, os.fspath(path))
        _ = snapshot.info
        return snapshot
