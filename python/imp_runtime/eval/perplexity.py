"""Perplexity of a text, window by window, with llama-perplexity's definitions."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .contracts import Float64, Int32, SessionLike
from .dump import write_dump
from .errors import EvalError
from .kld import KldWriter, write_kld
from .numerics import exp_or_inf, token_nll
from .passes import run_windows
from .windows import Plan, check_tokens, limited, plan_strided, plan_windows


@dataclass(frozen=True)
class PerplexityOptions:
    """What to evaluate and how.

    Attributes:
        n_ctx: tokens per window.
        n_batch: tokens per pass, so windows per pass = n_batch / n_ctx, at least 1. Steps are
            filled with the windows of a pass, which changes no result on the CPU.
        n_parallel: windows per pass at most, None for no limit but n_batch.
        chunks: windows at most; negative for all.
        stride: 0 for adjacent windows, else tokens from one window's start to the next.
        bos_id: replaces the first token of each window, None if the model adds no BOS.
            Strided windows keep their token, as in llama-perplexity.
        save_logits: file for the log-probabilities (see `kld`), adjacent windows only.
        score_from: first position of a window whose logits are scored, None for half of n_ctx;
            adjacent windows only, and not with save_logits.
        dump: file for the score of every position (see `dump`).
        n_threads: threads for the arithmetic on the logits.

    """

    n_ctx: int = 512
    n_batch: int = 2048
    n_parallel: int | None = None
    chunks: int = -1
    stride: int = 0
    bos_id: int | None = None
    save_logits: Path | None = None
    score_from: int | None = None
    dump: Path | None = None
    n_threads: int = 1

    def plan(self, n_tokens: int) -> Plan:
        """The windows of a text of ``n_tokens``.

        Raises:
            EvalError: if a size is out of range or the text is too short.

        """
        if self.stride < 0:
            raise EvalError(f"--ppl-stride is {self.stride}, it must be 0 or more")
        if self.stride and self.save_logits is not None:
            raise EvalError("--ppl-stride and --kl-divergence-base cannot be combined")
        if self.score_from is not None and (self.stride or self.save_logits is not None):
            other = "--ppl-stride" if self.stride else "--kl-divergence-base"
            raise EvalError(f"--score-from and {other} cannot be combined")
        if self.dump is not None and self.dump == self.save_logits:
            raise EvalError(f"--dump and --kl-divergence-base are both {self.dump}")
        if self.stride:
            return plan_strided(n_tokens, self.n_ctx, self.n_batch, self.chunks, self.stride)
        plan = plan_windows(n_tokens, self.n_ctx, self.n_batch, self.chunks, self.score_from)
        return limited(plan, self.n_parallel)


@dataclass(frozen=True)
class Window:
    """State of the run after one window.

    Attributes:
        index: which window, from 0.
        start: index of its first token in the text.
        ppl: perplexity of everything scored so far.
        mean_nll, uncertainty: mean negative log-likelihood so far in nats, its standard error.
        seconds: time this window took.

    """

    index: int
    start: int
    ppl: float
    mean_nll: float
    uncertainty: float
    seconds: float


@dataclass(frozen=True)
class PerplexityResult:
    """Outcome of a run.

    Attributes:
        ppl: exp of the mean negative log-likelihood.
        uncertainty: standard error of ``ppl``; NaN if only one token was scored.
        nll: float64 [n_scored], negative log-likelihood of each scored token, in order.
        windows: the state after each window.
        n_tokens: tokens evaluated.
        seconds: time of the evaluation.
        logits_sha256: hash of the last scored row of logits: equal runs print equal hashes.

    """

    ppl: float
    uncertainty: float
    nll: Float64
    windows: list[Window] = field(repr=False)
    n_tokens: int
    seconds: float
    logits_sha256: str


class RunningMean:
    """Mean negative log-likelihood so far, accumulated in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.total_of_squares = 0.0

    def add(self, nll: Float64) -> None:
        """Take in float64 [n]."""
        self.count += len(nll)
        self.total += float(nll.sum())
        self.total_of_squares += float(nll @ nll)

    @property
    def mean(self) -> float:
        """The mean, in nats."""
        return self.total / self.count

    @property
    def uncertainty(self) -> float:
        """Standard error of the mean; NaN for one value."""
        if self.count < 2:
            return math.nan
        variance = self.total_of_squares / self.count - self.mean**2
        return math.sqrt(max(variance, 0.0) / (self.count - 1))


def perplexity(
    session: SessionLike,
    tokens: Sequence[int] | Int32,
    options: PerplexityOptions = PerplexityOptions(),
    on_window: Callable[[Window], None] | None = None,
) -> PerplexityResult:
    """Score ``tokens`` int32 [n] in windows; ``on_window`` is called after each.

    Raises:
        EvalError: if the text is too short, a size is out of range, a token lies outside the
            vocabulary, the evaluation fails or a logit is not finite.
        OSError: if ``options.save_logits`` or ``options.dump`` cannot be written.

    """
    text = np.ascontiguousarray(tokens, np.int32)
    n_vocab = session.model.vocab_size
    check_tokens(text, n_vocab)
    plan = options.plan(len(text))
    running = RunningMean()
    nlls: list[Float64] = []
    windows: list[Window] = []
    digest = ""
    began = time.perf_counter()
    with ExitStack() as stack:
        writer = _open_writer(stack, options, plan, text, n_vocab)
        dump = None
        if options.dump is not None:
            dump = stack.enter_context(write_dump(options.dump, text, plan, options.n_threads))
        bos_id = options.bos_id if not options.stride else None
        window_began = began
        parts: list[Float64] = []
        for index, position, logits in run_windows(session, text, plan, bos_id):
            start = index * plan.step
            targets = text[start + position + 1 : start + position + 1 + len(logits)]
            nll = token_nll(logits, targets, options.n_threads)
            parts.append(nll)
            if writer is not None:
                writer.write(logits)
            if dump is not None:
                dump.add(index, position, logits, targets, nll)
            if index == plan.n_chunks - 1:
                digest = hashlib.sha256(logits[-1].tobytes()).hexdigest()
            if position + len(logits) < plan.n_ctx - 1:
                continue  # the window goes on in the next step
            nlls.append(np.concatenate(parts))
            running.add(nlls[-1])
            parts.clear()
            mean = running.mean
            now = time.perf_counter()
            seconds, window_began = now - window_began, now
            windows.append(
                Window(index, start, exp_or_inf(mean), mean, running.uncertainty, seconds)
            )
            if on_window is not None:
                on_window(windows[-1])
    ppl = exp_or_inf(running.mean)
    return PerplexityResult(
        ppl=ppl,
        uncertainty=ppl * running.uncertainty,
        nll=np.concatenate(nlls),
        windows=windows,
        n_tokens=plan.n_chunks * plan.n_ctx,
        seconds=time.perf_counter() - began,
        logits_sha256=digest,
    )


def _open_writer(
    stack: ExitStack, options: PerplexityOptions, plan: Plan, text: Int32, n_vocab: int
) -> KldWriter | None:
    if options.save_logits is None:
        return None
    kept = text[: plan.n_chunks * plan.n_ctx].reshape(plan.n_chunks, plan.n_ctx)
    return stack.enter_context(write_kld(options.save_logits, kept, n_vocab, options.n_threads))
