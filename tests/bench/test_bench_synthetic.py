"""Benchmarks of random weights: named, with planted routing, refused where they make no sense."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from imp_runtime import trace
from imp_runtime.bench import Decode
from imp_runtime.bench.extra import Vram
from imp_runtime.bench.extra_text import Extra, extra_fields, extra_lines
from imp_runtime.cli.bench import main
from imp_runtime.cli.bench_common import describe
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts

SPEC = "flash-next:layers=2,experts=16,vocab=64,table=64"


def test_both_modes_run_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--synthetic", SPEC, "-p", "8", "-n", "2", "-r", "1", "-o", "jsonl"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(r["n_prompt"], r["n_gen"]) for r in rows] == [(8, 0), (0, 2)]
    assert all(r["model_filename"] == f"synthetic {SPEC}" for r in rows)
    assert "weights: synthetic" in err and "routing: planted (prose)" in err
    extra = ["--extra", "-p", "0", "-n", "4", "-r", "1"]
    assert main(["--synthetic", SPEC, *extra]) == 0
    assert (
        "routing: planted (prose); expert hit rate: - (no expert cache)" in capsys.readouterr().out
    )
    args = ["-npp", "8", "-ntg", "2", "-npl", "1,2", "-c", "64", "--routing", "uniform"]
    assert main(["--synthetic", SPEC, *args]) == 0
    out, err = capsys.readouterr()
    assert out.count("|     8 |      2 |") == 2
    assert "routing: planted (uniform)" in err


def test_recorded_routing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ids = np.zeros((3, 2, 10), np.uint16) + np.arange(10, dtype=np.uint16)
    trace.save(trace.Trace(ids, np.ones(3, np.int32), 16, "m", 1, "t"), tmp_path / "t.npz")
    name = f"trace:{tmp_path / 't.npz'}"
    args = ["-p", "0", "-n", "4", "-r", "1", "--extra", "--routing", name]
    assert main(["--synthetic", SPEC, *args, "-o", "jsonl"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["routing"] == f"recorded ({name}: 3 tokens of t by m, then from the first again)"
    assert row["experts_per_layer"] == 10


def test_what_the_cache_did_is_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each row, of its repetitions alone."""
    calls = iter(range(100))

    def expert_stats(session: Session) -> dict[str, object]:
        n = next(calls)
        counts = {"wanted": [50 * n], "hits": [n * n], "fetch_ns": [n * 10**6]}
        return {"slots": 4, "blob_bytes": 1_000_000, **counts}

    monkeypatch.setattr(Session, "expert_stats", expert_stats)
    assert main(["--synthetic", SPEC, "-p", "4", "-n", "2", "-r", "2"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "experts: " in line]
    assert lines == [
        f"imp-bench: {row}: experts: hit rate {rate}%, {missed} of 50 experts missed, "
        f"0.0{missed} GB over PCIe in 0.001 s"
        for row, rate, missed in (("pp4", "2.00", 49), ("tg2", "10.00", 45))
    ]
    assert main(["--synthetic", SPEC, "-npp", "4", "-ntg", "2", "-npl", "1", "-c", "64"]) == 0
    assert "imp-bench: pp 4, tg 2, B 1: experts: hit rate 18.00%, 41" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "--model is required, or --synthetic"),
        (["-m", "x", "--synthetic", SPEC], "--model and --synthetic are two models"),
        (["-m", "x", "--routing", "prose"], "--routing is for --synthetic"),
        (["--synthetic", "small"], "the shapes are: flash-next"),
        (["--synthetic", SPEC, "--routing", "poetry"], "routing 'poetry': prose or uniform"),
        (["--synthetic", SPEC, "--routing", "trace:none.npz"], "none.npz: No such file"),
    ],
)
def test_refusals(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-p", "8", "-n", "0", *args]) == 1
    assert message in capsys.readouterr().err


def test_hit_rate_and_routing_are_told_together() -> None:
    model = Model.synthetic(SPEC, device="cpu")
    counts = ExpertCounts(8700, 1_000_000, 1000, 896, 0.003)
    decode = Decode((1, 2), 0.1, 1, 6, counts, Vram(32 << 30, 31 << 30, 1))
    extra = Extra("t", {"tg": (10.0,)}, 0.0, decode, None, None, 1, "", "planted (prose)")
    fields = extra_fields(extra, describe(model))
    assert fields["hit_rate"] == 0.896 and fields["routing"] == "planted (prose)"
    assert fields["expert_slots"] == 8700
    assert (fields["misses_per_step"], fields["miss_bytes_per_step"]) == (104 / 6, 104e6 / 6)
    assert fields["miss_ms_per_step"] == 0.5
    assert (fields["vram_limit_bytes"], fields["vram_used_bytes"]) == (32 << 30, 1)
    lines = extra_lines("tg2", extra, describe(model))
    rate = "89.6 % with 8700 slots, 17.3 misses = 17.3 MB over PCIe in 0.50 ms per step"
    assert f"  routing: planted (prose); expert hit rate: {rate}" in lines
    assert "  device memory: 0.00 GiB in use, 31.00 GiB planned, limit 32.00 GiB" in lines
