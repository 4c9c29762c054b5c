"""What llama.cpp's benchmarks do not tell: clean decode speed, share of the machine, op times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from imp_runtime.bench import samples
from imp_runtime.bench.steps import generate, read_prompts
from imp_runtime.bench.tokens import Int32, TokenSource
from imp_runtime.gguf.describe import Description
from imp_runtime.gguf.kinds import Kind
from imp_runtime.model import Model
from imp_runtime.placement import vram_in_use
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts, counter

PROFILED_STEPS = 16
EXPERT_IDS = "blk.*.expert_ids"

OpTimes = Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class Workload:
    """A row of either table, as the extra passes repeat it."""

    context: int
    """Tokens of each sequence before the generation."""
    n_gen: int
    sequences: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    reps: int
    type_k: str = "f32"
    type_v: str = "f32"


@dataclass(frozen=True)
class Vram:
    """Bytes of device memory."""

    limit: int
    planned: int
    in_use: int
    """After the steps, of all processes, CUDA's own included."""


@dataclass(frozen=True)
class Decode:
    """Speed of generation without start-up: the difference of two lengths."""

    lengths: tuple[int, int]
    seconds_per_step: float
    sequences: int
    steps: int = 0
    """That were timed, of both lengths."""
    experts: ExpertCounts | None = None
    """What the cache did in them; None = there is none."""
    vram: Vram | None = None
    """None on the CPU."""

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return samples.rate(self.sequences, self.seconds_per_step)


@dataclass(frozen=True)
class Profile:
    """One pass with a clock around every op, which slows it down; shares are what counts."""

    prompt_ops: OpTimes
    decode_ops: OpTimes
    experts_per_layer: float | None
    """Different experts that a decode step of all sequences reads, mean over layers and steps."""


def measure_decode(model: Model, work: Workload, tokens: TokenSource) -> Decode | None:
    """Generate half and all of the tokens, `reps` times each, and compare the medians.

    Returns:
        None for fewer than two tokens, or if noise makes the longer run the shorter one.

    Raises:
        ImpError: the passes do not fit into memory; they hold every sequence twice.
    """
    lengths = (work.n_gen // 2, work.n_gen)
    if lengths[0] < 1:
        return None
    text = tokens.take(work.sequences, work.context + work.n_gen)
    with (
        _session(model, work, max_seqs=2 * work.sequences, kept_seqs=work.sequences) as session,
        ExitStack() as stack,
    ):
        bases = [stack.enter_context(session.open()) for _ in range(work.sequences)]
        read_prompts(session, [s.id for s in bases], text[:, : work.context], work.n_batch)

        def seconds(n: int) -> float:
            with ExitStack() as forks:
                ids = [forks.enter_context(base.fork()).id for base in bases]
                part = text[:, work.context : work.context + n]
                begin = time.perf_counter()
                generate(session, ids, part, separate=False)
                return time.perf_counter() - begin

        seconds(1)
        experts = counter(session.expert_stats)
        times = [[seconds(n) for n in lengths] for _ in range(work.reps)]
        counts, plan = experts(), session.plan
        vram = Vram(plan.vram_limit, plan.vram_bytes, vram_in_use()) if plan else None
    short, long = (samples.median(column) for column in zip(*times, strict=True))
    step = (long - short) / (lengths[1] - lengths[0])
    if step <= 0:
        return None
    steps = work.reps * sum(lengths)
    return Decode(lengths, step, work.sequences, steps, counts, vram)


def profile(model: Model, work: Workload, tokens: TokenSource) -> Profile:
    """Run the workload once, with a few decode steps.

    Raises:
        ImpError: the pass does not fit into memory.
    """
    steps = min(work.n_gen, PROFILED_STEPS)
    text = tokens.take(work.sequences, work.context + steps)
    make = partial(_session, profile=True, taps=[EXPERT_IDS])
    with make(model, work, max_seqs=work.sequences) as session, ExitStack() as stack:
        ids = [stack.enter_context(session.open()).id for _ in range(work.sequences)]
        read_prompts(session, ids, text[:, : work.context], work.n_batch)
        prompt_ops = session.op_times()
        experts = list(_experts_per_step(session, ids, text[:, work.context :]))
        all_ops = session.op_times()
    return Profile(
        prompt_ops, _minus(all_ops, prompt_ops), float(np.mean(experts)) if experts else None
    )


def _experts_per_step(session: Session, ids: list[int], tokens: Int32) -> Iterator[float]:
    """Generates; mean over the layers of the number of different experts, per step."""
    for t in range(tokens.shape[1]):
        generate(session, ids, tokens[:, t : t + 1], separate=False)
        layers = session.core.taps().values()
        if layers:
            yield float(np.mean([len(np.unique(layer)) for layer in layers]))


def _minus(after: OpTimes, before: OpTimes) -> OpTimes:
    out = {}
    for name, (seconds, calls) in after.items():
        seconds_before, calls_before = before.get(name, (0.0, 0))
        if calls > calls_before:
            out[name] = (seconds - seconds_before, calls - calls_before)
    return out


@contextmanager
def _session(model: Model, work: Workload, **options: Any) -> Iterator[Session]:
    with Session(
        model,
        n_ctx=max(work.context + work.n_gen, 1),
        n_threads=work.n_threads,
        n_ubatch=min(work.n_ubatch, work.n_batch),
        max_outputs=work.sequences,
        cache_type_k=work.type_k,
        cache_type_v=work.type_v,
        **options,
    ) as session:
        yield session


def step_weight_bytes(about: Description, experts_per_layer: float | None) -> float:
    """Bytes of the file's weights that one decode step reads, each once.

    Not counted: look-ups of single rows (embedding, n-gram table), cache and state.

    Args:
        about: the model file.
        experts_per_layer: different experts read; None = those that one token uses.
    """
    idle = {Kind.NGRAM_TABLE, Kind.MTP, Kind.VISION, Kind.EXPERTS}
    if not about.tied:
        idle.add(Kind.EMBEDDING)
    dense = sum(group.bytes for group in about.groups if group.kind not in idle)
    if not about.experts:
        return dense
    used = about.experts_used if experts_per_layer is None else experts_per_layer
    return dense + about.expert_bytes * used / about.experts
