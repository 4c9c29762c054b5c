"""Measurements of a tiny model: the right work is timed, misfits have reasons, extras add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from imp_runtime import bench
from imp_runtime.bench import (
    BatchedCase,
    BatchedMisfit,
    BatchedOptions,
    BatchedRow,
    RandomTokens,
    Setup,
    SpeedCase,
    SpeedMisfit,
    SpeedOptions,
    SpeedRow,
    TextTokens,
    Workload,
    batched,
    extra,
    speed,
)
from imp_runtime.bench.extra_text import EXTRA_FIELDS, Extra, extra_fields, extra_lines
from imp_runtime.bench.machine import Ceiling
from imp_runtime.gguf import describe
from imp_runtime.gguf.kinds import Kind
from imp_runtime.model import Model
from imp_runtime.session import Session

Step = list[tuple[int, list[int], int]]


class Recorder:
    """Notes the steps of all sessions: (sequence, tokens, first output) of every request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: object):
        self.steps: list[Step] = []
        self.opened: list[dict[str, object]] = []
        recorder = self

        class Recording(Session):
            def __init__(self, model: Model, **options: object):
                super().__init__(model, **options)  # type: ignore[arg-type]
                recorder.opened.append(options)
                inner = self.core

                class Core:
                    def __getattr__(self, name: str) -> object:
                        return getattr(inner, name)

                    def step(self, requests: list[tuple[int, np.ndarray, int]]) -> object:
                        recorder.steps.append([(i, t.tolist(), f) for i, t, f in requests])
                        return inner.step(requests)

                self.core = Core()  # type: ignore[assignment]

        for module in modules:
            monkeypatch.setattr(module, "Session", Recording)


