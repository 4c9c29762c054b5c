"""imp-bench from the command line: output that llama.cpp's readers parse, flags, errors."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from pathlib import Path

import pytest

from imp_runtime.bench import machine
from imp_runtime.cli import bench, bench_common, bench_speed
from imp_runtime.cli.bench_flags import BATCHED, MAX_VALUES, SPEED, numbers, pairs
from imp_runtime.cli.llama_common import COMMON
from imp_runtime.cli.llama_flags import INT32_MAX, FlagError, FlagTable, flag
from tests.bench import golden

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(prose_gguf: Path, capfd: Capture):
    """Arguments after the model -> (exit status, stdout, stderr)."""

    def run(*words: str, model: str | None = None) -> tuple[int, str, str]:
        status = bench.main(["-m", model or str(prose_gguf), "-t", "1", *words])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is not measured."""
    limits = machine.Ceiling(1, 10.0, 1 << 20, 100.0)
    monkeypatch.setattr("imp_runtime.bench.measure_ceiling", lambda n_threads: limits)


def test_batched_table(run) -> None:
    status, out, err = run(
        "-c", "60", "-b", "64", "-ub", "32", "-npp", "8,16", "-npp", "4", "-ntg", "2",
        "-npl", "1,3",
    )  # fmt: skip
    assert status == 0
    head, rows = out.split("|\n", 1)
    theirs = golden.BATCHED_TABLE.split("|\n", 1)[0]
    number = re.compile(r"= -?\d+")
    assert number.sub("= N", head) == number.sub("= N", theirs)
    assert golden.BATCHED_SETTINGS.search(out).groups() == ("60", "64", "32")
    found = golden.BATCHED_ROW.findall(rows)
    assert [row[:4] for row in found] == [
        ("8", "2", "1", "10"), ("8", "2", "3", "30"), ("16", "2", "1", "18"),
        ("16", "2", "3", "54"), ("4", "2", "1", "6"), ("4", "2", "3", "18"),
    ]  # fmt: skip
    for pp, tg, pl, _, t_pp, s_pp, _, s_tg, t, s in found:
        assert float(s_pp) > 0 and float(s_tg) > 0 and float(t) >= float(t_pp)
        total = int(pl) * (int(pp) / float(s_pp) + int(tg) / float(s_tg))
        assert float(s) == pytest.approx(int(pl) * (int(pp) + int(tg)) / total, rel=1e-3)
    assert out.endswith("|\n\n")
    assert "tokens: random" in err


def test_batched_rows_that_do_not_fit(run) -> None:
    arguments = ("-c", "20", "-npp", "8", "-ntg", "2", "-npl", "1,2,3")
    status, out, err = run(*arguments)
    assert status == 0 and len(golden.BATCHED_ROW.findall(out)) == 2
    assert "pp 8, tg 2, B 3: 30 tokens of cache, n_kv_max is 20" in err
    status, out, err = run(
        "-c", str(INT32_MAX), "-npp", "8", "-ntg", "2", "-npl", "1,70000",
        "--output-format", "jsonl",
    )  # fmt: skip
    assert status == 1 and "70000" in err
    assert [json.loads(line)["pl"] for line in out.strip().splitlines()] == [1]


def test_batched_json_and_shared_prompt(run) -> None:
    arguments = ("-npp", "8", "-ntg", "2", "-npl", "2", "--output-format", "jsonl", "-pps")
    for more, n_kv in (((), 20), (("-kvu",), 12), (("-kvu", "-no-kvu", "-tgs"), 20)):
        status, out, _ = run(*arguments, *more)
        (line,) = out.strip().splitlines()
        record = json.loads(line)
        assert status == 0 and list(record) == list(json.loads(golden.BATCHED_JSON))
        assert (record["is_pp_shared"], record["n_kv"]) == (1, n_kv)
        assert record["n_kv_max"] == 8192  # the model's context


def test_batched_without_a_list(run) -> None:
    status, out, err = run("-npp", "8", "-ntg", "2")
    assert status == 0 and not golden.BATCHED_ROW.findall(out)
    assert "|    PP |" in out and "no rows: -npl is not given" in err


