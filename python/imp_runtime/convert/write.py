"""Streams the planned tensors into the files of a GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from imp_runtime.convert.encode import encode
from imp_runtime.convert.pipeline import in_order
from imp_runtime.convert.plan import ConvertPlan, Output
from imp_runtime.convert.progress import Progress

CHUNK_VALUES = 1 << 22  # elements that one step reads and encodes

_Step = tuple[Output, int, int]  # tensor, first row of its view, number of rows


def shard_names(plan: ConvertPlan, out: Path) -> list[str]:
    """File names of the result: `out`, or `<stem>-00001-of-000NN.gguf` for a split one."""
    return [p.name for p in plan.writer.format_shard_names(out)]


def write(plan: ConvertPlan, target: Path, progress: Progress) -> None:
    """Writes the result as `target` (or its shards beside it).

    Raises:
        ConvertError: if the weights hold values that the chosen types cannot.
        OSError: if the disk is full or fails.
    """
    writer = plan.writer
    shards = [list(t) for t in writer.tensors]  # names, in order
    by_name = {o.name: o for o in plan.outputs}
    writer.write_header_to_file(target)
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        progress.begin("writing", sum(o.nbytes for o in plan.outputs))
        for file, names in zip(writer.fout or [], shards, strict=True):
            writer.write_padding(file, file.tell())
            outputs = [by_name[n] for n in names]
            for (output, row, count), data in in_order(_encode, _steps(outputs)):
                file.write(data.data)
                if row + count == output.view.rows:
                    writer.write_padding(file, output.nbytes)
                progress.advance(data.nbytes)
        progress.end()
    finally:
        writer.close()


def chunks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of steps of about CHUNK_VALUES elements."""
    step = max(1, CHUNK_VALUES // cols)
    for row in range(0, rows, step):
        yield row, min(step, rows - row)


def _steps(outputs: list[Output]) -> Iterator[_Step]:
    for output in outputs:
        rows = output.view.rows
        for row, count in chunks(rows, output.view.cols):
            yield output, row, count


def _encode(step: _Step) -> NDArray[np.uint8]:
    output, row, count = step
    with np.errstate(over="ignore", invalid="ignore"):  # encode refuses what is not finite
        return encode(output.name, output.view.form, output.type, output.view.read(row, count))
