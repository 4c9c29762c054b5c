"""Files that appear under their name only when they are complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def partial_file(path: Path) -> Iterator[BinaryIO]:
    """``path`` + ``.partial``, open for writing; renamed at the end, removed on an error.

    Raises:
        OSError: if the file cannot be written.

    """
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    partial.replace(path)