@pytest.mark.usefixtures("ceiling")
def test_batched_extra(run, repository: Path) -> None:
    text = str(repository / "models" / "heldout_austen.txt")
    arguments = ("-c", "40", "-npp", "8", "-ntg", "4", "-npl", "2,4", "--extra", "--reps", "2")
    status, out, err = run(*arguments, "--text", text)
    assert status == 0
    assert f"tokens: text {text}" in err and "measured ceiling" in err
    assert len(golden.BATCHED_ROW.findall(out)) == 1
    assert "|     8 |      4 |    4 |     48 | 48 tokens of cache, n_kv_max is 40 |" in out
    for words in ("generation: median", "in 2 runs", "of 64 experts", "decode ops:", "routing: "):
        assert words in out
    status, out, _ = run(*arguments, "--output-format", "jsonl")
    row, note = map(json.loads, out.strip().splitlines())
    assert note["note"] == "48 tokens of cache, n_kv_max is 40"
    assert list(row)[: len(json.loads(golden.BATCHED_JSON))] == list(
        json.loads(golden.BATCHED_JSON)
    )
    assert row["tokens"] == "random (seed 0)" and row["routing"] == "model"
    assert row["peak_rss_bytes"] > 1 << 20 and row["decode_ops"]["MoeFfn"][1] > 0
    if row["decode_ts"] is not None:  # noise may be larger than so short a difference
        assert row["decode_share"] == pytest.approx(row["decode_gb_per_s"] / 10)


def test_speed_table(run) -> None:
    status, out, _ = run("-p", "8,4", "-n", "2", "-pg", "4,2", "-d", "0,6", "-r", "2", "-b", "32")
    assert status == 0
    found = golden.SPEED_ROW.findall(out)
    assert [row[6] for row in found] == [
        "pp8", "pp4", "tg2", "pp4+tg2", "pp8 @ d6", "pp4 @ d6", "tg2 @ d6", "pp4+tg2 @ d6",
    ]  # fmt: skip
    assert {row[5] for row in found} == {"CPU"} and all(float(row[7]) > 0 for row in found)
    assert "| threads | n_batch |" in out
    assert golden.BUILD.search(out)
    assert len({len(line) for line in out.splitlines() if line.startswith("|")}) == 1


def test_speed_formats(run) -> None:
    arguments = ("-p", "8", "-n", "2", "-r", "2")
    status, out, err = run(*arguments, "-o", "json", "-oe", "md")
    assert status == 0
    records = json.loads(out)
    assert [(r["n_prompt"], r["n_gen"]) for r in records] == [(8, 0), (0, 2)]
    theirs = json.loads(golden.SPEED_JSON)
    for ours in records:
        assert list(ours) == list(theirs[0])
        assert [type(v) for v in ours.values()] == [type(v) for v in theirs[0].values()]
        assert len(ours["samples_ns"]) == 2 and ours["model_type"] == "qwen4exp 64x11M NVFP4"
    assert len(golden.SPEED_ROW.findall(err)) == 2

    _, out, _ = run(*arguments, "-o", "csv")
    assert out.splitlines(keepends=True)[0] == golden.NAMES
    assert [row["n_gen"] for row in csv.DictReader(io.StringIO(out))] == ["0", "2"]

    _, out, _ = run(*arguments, "-o", "sql")
    base = sqlite3.connect(":memory:")
    base.executescript(golden.SQL_TABLE + out)
    found = base.execute("SELECT n_prompt, n_gen FROM llama_bench WHERE avg_ts > 0").fetchall()
    base.close()
    assert found == [(8, 0), (0, 2)]

    _, out, _ = run(*arguments, "-o", "jsonl")
    assert [json.loads(line)["n_threads"] for line in out.splitlines()] == [1, 1]


def test_cache_types(run) -> None:
    """One test per combination, in llama-bench's order; columns where a type is not the default."""
    arguments = ("-p", "4", "-n", "0", "-r", "1", "-ctk", "q8_0,f32", "-ctv", "f32", "-ctv", "bf16")
    status, out, _ = run(*arguments, "-o", "jsonl", "-oe", "md")
    assert status == 0
    pairs = [(r["type_k"], r["type_v"]) for r in map(json.loads, out.splitlines())]
    assert pairs == [("q8_0", "f32"), ("q8_0", "bf16"), ("f32", "f32"), ("f32", "bf16")]
    _, out, _ = run(*arguments[:8])
    assert "| threads | type_k |            test |" in out
    assert len(golden.SPEED_ROW.findall(out)) == 2
    batched = ("-npp", "4", "-ntg", "1", "-npl", "2", "-ctk", "f16", "-ctv", "q8_0")
    status, out, _ = run(*batched)
    assert status == 0 and len(golden.BATCHED_ROW.findall(out)) == 1


