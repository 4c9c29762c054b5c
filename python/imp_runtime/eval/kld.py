"""The file of `--kl-divergence-base`: one run's log-probabilities, as llama-perplexity stores them.

Layout, little endian: ``_logits_``, int32 n_ctx, n_vocab, n_chunks, int32 tokens
[n_chunks, n_ctx], then one row per scored position (``n_ctx - 1 - n_ctx / 2`` per window):
float32 scale, float32 min_log_prob, uint16 q [n_vocab], one zero uint16 if n_vocab is odd.
``log p = scale * q + min_log_prob``; what lies 16 nats or more below the top is stored as q = 0.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from .contracts import Float32, Int32
from .errors import EvalError, LogitsFileError
from .numerics import for_each_block, row_max_and_sum_exp
from .partial import partial_file
from .windows import MAX_CONTEXT, MIN_CONTEXT

UInt16 = npt.NDArray[np.uint16]

MAGIC = b"_logits_"
HEADER_BYTES = 20
HEADER_WORDS = 4  # uint16 words of a row before its q: two float32
CLIP_NATS = np.float32(16)
LEVELS = np.float32(65535)
MAX_LOG_PROB = 1e-3  # 0, and room for rounding
MIN_LOG_PROB = -1000.0
"""Far below what is written: 16 nats under the best, which is one of n_vocab."""


def row_words(n_vocab: int) -> int:
    """uint16 words of one stored row."""
    return 2 * ((n_vocab + 1) // 2) + HEADER_WORDS


def rows_per_window(n_ctx: int) -> int:
    """Stored rows of a window of ``n_ctx`` tokens."""
    return n_ctx - 1 - n_ctx // 2


def file_bytes(n_ctx: int, n_vocab: int, n_chunks: int) -> int:
    """Size of the whole file."""
    window = 4 * n_ctx + 2 * rows_per_window(n_ctx) * row_words(n_vocab)
    return HEADER_BYTES + n_chunks * window


def encode_rows(logits: Float32, n_threads: int = 1) -> UInt16:
    """Stored rows, uint16 [n, row_words], of logits float32 [n, n_vocab]; all finite."""
    n_rows, n_vocab = logits.shape
    words = np.zeros((n_rows, row_words(n_vocab)), "<u2")
    header = words[:, :HEADER_WORDS].view("<f4")

    def work(rows: slice) -> None:
        part = logits[rows]
        top, sum_exp = row_max_and_sum_exp(part)
        bottom = np.maximum(part.min(axis=1), top - CLIP_NATS)
        scale = (top - bottom) / LEVELS
        header[rows, 0] = scale
        header[rows, 1] = (bottom - top) - np.log(sum_exp).astype(np.float32)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        above = np.maximum(part - bottom[:, None], np.float32(0))
        above *= inverse[:, None]
        words[rows, HEADER_WORDS : HEADER_WORDS + n_vocab] = np.rint(above, out=above)

    for_each_block(n_rows, n_vocab, n_threads, work)
    return words


class KldWriter:
    """Writes the rows of a run in order; see `write_kld`."""

    def __init__(self, file: BinaryIO, n_vocab: int, n_rows: int, n_threads: int) -> None:
        self._file = file
        self._n_vocab = n_vocab
        self._n_threads = n_threads
        self.rows_left = n_rows

    def write(self, logits: Float32) -> None:
        """Append the rows of logits float32 [n, n_vocab].

        Raises:
            EvalError: if there are more rows or other vocabulary entries than announced.

        """
        n_rows, n_vocab = logits.shape
        if n_vocab != self._n_vocab or n_rows > self.rows_left:
            raise EvalError(
                f"logits [{n_rows}, {n_vocab}] do not fit the {self.rows_left} rows of "
                f"{self._n_vocab} left in the file"
            )
        self._file.write(encode_rows(logits, self._n_threads).data)
        self.rows_left -= n_rows


@contextmanager
def write_kld(path: Path, tokens: Int32, n_vocab: int, n_threads: int = 1) -> Iterator[KldWriter]:
    """Open a file for the windows ``tokens`` int32 [n_chunks, n_ctx]; it appears when complete.

    Raises:
        EvalError: if the disk is too small or rows are missing at the end.
        OSError: if the file cannot be written.

    """
    n_chunks, n_ctx = tokens.shape
    needed = file_bytes(n_ctx, n_vocab, n_chunks)
    with partial_file(path) as file:
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise EvalError(f"{path} needs {needed} bytes, the disk has {free} free")
        file.write(MAGIC + np.array([n_ctx, n_vocab, n_chunks], "<i4").tobytes())
        file.write(np.ascontiguousarray(tokens, "<i4").data)
        writer = KldWriter(file, n_vocab, n_chunks * rows_per_window(n_ctx), n_threads)
        yield writer
        if writer.rows_left:
            raise EvalError(f"{path} lacks {writer.rows_left} rows")


@dataclass(frozen=True)
class KldRows:
    """Stored rows: ``log p = scale * q + min_log_prob``."""

    scale: Float32  # [n]
    min_log_prob: Float32  # [n]
    q: UInt16  # [n, n_vocab]


class KldBase:
    """A stored run, mapped: windows are read from the file when they are asked for.

    Attributes:
        path: where it is.
        n_ctx, n_vocab, n_chunks: tokens per window, vocabulary, windows.
        tokens: int32 [n_chunks, n_ctx], the evaluated text.

    """

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            LogitsFileError: if it is no such file, is truncated or contradicts itself.
            OSError: if it cannot be read.

        """
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER_BYTES)
        if head[: len(MAGIC)] != MAGIC:
            raise LogitsFileError(f"{path} does not start with {MAGIC.decode()}: not a logits file")
        if len(head) < HEADER_BYTES:
            raise LogitsFileError(f"{path} has {len(head)} bytes, its header needs {HEADER_BYTES}")
        self.n_ctx, self.n_vocab, self.n_chunks = (
            int(value) for value in np.frombuffer(head, "<i4", offset=len(MAGIC))
        )
        if not MIN_CONTEXT <= self.n_ctx <= MAX_CONTEXT:
            raise LogitsFileError(
                f"{path}: n_ctx is {self.n_ctx}, it must be {MIN_CONTEXT} or more"
            )
        if self.n_vocab < 1 or self.n_chunks < 1:
            raise LogitsFileError(
                f"{path}: n_vocab is {self.n_vocab} and n_chunks is {self.n_chunks}, "
                "both must be at least 1"
            )
        needed = file_bytes(self.n_ctx, self.n_vocab, self.n_chunks)
        if size != needed:
            raise LogitsFileError(f"{path} has {size} bytes, its header promises {needed}")
        data = np.memmap(path, np.uint8, "r")
        n_tokens = self.n_chunks * self.n_ctx
        rows_at = HEADER_BYTES + 4 * n_tokens
        self.tokens: Int32 = data[HEADER_BYTES:rows_at].view("<i4").reshape(-1, self.n_ctx)
        bad = np.flatnonzero((self.tokens < 0) | (self.tokens >= self.n_vocab))
        if bad.size:
            raise LogitsFileError(
                f"{path}: token {int(bad[0])} is {int(self.tokens.flat[bad[0]])}, "
                f"the vocabulary has {self.n_vocab} entries"
            )
        self._words = (
            data[rows_at:]
            .view("<u2")
            .reshape(self.n_chunks, rows_per_window(self.n_ctx), row_words(self.n_vocab))
        )

    def rows(self, chunk: int, first: int = 0, count: int | None = None) -> KldRows:
        """``count`` stored rows of a window from its row ``first`` on (default: all).

        Raises:
            LogitsFileError: if a row's scale or minimum is not a number it can have, or makes a
                probability larger than 1 or far below any that is written.

        """
        stop = None if count is None else first + count
        words = self._words[chunk, first:stop]
        header = words[:, :HEADER_WORDS].copy().view("<f4")
        top = header.astype(np.float64) @ [LEVELS, 1]
        fine = np.isfinite(header).all(axis=1) & (header[:, 0] >= 0)
        fine &= (header[:, 1] >= MIN_LOG_PROB) & (top <= MAX_LOG_PROB)
        if not fine.all():
            row = int(np.flatnonzero(~fine)[0])
            raise LogitsFileError(
                f"{self.path}: row {first + row} of chunk {chunk + 1} has scale "
                f"{header[row, 0]} and min_log_prob {header[row, 1]}"
            )
        q = words[:, HEADER_WORDS : HEADER_WORDS + self.n_vocab]
        return KldRows(header[:, 0], header[:, 1], q)
