"""The files of a conversion: written beside the final name, renamed when complete."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from imp_runtime.convert.errors import ConvertError

LOCK_NAME = ".lock"


class PartialOutput:
    """A folder `<name>.partial` beside the result that holds its files until they are complete.

    A folder left by a killed conversion is recognised (nobody holds its lock) and emptied.
    """

    def __init__(self, out: Path, names: list[str], *, force: bool) -> None:
        """Checks the final names and takes the folder.

        Raises:
            ConvertError: if a final name exists (without `force`), if the folder is something
                else, or if another conversion is using it.
        """
        self.finals = [out.with_name(n) for n in names]
        for final in self.finals:
            if final.exists() and not force:
                raise ConvertError(f"{final} exists already; --force replaces it")
            if final.is_dir():
                raise ConvertError(f"{final} is a folder")
        self.folder = out.with_name(out.name + ".partial")
        try:
            self.folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise ConvertError(f"{self.folder} is in the way") from None
        except OSError as error:
            raise ConvertError(f"{self.folder} cannot be made: {error.strerror}") from None
        foreign = [
            p.name for p in self.folder.iterdir() if p.name != LOCK_NAME and p.suffix != ".gguf"
        ]
        if foreign:
            raise ConvertError(f"{self.folder} is not a partial conversion: it holds {foreign[0]}")
        self._lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConvertError(f"another conversion is writing {out}") from None
        for stale in self.folder.glob("*.gguf"):
            stale.unlink()
        self.files = [self.folder / final.name for final in self.finals]

    def commit(self) -> None:
        """Gives the complete files their final names, the first shard last."""
        for path in self.files:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for path, final in reversed(list(zip(self.files, self.finals, strict=True))):
            os.replace(path, final)
        self.discard()

    def discard(self) -> None:
        """Removes the folder and what is left in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
