"""The conversion as one call: plan, check, write, verify, rename."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from imp_runtime.convert.check import check_disk, check_group_scales, disk_needed
from imp_runtime.convert.errors import ConvertError
from imp_runtime.convert.options import ConvertOptions
from imp_runtime.convert.output import PartialOutput
from imp_runtime.convert.plan import schemes_seen
from imp_runtime.convert.planner import plan
from imp_runtime.convert.progress import Progress, Silent
from imp_runtime.convert.verify import verify
from imp_runtime.convert.write import shard_names, write


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    files: the result, one path or all shards.
    nbytes: their sizes summed; seconds: wall time of writing, and of verifying (0 if not done).
    verified: number of values compared with the source.
    schemes: modules per quantisation scheme of the checkpoint.
    notes: decisions, one line each.
    """

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    write_seconds: float
    verify_seconds: float
    verified: int
    schemes: dict[str, int]
    notes: tuple[str, ...]


def convert(
    src: str | Path,
    out: str | Path,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Converts a checkpoint folder to GGUF.

    Memory stays under 2 GiB whatever the size. The files are written in a folder beside `out` and
    renamed when complete and verified; on any error or interruption nothing is left.

    Args:
        src: folder in Hugging Face layout (`config.json`, `*.safetensors`, `tokenizer.json`).
        out: the GGUF; a folder means `<folder>/<name of src>.gguf`.
        options: types, MTP, splitting; the defaults if None.
        progress: told about stages, bytes and notes; silent if None.

    Raises:
        ConvertError: listing everything wrong with the checkpoint; or if `out` exists, the disk is
            too small, a value does not fit its type, or the result differs from the source.
        KeyboardInterrupt: passed on after cleaning up.
    """
    options = options or ConvertOptions()
    progress = progress or Silent()
    target = output_path(src, out)
    with plan(src, options) as planned:
        names = shard_names(planned, target)
        partial = PartialOutput(target, names, force=options.force)
        try:
            for line in planned.notes:
                progress.note(line)
            check_disk(target, disk_needed(planned.data_bytes, len(names)))
            check_group_scales(planned.checkpoint, planned.group_scales, progress)
            started = time.monotonic()
            write(planned, partial.folder / target.name, progress)
            written = time.monotonic()
            verified = verify(planned, partial.files[0], progress) if options.verify else 0
            finished = time.monotonic()
            nbytes = sum(p.stat().st_size for p in partial.files)
            partial.commit()
        except OSError as error:
            partial.discard()
            raise ConvertError(f"{target} cannot be written: {error.strerror}") from error
        except BaseException:
            partial.discard()
            raise
        return ConvertReport(
            files=tuple(partial.finals),
            tensors=len(planned.outputs),
            nbytes=nbytes,
            write_seconds=written - started,
            verify_seconds=finished - written if options.verify else 0.0,
            verified=verified,
            schemes=schemes_seen(planned),
            notes=tuple(planned.notes),
        )


def output_path(src: str | Path, out: str | Path) -> Path:
    """Where the result goes.

    Raises:
        ConvertError: if the folder of `out` does not exist, or `out` is not a .gguf name.
    """
    path = Path(out)
    if path.is_dir():
        path = path / f"{Path(src).resolve().name}.gguf"
    if path.suffix != ".gguf":
        raise ConvertError(f"{path}: a name that ends in .gguf is needed")
    if not path.parent.is_dir():
        raise ConvertError(f"{path.parent} is not a folder")
    return path
