"""Prompts and generation of several sequences at once: llama-batched-bench's measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from imp_runtime.bench import samples
from imp_runtime.bench.sessions import Need, Sessions
from imp_runtime.bench.steps import generate, read_prompts
from imp_runtime.bench.tokens import Int32, TokenSource
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts, counter

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class BatchedCase:
    """One row of the table."""

    pp: int
    """Prompt tokens per sequence."""
    tg: int
    """Generated tokens per sequence."""
    pl: int
    """Sequences."""
    shared: bool = False
    """One prompt for all sequences."""
    unified: bool = False
    """Count a shared prompt once in n_kv, as one cache for all sequences would hold it."""

    @property
    def name(self) -> str:
        """Short name for messages."""
        return f"pp {self.pp}, tg {self.tg}, B {self.pl}"

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are really read."""
        return self.pp if self.shared else self.pl * self.pp

    @property
    def n_kv(self) -> int:
        """Tokens that the cache holds at the end."""
        return (self.pp if self.shared and self.unified else self.pl * self.pp) + self.pl * self.tg


@dataclass(frozen=True)
class BatchedOptions:
    """Settings of a run."""

    n_kv_max: int
    """Rows with more cached tokens are left out."""
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    separate: bool = False
    """Generate sequence after sequence."""
    reps: int = 1
    warmup: bool = True
    type_k: str = "f32"
    """How the cache stores keys."""
    type_v: str = "f32"


@dataclass(frozen=True)
class BatchedRow:
    """Measured times of a case, in seconds, one per repetition."""

    case: BatchedCase
    prompt_seconds: tuple[float, ...]
    generate_seconds: tuple[float, ...]
    experts: ExpertCounts | None = None
    """What the cache of experts did in all repetitions; None = there is none."""

    @property
    def t_pp(self) -> float:
        """Median time of the prompts."""
        return samples.median(self.prompt_seconds)

    @property
    def t_tg(self) -> float:
        """Median time of the generation."""
        return samples.median(self.generate_seconds)

    @property
    def t(self) -> float:
        """Both."""
        return self.t_pp + self.t_tg

    @property
    def speed_pp(self) -> float:
        """Prompt tokens per second."""
        return samples.rate(self.case.prompt_tokens, self.t_pp)

    @property
    def speed_tg(self) -> float:
        """Generated tokens per second, of all sequences."""
        return samples.rate(self.case.pl * self.case.tg, self.t_tg)

    @property
    def speed(self) -> float:
        """All tokens per second."""
        return samples.rate(self.case.prompt_tokens + self.case.pl * self.case.tg, self.t)


@dataclass(frozen=True)
class BatchedMisfit:
    """A case that was not measured."""

    case: BatchedCase
    reason: str
    expected: bool = False
    """It asks for more than n_kv_max; nothing went wrong."""


def need(case: BatchedCase) -> Need:
    """What a case asks of a session."""
    return Need(max(case.pp + case.tg, WARMUP_TOKENS), case.pl)


def _open(model: Model, options: BatchedOptions, tokens: TokenSource, need: Need) -> Session:
    """A warm session. Raises ImpError if memory is short."""
    session = Session(
        model,
        n_ctx=need.n_ctx,
        max_seqs=need.max_seqs,
        n_threads=options.n_threads,
        n_ubatch=min(options.n_ubatch, options.n_batch),
        max_outputs=need.max_seqs,
        cache_type_k=options.type_k,
        cache_type_v=options.type_v,
    )
    if options.warmup:
        with session.open() as seq:
            read_prompts(session, [seq.id], tokens.take(1, WARMUP_TOKENS), options.n_batch)
    return session


def batched_bench(
    model: Model, cases: Sequence[BatchedCase], options: BatchedOptions, tokens: TokenSource
) -> Iterator[BatchedRow | BatchedMisfit]:
    """Measure cases one after the other, in order.

    Args:
        model: what runs.
        cases: rows of the table.
        options: settings of all of them.
        tokens: what is read and "generated": nothing is sampled.

    Yields:
        A row for every case, or why there is none.
    """
    fitting = [case for case in cases if case.n_kv <= options.n_kv_max]
    with Sessions(partial(_open, model, options, tokens), [need(c) for c in fitting]) as sessions:
        for case in cases:
            if case.n_kv > options.n_kv_max:
                reason = f"{case.n_kv} tokens of cache, n_kv_max is {options.n_kv_max}"
                yield BatchedMisfit(case, reason, expected=True)
                continue
            try:
                row = _measure(sessions.get(need(case)), case, options, tokens)
            except (ImpError, MemoryError) as error:
                yield BatchedMisfit(case, str(error) or "out of memory")
            else:
                yield row


def _measure(
    session: Session, case: BatchedCase, options: BatchedOptions, tokens: TokenSource
) -> BatchedRow:
    text = tokens.take(case.pl, case.pp + case.tg)
    experts = counter(session.expert_stats)
    times = [
        run_once(session, case, text, options.n_batch, options.separate)
        for _ in range(options.reps)
    ]
    prompts, generations = zip(*times, strict=True)
    return BatchedRow(case, prompts, generations, experts())


def run_once(
    session: Session, case: BatchedCase, text: Int32, n_batch: int, separate: bool
) -> tuple[float, float]:
    """Seconds of the prompts and of the generation.

    Args:
        session: with room for the case.
        case: what to run.
        text: int32 [pl, pp + tg].
        n_batch: tokens of a logical batch.
        separate: generate sequence after sequence.
    """
    with ExitStack() as stack:
        n_prompts = 1 if case.shared else case.pl
        seqs = [stack.enter_context(session.open()) for _ in range(n_prompts)]
        begin = time.perf_counter()
        read_prompts(session, [s.id for s in seqs], text[:n_prompts, : case.pp], n_batch)
        prompt_seconds = time.perf_counter() - begin
        seqs += [stack.enter_context(seqs[0].fork()) for _ in range(case.pl - n_prompts)]
        ids = [s.id for s in seqs]
        begin = time.perf_counter()
        generate(session, ids, text[:, case.pp :], separate=separate)
        generate_seconds = time.perf_counter() - begin
    return prompt_seconds, generate_seconds
