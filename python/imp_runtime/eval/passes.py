"""Running the windows of a text through a session, several in one step."""

from collections.abc import Iterator
from typing import NamedTuple

from .contracts import Float32, Int32, SequenceLike, SessionLike
from .errors import EvalError, NotFiniteError
from .numerics import first_non_finite_row
from .windows import Plan


class Rows(NamedTuple):
    """Logits of some scored positions of one window.

    Attributes:
        chunk: which window, from 0.
        position: of the first row in its window.
        logits: float32 [n, n_vocab], valid until the next step.

    """

    chunk: int
    position: int
    logits: Float32


class Piece(NamedTuple):
    """Positions ``begin`` to ``end - 1`` of a window."""

    chunk: int
    begin: int
    end: int


def run_windows(
    session: SessionLike, text: Int32, plan: Plan, bos_id: int | None
) -> Iterator[Rows]:
    """Evaluate the windows of ``text`` int32 [n], each from an empty sequence.

    A step is filled with the windows of a pass one after the other, so the rows come in the order
    of the text, and no more sequences are open than a step touches (`Plan.together`).
    ``bos_id`` takes the first place of each window, unless it is None.

    Raises:
        EvalError: if the evaluation fails, naming chunk and positions.
        NotFiniteError: if a logit is not finite, naming chunk and position.

    """
    sequences: dict[int, SequenceLike] = {}
    try:
        for pieces in _steps(plan, session.n_ubatch):
            requests = []
            for chunk, begin, end in pieces:
                if begin == 0:
                    sequences[chunk] = session.open()
                tokens = text[chunk * plan.step + begin : chunk * plan.step + end]
                if begin == 0 and bos_id is not None:
                    tokens = tokens.copy()
                    tokens[0] = bos_id
                skip = min(max(plan.first - begin, 0), end - begin)
                requests.append((sequences[chunk].id, tokens, skip))
            try:
                logits = session.core.step(requests)
            except (RuntimeError, ValueError, MemoryError) as error:
                raise EvalError(f"{_where(pieces, plan)} failed: {error}") from error
            yield from _scored(pieces, [skip for _, _, skip in requests], logits, plan)
            for chunk, _, end in pieces:
                if end == plan.n_ctx:
                    sequences.pop(chunk).close()
    finally:
        for sequence in sequences.values():
            sequence.close()


def _steps(plan: Plan, n_ubatch: int) -> Iterator[list[Piece]]:
    """What each step reads: the windows of a pass in order, cut where a step is full."""
    step = min(plan.n_batch, n_ubatch)  # longer pieces would gather all their logits
    for first in range(0, plan.n_chunks, plan.n_seq):
        total = min(plan.n_seq, plan.n_chunks - first) * plan.n_ctx
        for at in range(0, total, step):
            end = min(at + step, total)
            yield [
                Piece(
                    first + window,
                    max(at - window * plan.n_ctx, 0),
                    min(end - window * plan.n_ctx, plan.n_ctx),
                )
                for window in range(at // plan.n_ctx, -(-end // plan.n_ctx))
            ]


def _scored(pieces: list[Piece], skips: list[int], logits: Float32, plan: Plan) -> Iterator[Rows]:
    last = plan.n_ctx - 1  # its logits predict a token outside the window
    row = 0
    for (chunk, begin, end), skip in zip(pieces, skips, strict=True):
        position, count = begin + skip, end - begin - skip
        rows = logits[row : row + min(count, last - position)]
        row += count
        bad = first_non_finite_row(rows)
        if bad is not None:
            where = f"chunk {chunk + 1} of {plan.n_chunks}"
            raise NotFiniteError(f"{where}: the logits of position {position + bad} are not finite")
        if len(rows):
            yield Rows(chunk, position, rows)


def _where(pieces: list[Piece], plan: Plan) -> str:
    (chunk, begin, end), last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return f"chunk {chunk + 1} of {plan.n_chunks}: positions {begin} to {end - 1}"
    return (
        f"chunks {chunk + 1} to {last.chunk + 1} of {plan.n_chunks}: positions from {begin} of the "
        f"first to {last.end - 1} of the last"
    )
