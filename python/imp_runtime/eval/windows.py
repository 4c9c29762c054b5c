"""Cutting a text into evaluation windows."""

import math
from dataclasses import dataclass, replace

import numpy as np

from .contracts import Int32
from .errors import EvalError

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
        n_batch: tokens of one pass, or of one step if they are less than a window.
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

    def together(self, n_ubatch: int) -> int:
        """Windows that one step of at most ``n_ubatch`` tokens can touch."""
        step = min(self.n_batch, n_ubatch)
        # Steps begin at multiples of this within a window; the worst begins that far from its end.
        unit = math.gcd(step, self.n_ctx)
        return min((step - unit - 1) // self.n_ctx + 2, self.n_seq, self.n_chunks)


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


def plan_windows(
    n_tokens: int, n_ctx: int, n_batch: int, chunks: int, score_from: int | None = None
) -> Plan:
    """Adjacent windows of ``n_ctx`` tokens, scored from a position on (None: the second half).

    Raises:
        EvalError: if a size is out of range or the text is shorter than two windows.

    """
    check_sizes(n_ctx, n_batch, chunks)
    _need(n_tokens, n_ctx)
    available = n_tokens // n_ctx
    n_chunks = available if chunks < 0 else min(chunks, available)
    n_seq = max(1, n_batch // n_ctx)
    first = n_ctx // 2 if score_from is None else score_from
    if not 0 <= first <= n_ctx - 2:
        raise EvalError(f"--score-from is {first}, it must be 0 to {n_ctx - 2} in {n_ctx} tokens")
    return Plan(n_ctx, n_chunks, n_ctx, first, min(n_batch, n_seq * n_ctx), n_seq)


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


def limited(plan: Plan, n_parallel: int | None) -> Plan:
    """The plan with at most ``n_parallel`` windows per pass, None for no such limit.

    Raises:
        EvalError: if the limit is out of range.

    """
    if n_parallel is None:
        return plan
    if n_parallel < 1:
        raise EvalError(f"--parallel is {n_parallel}, it must be at least 1")
    n_seq = min(plan.n_seq, n_parallel)
    return replace(plan, n_seq=n_seq, n_batch=min(plan.n_batch, n_seq * plan.n_ctx))


def _need(n_tokens: int, n_ctx: int) -> None:
    if n_tokens < 2 * n_ctx:
        raise EvalError(
            f"the text has {n_tokens} tokens, a context of {n_ctx} needs at least {2 * n_ctx}"
        )


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
