"""KL divergence of a model from a stored run, with llama-perplexity's definitions."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .contracts import Float32, Float64, Int32, SessionLike
from .errors import EvalError
from .kld import KldBase, KldRows
from .kld_stats import KldTotals, Tally
from .numerics import for_each_block, row_max_and_sum_exp
from .perplexity import cut
from .windows import Plan, check_sizes, run_window

# Base probabilities below exp(-16) are outside what the file stores and do not count.
MIN_LOG_PROB = np.float32(-16)


@dataclass(frozen=True)
class KldOptions:
    """How to evaluate.

    Attributes:
        n_ctx: largest window allowed; the base's own window is used.
        n_batch: tokens handed to the session at once; windows per pass = n_batch / n_ctx.
        bos_id: replaces the first token of each window, None if the model adds no BOS.
        n_threads: threads for the arithmetic on the logits.

    """

    n_ctx: int = 512
    n_batch: int = 2048
    bos_id: int | None = None
    n_threads: int = 1


@dataclass(frozen=True)
class KldWindow:
    """State of the run after one window.

    Attributes:
        index: which window, from 0.
        totals: statistics of everything scored so far.
        seconds: time this window took.

    """

    index: int
    totals: KldTotals
    seconds: float


@dataclass(frozen=True)
class KldResult:
    """Outcome of a run.

    Attributes:
        totals: means and their uncertainties.
        kld: float32 [n], divergence of each scored position in nats, in order.
        p_diff: float32 [n], probability of the actual token minus the base's.
        n_tokens: tokens evaluated.
        seconds: time of the evaluation.
        logits_sha256: hash of the last scored row of logits.

    """

    totals: KldTotals
    kld: Float32 = field(repr=False)
    p_diff: Float32 = field(repr=False)
    n_tokens: int
    seconds: float
    logits_sha256: str


@dataclass(frozen=True)
class RowScores:
    """Scores of n rows against their base rows."""

    nll: Float32  # [n] -log p of the actual token
    nll_base: Float32  # [n] the same in the base
    kld: Float64  # [n] nats
    same_top: npt.NDArray[np.bool_]  # [n] both put the same token first


def plan_kld(base: KldBase, n_vocab: int, options: KldOptions) -> Plan:
    """The windows of the base, for a model with ``n_vocab`` entries.

    Raises:
        EvalError: if the context is too small or the vocabularies differ.

    """
    check_sizes(options.n_ctx, options.n_batch, -1)
    if base.n_ctx > options.n_ctx:
        raise EvalError(
            f"{base.path} was computed with a context of {base.n_ctx}, "
            f"here it is {options.n_ctx}: raise it with -c"
        )
    if base.n_vocab != n_vocab:
        raise EvalError(
            f"{base.path} has a vocabulary of {base.n_vocab} entries, the model has {n_vocab}"
        )
    n_seq = max(1, options.n_batch // base.n_ctx)
    n_batch = min(options.n_batch, n_seq * base.n_ctx)
    return Plan(base.n_ctx, base.n_chunks, base.n_ctx, base.n_ctx // 2, n_batch, n_seq)


def kl_divergence(
    session: SessionLike,
    base: KldBase,
    options: KldOptions = KldOptions(),
    on_window: Callable[[KldWindow], None] | None = None,
) -> KldResult:
    """Evaluate the base's text and compare every scored position; ``on_window`` after each window.

    Raises:
        EvalError: if the base does not fit the model or the context, holds damaged rows, the
            evaluation fails or a logit is not finite.

    """
    plan = plan_kld(base, session.model.vocab_size, options)
    text = base.tokens.reshape(-1)
    tally = Tally()
    klds: list[Float32] = []
    p_diffs: list[Float32] = []
    digest = ""
    began = time.perf_counter()
    for index, start, window in cut(text, plan, options.bos_id):
        window_began = time.perf_counter()
        for position, logits in run_window(session, window, plan, index):
            stored = base.rows(index, position - plan.first, len(logits))
            targets = text[start + position + 1 : start + position + 1 + len(logits)]
            scores = compare_rows(logits, stored, targets, options.n_threads)
            p_diff = np.exp(-scores.nll) - np.exp(-scores.nll_base)
            tally.add(scores.nll, scores.nll_base, scores.kld, p_diff, scores.same_top)
            klds.append(scores.kld.astype(np.float32))
            p_diffs.append(p_diff)
            if index == plan.n_chunks - 1:
                digest = hashlib.sha256(logits[-1].tobytes()).hexdigest()
        if on_window is not None:
            seconds = time.perf_counter() - window_began
            on_window(KldWindow(index, tally.totals(), seconds))
    return KldResult(
        totals=tally.totals(),
        kld=np.concatenate(klds),
        p_diff=np.concatenate(p_diffs),
        n_tokens=plan.n_chunks * plan.n_ctx,
        seconds=time.perf_counter() - began,
        logits_sha256=digest,
    )


def compare_rows(logits: Float32, base: KldRows, targets: Int32, n_threads: int = 1) -> RowScores:
    """Score logits float32 [n, n_vocab] and base rows on the actual tokens int32 [n].

    KL = sum p_base (log p_base - log p) over entries with log p_base > -16; float32 terms, float64
    sum. A row's first maximum is its top token.
    """
    n_rows, n_vocab = logits.shape
    out = RowScores(
        np.empty(n_rows, np.float32),
        np.empty(n_rows, np.float32),
        np.empty(n_rows, np.float64),
        np.empty(n_rows, np.bool_),
    )

    def work(rows: slice) -> None:
        part, q, picked = logits[rows], base.q[rows], targets[rows, None]
        top, sum_exp = row_max_and_sum_exp(part)
        normaliser = top + np.log(sum_exp).astype(np.float32)
        log_base = base.scale[rows, None] * q + base.min_log_prob[rows, None]
        out.nll[rows] = normaliser - np.take_along_axis(part, picked, axis=1)[:, 0]
        out.nll_base[rows] = -np.take_along_axis(log_base, picked, axis=1)[:, 0]
        out.same_top[rows] = part.argmax(axis=1) == log_base.argmax(axis=1)
        terms = log_base - part
        terms += normaliser[:, None]
        counted = log_base > MIN_LOG_PROB
        terms *= np.exp(log_base, out=log_base)
        terms *= counted
        out.kld[rows] = terms.sum(axis=1, dtype=np.float64)

    for_each_block(n_rows, n_vocab, n_threads, work)
    return out