@pytest.mark.usefixtures("ceiling")
def test_speed_extra(run) -> None:
    status, out, _ = run("-p", "8", "-n", "4", "-r", "1", "--extra")
    assert status == 0 and len(golden.SPEED_ROW.findall(out)) == 2
    assert out.index("build:") < out.index("pp8:\n") < out.index("tg4:\n")
    _, out, _ = run("-p", "8", "-n", "0", "-r", "1", "--extra", "-o", "csv")
    (record,) = csv.DictReader(io.StringIO(out))
    assert float(record["prompt_share"]) == pytest.approx(
        float(record["prompt_gflop_per_s"]) / 100, abs=1e-5
    )
    assert record["decode_ts"] == record["hit_rate"] == ""


def test_speed_rows_that_do_not_fit(run) -> None:
    status, out, err = run("-p", f"4,{1 << 30}", "-n", "1", "-r", "1")
    assert status == 1 and len(golden.SPEED_ROW.findall(out)) == 2
    assert f"pp{1 << 30}: " in err


def test_speed_progress_and_notes(run) -> None:
    status, _, err = run(
        "-p", "4", "-n", "0", "-r", "1", "--progress", "-ngl", "99", "-fa", "on", "-mmp", "0",
    )  # fmt: skip
    assert status == 0
    assert "benchmark 1/1: prompt run 1/1" in err
    for name in ("-ngl", "-fa", "-mmp"):
        assert f"note: {name} has no effect here: " in err


def test_no_tests(run) -> None:
    status, out, err = run("-p", "0", "-n", "0")
    assert status == 0 and out.startswith("| model") and "no tests" in err


def test_missing_model_after_the_header(run) -> None:
    status, out, err = run("-p", "1", model="nope.gguf")
    assert status == 1 and out.startswith("| model") and "build:" not in out
    assert re.search(r"error: failed to load model 'nope\.gguf': .*nope\.gguf", err)
    status, out, err = run("-npp", "1", model="nope.gguf")
    assert status == 1 and out == "" and "nope.gguf" in err


def test_text_errors(run, tmp_path: Path) -> None:
    empty, bad = tmp_path / "empty", tmp_path / "bad"
    empty.write_text("")
    bad.write_bytes(b"abc\xff")
    for path, words in (
        (empty, "holds no tokens"),
        (bad, "is not UTF-8 at byte 3 of 4"),
        (tmp_path / "absent", "No such file"),
    ):
        for mode in (("-p", "1"), ("-npp", "1")):
            status, _, err = run(*mode, "--text", str(path))
            assert status == 1 and words in err and str(path) in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "8"], "--model is required"),
        (["-npp", "8"], "--model is required"),
        (["-m", "x", "--nope"], "invalid argument: --nope"),
        (["-m", "x", "-c", "100"], "invalid argument: -c"),  # llama-bench has none
        (["-m", "x", "-p", "a"], "--n-prompt is 'a', it must be a list of whole numbers"),
        (["-m", "x", "-t", "0"], "--threads has 0, it must be 1 to"),
        (["-m", "x", "-b", "0"], "--batch-size has 0"),
        (["-m", "x", "-r", "0"], "--repetitions is 0, it must be at least 1"),
        (["-m", "x", "-pg", "5"], "-pg is '5', it must be two whole numbers"),
        (["-m", "x", "-pg", "0,0"], "-pg is 0,0, one of the two must be at least 1"),
        (["-m", "x", "-o", "xml"], "-o is 'xml', it must be one of csv, json, jsonl, md, sql"),
        (
            ["-m", "x", "-ctk", "f32,q4_0"],
            "--cache-type-k is 'q4_0', it must be one of f32, f16, bf16, q8_0",
        ),
        (["-m", "x", "-embd", "1"], "-embd is not supported: embeddings are not computed"),
        (["-m", "x", "--seed", "-1"], "--seed is -1, it must be at least 0"),
        (["-m", "x", "-npl", "0"], "-npl has 0, it must be 1 to"),
        (["-m", "x", "-npp", "1-4"], "-npp is '1-4', it must be a list of whole numbers"),
        (["-m", "x", "-npp", "8", "--output-format", "xml"], "--output-format is 'xml'"),
        (["-m", "x", "-npp", "8", "-ub", "0"], "--ubatch-size is 0, it must be at least 1"),
        (["-m", "x", "-npp", "8", "-c", "-1"], "--ctx-size is -1, it must be at least 0"),
        (
            ["-m", "x", "-npp", "8", "-ctv", "q5_1"],
            "-ctv is 'q5_1', it must be one of f32, f16, bf16, q8_0",
        ),
        (["-m", "x", "-npp", "8", "--lora", "y"], "--lora is not supported"),
    ],
)
def test_flag_errors(arguments: list[str], message: str, capfd: Capture) -> None:
    assert bench.main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == "" and message in err
    assert [line for line in err.splitlines() if line.startswith("error: ")] == err.splitlines()[
        -1:
    ]