def tokens_of(steps: list[Step]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for step in steps:
        for sequence, tokens, _ in step:
            out.setdefault(sequence, []).extend(tokens)
    return out


TEXT = TextTokens.of([i % 300 for i in range(1000)], "count")


def run_batched(
    model: Model, *cases: BatchedCase, n_kv_max: int = 4096, **options: object
) -> list[BatchedRow | BatchedMisfit]:
    settings = BatchedOptions(n_kv_max, n_threads=1, **options)  # type: ignore[arg-type]
    return list(bench.batched_bench(model, cases, settings, TEXT))


def test_batched_steps(bench_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(monkeypatch, batched)
    (row,) = run_batched(bench_model, BatchedCase(6, 2, 3), n_batch=12, n_ubatch=8, warmup=False)
    assert isinstance(row, BatchedRow) and len(row.prompt_seconds) == 1
    assert row.t_pp > 0 and row.t_tg > 0
    # 18 prompt tokens in batches of 12 and steps of 8; logits for the last of each prompt only.
    assert [[(len(t), len(t) - f) for _, t, f in step] for step in seen.steps] == [
        [(6, 1), (2, 0)],
        [(4, 1)],
        [(6, 1)],
        [(1, 1)] * 3,
        [(1, 1)] * 3,
    ]
    a, b, c = tokens_of(seen.steps)
    assert tokens_of(seen.steps) == {
        a: list(range(8)), b: list(range(8, 16)), c: list(range(16, 24))
    }  # fmt: skip


def test_batched_separate_and_shared(bench_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(monkeypatch, batched)
    run_batched(bench_model, BatchedCase(6, 2, 3, shared=True), separate=True, warmup=False)
    first, *rest = seen.steps
    assert [len(t) for _, t, _ in first] == [6]
    assert all(len(step) == 1 and len(step[0][1]) == 1 for step in rest)
    order = [step[0][0] for step in rest]
    assert order == sorted(order) and [order.count(i) for i in sorted(set(order))] == [2, 2, 2]


def test_batched_without_prompt_or_generation(bench_model: Model) -> None:
    rows = run_batched(bench_model, BatchedCase(0, 2, 2), BatchedCase(4, 0, 2))
    assert all(isinstance(row, BatchedRow) for row in rows)
    assert rows[0].speed_pp == 0 < rows[0].speed_tg  # type: ignore[union-attr]
    assert rows[1].speed_tg == 0 < rows[1].speed_pp  # type: ignore[union-attr]


def test_more_sequences_than_a_step_holds(
    bench_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Recorder(monkeypatch, batched)
    (row,) = run_batched(bench_model, BatchedCase(2, 1, 5), n_ubatch=3, warmup=False)
    assert isinstance(row, BatchedRow)
    assert max(sum(len(t) for _, t, _ in step) for step in seen.steps) == 3
    assert [len(tokens) for tokens in tokens_of(seen.steps).values()] == [3] * 5


def test_batched_repeats(bench_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(monkeypatch, batched)
    (row,) = run_batched(bench_model, BatchedCase(4, 1, 1), reps=3)
    assert isinstance(row, BatchedRow) and len(row.generate_seconds) == 3
    assert [len(tokens) for tokens in tokens_of(seen.steps).values()] == [
        batched.WARMUP_TOKENS, 5, 5, 5
    ]  # fmt: skip


def test_n_kv_max_at_the_limit(bench_model: Model) -> None:
    fits, misfit, after = run_batched(
        bench_model, BatchedCase(8, 2, 2), BatchedCase(8, 3, 2), BatchedCase(4, 2, 1), n_kv_max=20
    )
    assert isinstance(fits, BatchedRow) and isinstance(after, BatchedRow)
    assert isinstance(misfit, BatchedMisfit) and misfit.expected
    assert misfit.reason == "22 tokens of cache, n_kv_max is 20"


def test_a_row_without_memory_has_a_reason(bench_model: Model) -> None:
    before, misfit, after = run_batched(
        bench_model,
        BatchedCase(4, 1, 1),
        BatchedCase(4, 1, 65537),
        BatchedCase(4, 1, 2),
        n_kv_max=1 << 30,
    )
    assert isinstance(before, BatchedRow) and isinstance(after, BatchedRow)
    assert isinstance(misfit, BatchedMisfit) and not misfit.expected
    assert "65537" in misfit.reason and "65536" in misfit.reason


def speed_rows(
    model: Model, cases: list[SpeedCase], **options: object
) -> list[SpeedRow | SpeedMisfit]:
    settings = SpeedOptions(**{"reps": 1, "warmup": False} | options)  # type: ignore[arg-type]
    return list(bench.speed_bench(model, cases, settings, TEXT))


def test_speed_steps(bench_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(monkeypatch, speed)
    setup = Setup(n_batch=8, n_ubatch=4)
    cases = [SpeedCase(10, 0, setup), SpeedCase(0, 2, setup), SpeedCase(5, 2, setup)]
    rows = speed_rows(bench_model, cases, reps=2)
    assert [row.case.name for row in rows] == ["pp10", "tg2", "pp5+tg2"]
    sizes = [len(tokens) for tokens in tokens_of(seen.steps).values()]
    assert sizes == [10, 10, 2, 2, 7, 7]
    assert [len(step[0][1]) for step in seen.steps[:3]] == [4, 4, 2]
    assert [o["max_seqs"] for o in seen.opened] == [1]  # one session for all
    for row in rows:
        assert isinstance(row, SpeedRow) and len(row.samples_ns) == 2 and row.avg_ts > 0
        assert row.test_time.endswith("Z") and len(row.test_time) == 20


def test_depth_is_read_once_and_not_timed(
    bench_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Recorder(monkeypatch, speed)
    setup = Setup(n_depth=9)
    rows = speed_rows(bench_model, [SpeedCase(4, 0, setup), SpeedCase(0, 3, setup)], reps=3)
    assert [row.case.name for row in rows] == ["pp4 @ d9", "tg3 @ d9"]
    assert [o["max_seqs"] for o in seen.opened] == [2]
    # The base, three forks that read a prompt, three that generate: all go on where it ended.
    base, *forks = tokens_of(seen.steps).values()
    assert base == list(range(9))
    assert forks == [list(range(9, 13))] * 3 + [list(range(9, 12))] * 3


def test_speed_warm_up_and_progress(bench_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(monkeypatch, speed)
    told: list[tuple[int, str]] = []
    case = SpeedCase(6, 4, Setup())
    list(
        bench.speed_bench(
            bench_model, [case], SpeedOptions(reps=1), TEXT, lambda i, what: told.append((i, what))
        )
    )
    assert [len(tokens) for tokens in tokens_of(seen.steps).values()] == [7, 10]
    assert told == [
        (0, "starting"),
        (0, "warmup prompt run"),
        (0, "warmup generation run"),
        (0, "prompt run 1/1"),
        (0, "generation run 1/1"),
    ]


def test_speed_misfit(bench_model: Model) -> None:
    first, misfit, last = speed_rows(
        bench_model,
        [SpeedCase(4, 0, Setup()), SpeedCase(1 << 30, 1, Setup()), SpeedCase(0, 2, Setup())],
    )
    assert isinstance(first, SpeedRow) and isinstance(last, SpeedRow)
    assert isinstance(misfit, SpeedMisfit) and str(2**30 + 1) in misfit.reason


def test_batches_of_one_token(bench_model: Model) -> None:
    (row,) = speed_rows(bench_model, [SpeedCase(3, 1, Setup(n_batch=1, n_ubatch=512))])
    assert isinstance(row, SpeedRow)


# ---------------------------------------------------------------- extras
WORK = Workload(context=6, n_gen=8, sequences=2, n_batch=2048, n_ubatch=512, n_threads=1, reps=2)


def test_decode_by_difference(bench_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(monkeypatch, extra)
    times = iter([0.0, 9.0, 0.0, 5.0, 0.0, 7.0, 0.0, 4.0, 0.0, 8.0])  # begin, end of every run
    monkeypatch.setattr(extra.time, "perf_counter", lambda: next(times))
    decode = bench.measure_decode(bench_model, WORK, TEXT)
    assert decode is not None and decode.lengths == (4, 8)
    assert decode.seconds_per_step == pytest.approx((7.5 - 4.5) / 4)
    assert decode.tokens_per_second == pytest.approx(2 / 0.75)
    sizes = [len(tokens) for tokens in tokens_of(seen.steps).values()]
    assert sizes == [6] * 2 + [1] * 2 + ([4] * 2 + [8] * 2) * 2


def test_decode_by_difference_needs_two_tokens_and_less_noise(
    bench_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Workload(**vars(WORK) | {"n_gen": 1})
    assert bench.measure_decode(bench_model, short, TEXT) is None
    times = iter([0.0, 1.0] * 5)
    monkeypatch.setattr(extra.time, "perf_counter", lambda: next(times))
    assert bench.measure_decode(bench_model, WORK, TEXT) is None


def test_profile_counts_ops_and_experts(bench_model: Model, bench_gguf: Path) -> None:
    about = describe(bench_gguf)
    # Two sequences of equal tokens choose the same experts; of different ones more.
    equal = TextTokens.of([7], "sevens")
    same = bench.profile(bench_model, WORK, equal)
    assert same.experts_per_layer == about.experts_used
    random = bench.profile(bench_model, WORK, RandomTokens(bench_model.vocab_size))
    assert random.experts_per_layer is not None
    assert about.experts_used < random.experts_per_layer <= 2 * about.experts_used
    assert set(same.prompt_ops) and set(same.decode_ops)
    calls = {name: n for name, (_, n) in same.prompt_ops.items()}
    for name, (seconds, n) in same.decode_ops.items():
        assert seconds > 0 and n == 8 * calls[name], name  # one prompt step, eight decode steps


def test_weight_bytes(bench_gguf: Path) -> None:
    about = describe(bench_gguf)
    by_kind: dict[Kind, int] = {}
    for tensor in about.tensors:
        by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.bytes
    assert not about.tied
    rows = {Kind.EMBEDDING, Kind.NGRAM_TABLE, Kind.MTP, Kind.VISION, Kind.EXPERTS}
    dense = sum(n for kind, n in by_kind.items() if kind not in rows)
    experts = by_kind[Kind.EXPERTS]
    assert extra.step_weight_bytes(about, about.experts) == dense + experts
    one = extra.step_weight_bytes(about, None)
    assert one == pytest.approx(dense + experts * about.experts_used / about.experts)


def test_extra_fields_add_up(bench_gguf: Path) -> None:
    about = describe(bench_gguf)
    everything = about.experts
    measured = Extra(
        "random (seed 0)",
        {"generation": (4.0, 8.0, 5.0)},
        prompt_ts=100.0,
        decode=bench.Decode((4, 8), 0.5, 2),
        profile=bench.Profile({"A": (1.0, 2)}, {"B": (3.0, 4), "C": (1.0, 1)}, everything),
        ceiling=Ceiling(1, 2.0, 1 << 20, 50.0),
        peak_rss_bytes=3_000_000_000,
    )
    fields = extra_fields(measured, about)
    assert list(fields) == list(EXTRA_FIELDS)
    n_bytes = extra.step_weight_bytes(about, everything)
    assert fields["decode_gb_per_s"] == pytest.approx(n_bytes / 0.5 / 1e9)
    assert fields["decode_share"] == pytest.approx(n_bytes / 0.5 / 1e9 / 2.0)
    assert fields["prompt_gflop_per_s"] == pytest.approx(200 * about.active_parameters / 1e9)
    assert fields["prompt_share"] == pytest.approx(fields["prompt_gflop_per_s"] / 50)
    assert fields["speeds"] == {"generation": {"median": 5.0, "min": 4.0, "max": 8.0}}
    assert (fields["routing"], fields["hit_rate"]) == ("model", None)
    text = "\n".join(extra_lines("row", measured, about))
    for words in (
        "tokens: random (seed 0)",
        "generation: median 5.00 t/s, 4.00 to 8.00 in 3 runs",
        "decode, 8 less 4 tokens: 4.00 t/s, 500.00 ms per step",
        "routing: model",
        "decode ops: B 75.0 %, C 25.0 %",
        "3.00 GB",
    ):
        assert words in text


def test_extra_without_ceiling_or_decode(bench_gguf: Path) -> None:
    about = describe(bench_gguf)
    measured = Extra("t", {"speed": (1.0,)}, 10.0, None, None, None, 1, "why")
    fields = extra_fields(measured, about)
    missing = {name for name, value in fields.items() if value is None}
    assert missing == {
        "decode_lengths", "decode_ts", "decode_weight_bytes", "decode_gb_per_s", "decode_share",
        "prompt_share", "ceiling_gb_per_s", "ceiling_gflop_per_s", "experts_per_layer",
        "hit_rate", "expert_slots", "misses_per_step", "miss_bytes_per_step", "miss_ms_per_step",
        "vram_limit_bytes",
        "vram_planned_bytes", "vram_used_bytes", "prompt_ops", "decode_ops",
    }  # fmt: skip
    assert extra_lines("row", measured, about)[-1] == "  note: why"
