"""The two things a benchmark times: reading prompts and generating, for several sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imp_runtime.bench.tokens import Int32
from imp_runtime.session import Session

Piece = tuple[int, int, int]
"""(index of the prompt, begin, end)."""


def pieces(lengths: Sequence[int], n_batch: int, n_ubatch: int) -> Iterator[list[Piece]]:
    """Cut prompts, laid end to end, into steps of at most n_ubatch tokens.

    Every n_batch tokens a new step begins, as in llama.cpp's logical batches.
    """
    step: list[Piece] = []
    in_step = in_batch = 0
    for index, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + n_ubatch - in_step, begin + n_batch - in_batch)
            step.append((index, begin, end))
            in_step += end - begin
            in_batch += end - begin
            begin = end
            if in_step == n_ubatch or in_batch == n_batch:
                yield step
                step, in_step = [], 0
                in_batch %= n_batch
    if step:
        yield step


def read_prompts(session: Session, ids: Sequence[int], prompts: Int32, n_batch: int) -> None:
    """Append prompts[i] to sequence ids[i]; logits are computed for the last token of each.

    Args:
        session: holds the sequences.
        ids: of open sequences.
        prompts: int32 [sequences, tokens].
        n_batch: tokens of a logical batch.
    """
    length = prompts.shape[1]
    for step in pieces([length] * len(ids), n_batch, session.n_ubatch):
        session.core.step(
            [
                (ids[i], prompts[i, begin:end], end - begin - (end == length))
                for i, begin, end in step
            ]
        )


def generate(session: Session, ids: Sequence[int], tokens: Int32, *, separate: bool) -> None:
    """Append tokens[i] to sequence ids[i] one by one, with logits for each.

    Args:
        session: holds the sequences.
        ids: of open sequences.
        tokens: int32 [sequences, tokens].
        separate: sequence after sequence instead of all in each step.
    """
    groups = [[i] for i in range(len(ids))] if separate else [list(range(len(ids)))]
    for group in groups:
        for t in range(tokens.shape[1]):
            # More sequences than a step holds tokens take several steps.
            for begin in range(0, len(group), session.n_ubatch):
                part = group[begin : begin + session.n_ubatch]
                session.core.step([(ids[i], tokens[i, t : t + 1], 0) for i in part])
