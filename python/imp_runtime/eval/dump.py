"""The file of `--dump`: the score of every position, to compare two runs token by token.

An uncompressed npz, read with ``numpy.load``. One entry per scored position, in order:

    window    int32    which window, from 0
    position  int32    of the logits, in the window
    index     int64    of the predicted token, in ``tokens``
    token     int32    the predicted token's id
    nll       float64  its -log p in nats
    rank      int32    tokens that the model found likelier
    top       int32    the likeliest token's id, the lowest id if several are
    top_nll   float64  its -log p in nats

and of the run: ``tokens`` int32 [n], the text; ``n_ctx``, tokens per window; ``step``, tokens from
one window's start to the next; ``first``, the first scored position of a window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .contracts import Float32, Float64, Int32
from .numerics import for_each_block, token_nll
from .partial import partial_file
from .windows import Plan

Columns = dict[str, npt.NDArray[Any]]


class Dump:
    """Collects scores; see `write_dump`."""

    def __init__(self, text: Int32, plan: Plan, n_threads: int) -> None:
        self._text, self._plan, self._n_threads = text, plan, n_threads
        self._parts: list[Columns] = []

    def add(
        self, window: int, position: int, logits: Float32, targets: Int32, nll: Float64
    ) -> None:
        """Take in the scores of consecutive positions of a window.

        Args:
            window: which.
            position: the first one.
            logits: float32 [n, n_vocab].
            targets: int32 [n], the tokens that follow.
            nll: float64 [n], theirs.

        """
        n, n_vocab = logits.shape
        top, rank = np.empty(n, np.int32), np.empty(n, np.int32)

        def work(rows: slice) -> None:
            part = logits[rows]
            top[rows] = part.argmax(axis=1)
            own = np.take_along_axis(part, targets[rows, None].astype(np.int64), axis=1)
            rank[rows] = np.count_nonzero(part > own, axis=1)

        for_each_block(n, n_vocab, self._n_threads, work)
        positions = np.arange(position, position + n, dtype=np.int32)
        self._parts.append(
            {
                "window": np.full(n, window, np.int32),
                "position": positions,
                "index": window * self._plan.step + 1 + positions.astype(np.int64),
                "token": targets,
                "nll": nll,
                "rank": rank,
                "top": top,
                "top_nll": token_nll(logits, top, self._n_threads),
            }
        )

    def write(self, file: BinaryIO) -> None:
        """Store everything."""
        plan = self._plan
        arrays: dict[str, Any] = {
            "tokens": self._text,
            "n_ctx": plan.n_ctx,
            "step": plan.step,
            "first": plan.first,
        }
        for name in self._parts[0]:
            arrays[name] = np.concatenate([part[name] for part in self._parts])
        np.savez(file, **arrays)


@contextmanager
def write_dump(path: Path, text: Int32, plan: Plan, n_threads: int = 1) -> Iterator[Dump]:
    """Open a file for a run over ``text`` int32 [n]; it appears when complete.

    Raises:
        OSError: if the file cannot be written.

    """
    with partial_file(path) as file:
        dump = Dump(text, plan, n_threads)
        yield dump
        dump.write(file)
