"""KL divergence of a model from a stored run, with llama-perplexity's definitions."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .contracts import Float32, Float64, Int32, SessionLike
from .errors import EvalError
from .kld import KldBase, KldRows
from .kld_stats import KldTotals, Tally
from .numerics import for_each_block, row_max_and_sum_exp
from .passes import run_windows
from .windows import Plan, check_sizes, limited

# Base probabilities below exp(-16) are outside what the file stores and do not count.
MIN_LOG_PROB = np.float32(-16)


@dataclass(frozen=True)
class KldOptions:
    """How to evaluate.

    Attributes:
        n_ctx: largest window allowed; the base's own window is used.
        n_batch: tokens per pass, so windows per pass = n_batch / n_ctx, at least 1. Steps are
            filled with the windows of a pass, which changes no result on the CPU.
        n_parallel: windows per pass at most, None for no limit but n_batch.
        bos_id: replaces the first token of each window, None if the model adds no BOS.
        n_threads: threads for the arithmetic on the logits.

    """

    n_ctx: int = 512
    n_batch: int = 2048
    n_parallel: int | None = None
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

    @classmethod
    def of(cls, parts: "Sequence[RowScores]") -> "RowScores":
        """The rows of all parts, in order."""
        return cls(
            np.concatenate([p.nll for p in parts]),
            np.concatenate([p.nll_base for p in parts]),
            np.concatenate([p.kld for p in parts]),
            np.concatenate([p.same_top for p in parts]),
        )


def plan_kld(base: KldBase, options: KldOptions) -> Plan:
    """The windows of the base.

    Raises:
        EvalError: if the context is too small or an option is out of range.

    """
    check_sizes(options.n_ctx, options.n_batch, -1)
    if base.n_ctx > options.n_ctx:
        raise EvalError(
            f"{base.path} was computed with a context of {base.n_ctx}, "
            f"here it is {options.n_ctx}: raise it with -c"
        )
    n_seq = max(1, options.n_batch // base.n_ctx)
    n_batch = min(options.n_batch, n_seq * base.n_ctx)
    plan = Plan(base.n_ctx, base.n_chunks, base.n_ctx, base.n_ctx // 2, n_batch, n_seq)
    return limited(plan, options.n_parallel)


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
    plan, n_vocab = plan_kld(base, options), session.model.vocab_size
    if base.n_vocab != n_vocab:
        raise EvalError(
            f"{base.path} has a vocabulary of {base.n_vocab} entries, the model has {n_vocab}"
        )
    text = base.tokens.reshape(-1)
    tally = Tally()
    klds: list[Float32] = []
    p_diffs: list[Float32] = []
    digest = ""
    began = window_began = time.perf_counter()
    parts: list[RowScores] = []
    for index, position, logits in run_windows(session, text, plan, options.bos_id):
        start = index * plan.step
        stored = base.rows(index, position - plan.first, len(logits))
        targets = text[start + position + 1 : start + position + 1 + len(logits)]
        parts.append(compare_rows(logits, stored, targets, options.n_threads))
        if index == plan.n_chunks - 1:
            digest = hashlib.sha256(logits[-1].tobytes()).hexdigest()
        if position + len(logits) < plan.n_ctx - 1:
            continue  # the window goes on in the next step
        scores = RowScores.of(parts)
        parts.clear()
        p_diff = np.exp(-scores.nll) - np.exp(-scores.nll_base)
        tally.add(scores.nll, scores.nll_base, scores.kld, p_diff, scores.same_top)
        klds.append(scores.kld.astype(np.float32))
        p_diffs.append(p_diff)
        now = time.perf_counter()
        seconds, window_began = now - window_began, now
        if on_window is not None:
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
