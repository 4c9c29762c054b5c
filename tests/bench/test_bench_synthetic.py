"""Benchmarks of random weights: named, with planted routing, refused where they make no sense."""

from __future__ import annotations

import json

import pytest

from imp_runtime.bench import Decode
from imp_runtime.bench.extra import CacheUse, Vram
from imp_runtime.bench.extra_text import Extra, extra_fields, extra_lines
from imp_runtime.cli.bench import main
from imp_runtime.cli.bench_common import describe
from imp_runtime.model import Model

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


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "--model is required, or --synthetic"),
        (["-m", "x", "--synthetic", SPEC], "--model and --synthetic are two models"),
        (["-m", "x", "--routing", "prose"], "--routing is for --synthetic"),
        (["--synthetic", "small"], "the shapes are: flash-next"),
        (["--synthetic", SPEC, "--routing", "poetry"], "poetry"),
    ],
)
def test_refusals(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-p", "8", "-n", "0", *args]) == 1
    assert message in capsys.readouterr().err


def test_hit_rate_and_routing_are_told_together() -> None:
    model = Model.synthetic(SPEC, device="cpu")
    decode = Decode((1, 2), 0.1, 1, CacheUse(8700, 0.896, 138.2e6), Vram(32 << 30, 31 << 30, 1))
    extra = Extra("t", {"tg": (10.0,)}, 0.0, decode, None, None, 1, "", "planted (prose)")
    fields = extra_fields(extra, describe(model))
    assert fields["hit_rate"] == 0.896 and fields["routing"] == "planted (prose)"
    assert fields["expert_slots"] == 8700 and fields["miss_bytes_per_step"] == 138.2e6
    assert (fields["vram_limit_bytes"], fields["vram_used_bytes"]) == (32 << 30, 1)
    lines = extra_lines("tg2", extra, describe(model))
    hits = "89.6 % with 8700 slots, 138.2 MB over the bus a step"
    assert f"  routing: planted (prose); expert hit rate: {hits}" in lines
    assert "  device memory: 0.00 GiB in use, 31.00 GiB planned, limit 32.00 GiB" in lines
