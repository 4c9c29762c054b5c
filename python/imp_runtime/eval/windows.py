"""Cutting a text into evaluation windows and running one window through a session."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .contracts import Float32, Int32, SessionLike
from .errors import EvalError, NotFiniteError
from .numerics import first_non_finite_row

# Two positions of a window are needed to score one token in its second half.
MIN_CONTEXT = 3
MAX_CONTEXT = 2**31 - 1
# llama.cpp rounds the context of a strided run up to a multiple of this.
STRIDED_CONTEXT_MULTIPLE = 256


@dataclass(frozen=True)
class Plan:
    """Where the windows of a run start and which of their tokens count.

    Attributes:
        n_ctx: tokens per window.
        n_chunks: number of windows.
        step: tokens from the start of one window to the start of the next.
        first: first position whose logits are scored (they predict token ``first + 1``).
        n_batch: tokens handed to the session at once.
        n_seq: windows per pass, in the sense of llama.cpp's progress lines.

    """

    n_ctx: int
    n_chunks: int
    step: int
    first: int
    n_batch: int
    n_seq: int

    @property
    def scored_per_window(self) -> int:
        """Tokens of each window that are scored."""
        return self.n_ctx - 1 - self.first


def check_sizes(n_ctx: int, n_batch: int, chunks: int) -> None:
    """Refuse sizes no run can have.

    Raises:
        EvalError: naming the option, its value and the limit.

    """
    if not MIN_CONTEXT <= n_ctx <= MAX_CONTEXT:
        raise EvalError(f"--ctx-size is {n_ctx}, it must be {MIN_CONTEXT} to {MAX_CONTEXT}")
    if n_batch < 1:
        raise EvalError(f"--batch-size is {n_batch}, it must be at least 1")
    if chunks == 0:
        raise EvalError("--chunks is 0, it must be at least 1, or negative for all")


def plan_windows(n_tokens: int, n_ctx: int, n_batch: int, chunks: int) -> Plan:
    """Adjacent windows of ``n_ctx`` tokens, the second half of each scored.

    Raises:
        EvalError: if a size is out of range or the text is shorter than two windows.

    """
    check_sizes(n_ctx, n_batch, chunks)
    _need(n_tokens, n_ctx)
    available = n_tokens // n_ctx
    n_chunks = available if chunks < 0 else min(chunks, available)
    n_seq = max(1, n_batch // n_ctx)
    return Plan(n_ctx, n_chunks, n_ctx, n_ctx // 2, min(n_batch, n_seq * n_ctx), n_seq)


def plan_strided(n_tokens: int, n_ctx: int, n_batch: int, chunks: int, stride: int) -> Plan:
    """Overlapping windows that start every ``stride`` tokens, the last ``stride`` scored.

    The window is ``n_ctx + stride / 2`` tokens, rounded up to a multiple of 256.

    Raises:
        EvalError: if a size is out of range or the text is shorter than two windows.

    """
    check_sizes(n_ctx, n_batch, chunks)
    multiple = STRIDED_CONTEXT_MULTIPLE
    window = -(-(n_ctx + stride // 2) // multiple) * multiple
    if not 1 <= stride < window:
        raise EvalError(f"--ppl-stride is {stride}, it must be 1 to {window - 1} here")
    _need(n_tokens, window)
    available = -(-(n_tokens - window) // stride)
    n_chunks = available if chunks < 0 else min(chunks, available)
    return Plan(window, n_chunks, stride, window - stride - 1, min(n_batch, window), 1)


def _need(n_tokens: int, n_ctx: int) -> None:
    if n_tokens < 2 * n_ctx:
        raise EvalError(
            f"the text has {n_tokens} tokens, a context of {n_ctx} needs at least {2 * n_ctx}"
        )


def run_window(
    session: SessionLike, window: Int32, plan: Plan, index: int
) -> Iterator[tuple[int, Float32]]:
    """Evaluate one window, step by step, from an empty sequence.

    Yields ``(position, logits)``: float32 [n, n_vocab] for the scored positions ``position ..
    position + n - 1``, valid until the next step.

    Raises:
        EvalError: if the evaluation fails, naming chunk and positions.
        NotFiniteError: if a logit is not finite, naming chunk and position.

    """
    where = f"chunk {index + 1} of {plan.n_chunks}"
    last = plan.n_ctx - 1  # its logits predict a token outside the window
    step = min(plan.n_batch, session.n_ubatch)  # longer pieces would gather all their logits
    sequence = session.open()
    try:
        for start in range(0, plan.n_ctx, step):
            piece = window[start : start + step]
            skip = min(max(plan.first - start, 0), len(piece))
            wanted = skip < len(piece)
            try:
                logits = sequence.extend(piece, outputs=skip if wanted else "none")
            except (RuntimeError, ValueError, MemoryError) as error:
                raise EvalError(
                    f"{where}: positions {start} to {start + len(piece) - 1} failed: {error}"
                ) from error
            if not wanted:
                continue
            position = start + skip
            rows = logits[: last - position]
            bad = first_non_finite_row(rows)
            if bad is not None:
                raise NotFiniteError(
                    f"{where}: the logits of position {position + bad} are not finite"
                )
            if len(rows):
                yield position, rows
    finally:
        sequence.close()


def check_tokens(tokens: Int32, n_vocab: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        EvalError: naming the first bad id and its index.

    """
    bad = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
    if bad.size:
        raise EvalError(
            f"token {int(bad[0])} is {int(tokens[bad[0]])}, the vocabulary has {n_vocab} entries"
        )