def test_lists() -> None:
    assert numbers("-p", ["1,2", "5"], 0) == [1, 2, 5]
    assert numbers("-p", ["16-64*2"], 0) == [16, 32, 64]
    assert numbers("-p", ["1-6+2,9"], 0) == [1, 3, 5, 9]
    assert numbers("-p", ["3-5"], 0) == [3, 4, 5]
    assert numbers("-p", ["0-0"], 0) == [0]
    assert numbers("-p", [f"1-{MAX_VALUES}"], 0)[-1] == MAX_VALUES
    assert numbers("-p", [str(INT32_MAX)], 0) == [INT32_MAX]
    assert pairs("-pg", ["512,128", "0,3"]) == [(512, 128), (0, 3)]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "list of whole numbers"),
        ("1,,2", "list of whole numbers"),
        ("-1", "list of whole numbers"),
        ("1-2-3", "list of whole numbers"),
        ("1-4*", "list of whole numbers"),
        ("4-1", "ends before it begins"),
        ("1-4+0", "never ends"),
        ("1-4*1", "never ends"),
        ("0-4*2", "never ends"),
        (f"1-{MAX_VALUES + 1}", f"more than {MAX_VALUES} values"),
        (str(INT32_MAX + 1), f"it must be 0 to {INT32_MAX}"),
    ],
)
def test_list_errors(word: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        numbers("-p", [word], 0)


def test_number_of_tests_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"n_prompt": [1, 2], "n_gen": [0], "n_depth": [0, 1], "batch_size": [8]}
    lists |= {"ubatch_size": [8], "threads": [1, 2]}
    monkeypatch.setattr(bench_speed, "MAX_CASES", 8)
    types = {"cache_type_k": ["f32"], "cache_type_v": ["f16"]}
    cases = bench_speed._cases(lists, types, [])
    assert [(c.setup.n_threads, c.setup.n_depth, c.n_prompt) for c in cases] == [
        (t, d, p) for t in (1, 2) for d in (0, 1) for p in (1, 2)
    ]
    with pytest.raises(FlagError, match="12 tests, at most 8"):
        bench_speed._cases(lists, types, [(1, 1)])
    types["cache_type_k"] = ["f32", "q8_0"]
    with pytest.raises(FlagError, match="16 tests, at most 8"):
        bench_speed._cases(lists, types, [])


def test_appending_flags() -> None:
    table = FlagTable([flag("-a N", "many", append=True), flag("-b N", "one", default="0")])
    parsed = table.parse(["-a", "1", "-b", "2", "-a", "3,4", "-b", "5"])
    assert (parsed["a"], parsed["b"]) == (["1", "3,4"], "5")
    assert table.parse([])["a"] is None


def test_batched_knows_every_common_flag() -> None:
    words = {name for row in COMMON for name in row.names}
    assert words <= {name for row in BATCHED.flags for name in row.names}


def test_help_and_version(capfd: Capture) -> None:
    assert bench.main(["-h"]) == 0
    out, _ = capfd.readouterr()
    for table in (SPEED, BATCHED):
        for row in table.flags:
            assert row.names[0] in out
    assert bench.main(["--version"]) == 0
    assert capfd.readouterr()[0].startswith("imp-runtime ")


def test_threads_of_batched_mode(run) -> None:
    status, out, err = run("-npp", "2", "-ntg", "1", "-npl", "1", "-tb", "2")
    assert status == 0 and "n_threads = 2, n_threads_batch = 2" in out
    assert "-tb goes before -t" in err
    status, out, _ = run("-npp", "2", "-ntg", "1", "-npl", "1", "-t", "-1")
    assert f"n_threads = {bench_common.all_threads()}," in out


def test_interrupt(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("imp_runtime.bench.speed.read_prompts", interrupt)
    status, out, err = run("-p", "4", "-n", "0")
    assert status == 130 and out.startswith("| model") and "interrupted" in err
