"""Checks that have to read weights before anything is written: block scales, disk space."""

from __future__ import annotations

import shutil
from pathlib import Path

from imp_runtime.convert.checkpoint import Checkpoint, TensorRef
from imp_runtime.convert.errors import ConvertError, Problems
from imp_runtime.convert.progress import Progress
from imp_runtime.convert.schemes import bad_group_scales

HEADER_ALLOWANCE = 32 << 20  # bytes of keys and tensor infos, generously
READ_BYTES = 16 << 20  # of one step


def check_group_scales(ckpt: Checkpoint, refs: list[TensorRef], progress: Progress) -> None:
    """Looks at every NVFP4 block scale.

    Raises:
        ConvertError: listing the tensors with NaN or negative ones.
    """
    problems = Problems()
    progress.begin("checking", sum(r.nbytes for r in refs))
    for ref in sorted(refs, key=lambda r: (r.file, r.offset)):
        bad = 0
        for start in range(0, ref.nbytes, READ_BYTES):
            codes = ckpt.read(ref, start, min(READ_BYTES, ref.nbytes - start))
            bad += bad_group_scales(codes)
        if bad:
            problems.add(f"{ref.name} holds {bad} NaN or negative scales of {ref.count}")
        progress.advance(ref.nbytes)
    progress.end()
    problems.raise_if_any(str(ckpt.folder))


def disk_needed(data_bytes: int, files: int) -> int:
    """Bytes that writing takes."""
    return data_bytes + HEADER_ALLOWANCE * files


def check_disk(out: Path, needed: int) -> None:
    """Raises ConvertError if the disk of `out` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ConvertError(f"{out.parent} has {free} bytes free, the result needs {needed}")
