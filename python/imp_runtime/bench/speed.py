"""One sequence: a prompt, a generation, or both at a depth: llama-bench's measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from imp_runtime.bench import samples
from imp_runtime.bench.sessions import Need, Sessions
from imp_runtime.bench.steps import generate, read_prompts
from imp_runtime.bench.tokens import Int32, TokenSource
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Sequence as Tokens
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts, counter

NS = 1_000_000_000


@dataclass(frozen=True)
class Setup:
    """What cases that share a session have in common."""

    n_depth: int = 0
    """Tokens read before the measurement."""
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    type_k: str = "f32"
    """How the cache stores keys."""
    type_v: str = "f32"


@dataclass(frozen=True)
class SpeedCase:
    """One row of the table."""

    n_prompt: int
    n_gen: int
    setup: Setup

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, tg128 @ d1024."""
        if self.n_prompt and not self.n_gen:
            name = f"pp{self.n_prompt}"
        elif self.n_gen and not self.n_prompt:
            name = f"tg{self.n_gen}"
        else:
            name = f"pp{self.n_prompt}+tg{self.n_gen}"
        return f"{name} @ d{self.setup.n_depth}" if self.setup.n_depth else name

    @property
    def need(self) -> Need:
        """What it asks of a session; the depth is read once and forked for every repetition."""
        total = self.n_prompt + self.n_gen + self.setup.n_depth
        return Need(max(total, 1), 2 if self.setup.n_depth else 1)


@dataclass(frozen=True)
class SpeedRow:
    """Measured times of a case."""

    case: SpeedCase
    test_time: str
    """UTC, as 2026-01-31T12:00:00Z."""
    samples_ns: tuple[int, ...]
    experts: ExpertCounts | None = None
    """What the cache of experts did in all repetitions; None = there is none."""

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        count = self.case.n_prompt + self.case.n_gen
        return tuple(samples.rate(count, ns / NS) for ns in self.samples_ns)

    @property
    def avg_ns(self) -> int:
        """Mean time."""
        return int(samples.mean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        """Sample standard deviation of the time."""
        return int(samples.deviation(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        """Mean of the tokens per second."""
        return samples.mean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        """Sample standard deviation of the tokens per second."""
        return samples.deviation(self.samples_ts)


@dataclass(frozen=True)
class SpeedMisfit:
    """A case that was not measured."""

    case: SpeedCase
    reason: str


@dataclass(frozen=True)
class SpeedOptions:
    """Settings of a run."""

    reps: int = 5
    warmup: bool = True
    delay: int = 0
    """Seconds before each case."""


def speed_bench(
    model: Model,
    cases: Sequence[SpeedCase],
    options: SpeedOptions,
    tokens: TokenSource,
    on_progress: Callable[[int, str], None] = lambda index, what: None,
) -> Iterator[SpeedRow | SpeedMisfit]:
    """Measure cases one after the other, in order.

    Args:
        model: what runs.
        cases: rows of the table.
        options: settings of all of them.
        tokens: what is read and "generated": nothing is sampled.
        on_progress: called with (index of the case, what begins).

    Yields:
        A row for every case, or why there is none.
    """
    index = 0
    for setup, equal in groupby(cases, lambda case: case.setup):
        group = list(equal)
        with Sessions(partial(_open, model, setup), [c.need for c in group]) as sessions:
            depth = _Depth(setup, tokens)
            for case in group:
                on_progress(index, "starting")
                if options.delay:
                    time.sleep(options.delay)
                try:
                    run = _Run(sessions.get(case.need), case, depth, tokens)
                    row = run.measure(options, partial(on_progress, index))
                except (ImpError, MemoryError) as error:
                    yield SpeedMisfit(case, str(error) or "out of memory")
                else:
                    yield row
                index += 1


def _open(model: Model, setup: Setup, need: Need) -> Session:
    return Session(
        model,
        n_ctx=need.n_ctx,
        max_seqs=need.max_seqs,
        n_threads=setup.n_threads,
        n_ubatch=min(setup.n_ubatch, setup.n_batch),
        max_outputs=need.max_seqs,
        cache_type_k=setup.type_k,
        cache_type_v=setup.type_v,
    )


class _Depth:
    """The sequence that repetitions at a depth fork from, read once per session."""

    def __init__(self, setup: Setup, tokens: TokenSource):
        self._setup, self._tokens = setup, tokens
        self._session: Session | None = None
        self._sequence: Tokens | None = None

    def start(self, session: Session, progress: Callable[[str], None]) -> Tokens:
        """A sequence of n_depth tokens."""
        if not self._setup.n_depth:
            return session.open()
        if self._sequence is None or self._session is not session:
            progress("depth run")
            sequence = session.open()
            text = self._tokens.take(1, self._setup.n_depth)
            try:
                read_prompts(session, [sequence.id], text, self._setup.n_batch)
            except ImpError:
                sequence.close()
                raise
            self._session, self._sequence = session, sequence
        return self._sequence.fork()


class _Run:
    def __init__(self, session: Session, case: SpeedCase, depth: _Depth, tokens: TokenSource):
        self._session, self._case, self._depth = session, case, depth
        text = tokens.take(1, case.setup.n_depth + case.n_prompt + case.n_gen)
        text = text[:, case.setup.n_depth :]
        self._prompt: Int32 = text[:, : case.n_prompt]
        self._generated: Int32 = text[:, case.n_prompt :]

    def measure(self, options: SpeedOptions, progress: Callable[[str], None]) -> SpeedRow:
        if options.warmup:
            self._warm_up(progress)
        test_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        times: list[int] = []
        self._depth.start(self._session, progress).close()  # its run is not counted
        experts = counter(self._session.expert_stats)
        for i in range(options.reps):
            with self._depth.start(self._session, progress) as seq:
                begin = time.perf_counter_ns()
                if self._case.n_prompt:
                    progress(f"prompt run {i + 1}/{options.reps}")
                    self._read(seq)
                if self._case.n_gen:
                    progress(f"generation run {i + 1}/{options.reps}")
                    generate(self._session, [seq.id], self._generated, separate=False)
                times.append(time.perf_counter_ns() - begin)
        return SpeedRow(self._case, test_time, tuple(times), experts())

    def _read(self, seq: Tokens) -> None:
        read_prompts(self._session, [seq.id], self._prompt, self._case.setup.n_batch)

    def _warm_up(self, progress: Callable[[str], None]) -> None:
        with self._session.open() as seq:
            if self._case.n_prompt:
                progress("warmup prompt run")
                self._read(seq)
            if self._case.n_gen:
                progress("warmup generation run")
                generate(self._session, [seq.id], self._generated[:, :1], separate=False)
