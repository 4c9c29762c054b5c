"""Log-softmax arithmetic over whole rows of logits, in the precisions llama.cpp uses."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from imp_runtime import _core

from .contracts import Float32, Float64, Int32

# Rows handled at once are limited to this many logits, so that temporaries stay in cache-sized
# blocks whatever the vocabulary.
BLOCK_LOGITS = 1 << 18


def blocks(n_rows: int, n_vocab: int) -> Iterator[slice]:
    """Consecutive slices of rows, each of at most ``BLOCK_LOGITS`` logits (one row at least)."""
    step = max(1, BLOCK_LOGITS // max(1, n_vocab))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def for_each_block(
    n_rows: int, n_vocab: int, n_threads: int, work: Callable[[slice], None]
) -> None:
    """Run ``work`` on every block of rows, on up to ``n_threads`` threads.

    Blocks write disjoint rows, so the result does not depend on the number of threads.
    """
    parts = list(blocks(n_rows, n_vocab))
    if n_threads <= 1 or len(parts) <= 1:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(min(n_threads, len(parts))) as pool:
        for future in [pool.submit(work, part) for part in parts]:
            future.result()


def first_non_finite_row(logits: Float32) -> int | None:
    """Index of the first row of float32 [n, n_vocab] that holds a NaN or an infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = logits.sum(axis=1, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(sums))
    return int(bad[0]) if bad.size else None


def row_max_and_sum_exp(logits: Float32) -> tuple[Float32, Float64]:
    """Per row of float32 [n, n_vocab]: the maximum, and sum exp(x - max) in float64.

    The differences and their exponentials are float32, as in llama.cpp.
    """
    top = logits.max(axis=1)
    shifted = logits - top[:, None]
    return top, np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64)


def token_nll(logits: Float32, targets: Int32, n_threads: int = 1) -> Float64:
    """-log softmax(logits)[target] per row, float64 [n], of logits float32 [n, n_vocab].

    Raises:
        ImpError: if a logit is not finite or a target lies outside the vocabulary.

    """
    nll: Float64 = _core.token_nll(logits, targets, n_threads)
    return nll


def exp_or_inf(value: float) -> float:
    """exp(value), infinite where float64 ends."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
