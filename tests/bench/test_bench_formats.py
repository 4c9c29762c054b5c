"""Every format, character for character as llama.cpp's benchmarks print the same numbers."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from dataclasses import replace

import pytest

from imp_runtime.bench import (
    BatchedCase,
    BatchedMisfit,
    BatchedOptions,
    BatchedRow,
    Setup,
    SpeedCase,
    SpeedMisfit,
    SpeedRow,
    batched_text,
    speed_fields,
    speed_text,
)
from imp_runtime.bench.speed_fields import ModelFacts
from tests.bench import golden

OPTIONS = BatchedOptions(n_kv_max=2048, n_batch=512, n_ubatch=512, n_threads=2)
TINY = ModelFacts("tiny-nvfp4.gguf", "qwen4exp ?B NVFP4", 15876576, 25876152, "cpu")


def batched_row(case: BatchedCase, speed_pp: float, speed_tg: float) -> BatchedRow:
    """The row that printed these speeds."""
    return BatchedRow(case, (case.prompt_tokens / speed_pp,), (case.pl * case.tg / speed_tg,))


def test_batched_table() -> None:
    rows = [
        batched_row(BatchedCase(int(pp), int(tg), int(pl)), float(s_pp), float(s_tg))
        for pp, tg, pl, _, _, s_pp, _, s_tg, *_ in golden.BATCHED_ROW.findall(golden.BATCHED_TABLE)
    ]
    assert len(rows) == 3
    lines = [
        "",
        batched_text.settings(OPTIONS, shared=False),
        "",
        batched_text.HEADER,
        batched_text.RULE,
        *(batched_text.table_row(row) for row in rows),
        "",
    ]
    assert "\n".join(lines) + "\n" == golden.BATCHED_TABLE


def test_batched_shared_prompt() -> None:
    found = golden.BATCHED_ROW.findall(golden.SHARED_ROWS)
    assert len(found) == 2
    rows = [
        batched_row(BatchedCase(64, 16, int(pl), True, True), float(s_pp), float(s_tg))
        for _, _, pl, _, _, s_pp, _, s_tg, *_ in found
    ]
    text = "".join(f"{batched_text.table_row(row)}\n" for row in rows)
    assert text == golden.SHARED_ROWS
    assert [BatchedCase(64, 16, pl, True, False).n_kv for pl in (1, 2, 4)] == [80, 160, 320]


def test_batched_json() -> None:
    row = BatchedRow(BatchedCase(64, 16, 2), (0.027094,), (0.020118,))
    ours, theirs = batched_text.json_row(row, OPTIONS), golden.BATCHED_JSON
    assert list(json.loads(ours)) == list(json.loads(theirs))
    assert golden.BATCHED_JSON.split('"t_pp"')[0] == ours.split('"t_pp"')[0]
    for name, value in json.loads(theirs).items():  # they compute in float32
        assert json.loads(ours)[name] == pytest.approx(value, rel=3e-7)
    # Six decimals, as printf's %f has them.
    assert len(ours.split('"speed": ')[1]) == len(theirs.split('"speed": ')[1])


def test_batched_medians_and_empty_rows() -> None:
    row = BatchedRow(BatchedCase(10, 4, 2), (3.0, 1.0, 2.0), (4.0, 8.0, 400.0))
    assert (row.t_pp, row.t_tg, row.t) == (2.0, 8.0, 10.0)
    assert (row.speed_pp, row.speed_tg, row.speed) == (10.0, 1.0, 2.8)
    nothing = BatchedRow(BatchedCase(0, 4, 1), (0.0,), (1.0,))
    assert golden.BATCHED_ROW.match(batched_text.table_row(nothing))
    assert json.loads(batched_text.json_row(nothing, OPTIONS))["speed_pp"] == 0


def test_batched_note() -> None:
    misfit = BatchedMisfit(BatchedCase(64, 16, 64), 'needs "much" memory')
    assert batched_text.note_row(misfit) == (
        '|    64 |     16 |   64 |   5120 | needs "much" memory |'
    )
    assert json.loads(batched_text.json_note(misfit, OPTIONS))["note"] == 'needs "much" memory'


@pytest.fixture
def as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of their build and machine."""
    monkeypatch.setattr(speed_text, "build_commit", lambda: "0c1e570")
    monkeypatch.setattr(speed_text, "build_number", lambda: 1)
    monkeypatch.setattr(speed_fields, "build_commit", lambda: "0c1e570")
    monkeypatch.setattr(speed_fields, "build_number", lambda: 1)
    monkeypatch.setattr(speed_fields, "cpu_name", lambda: "Intel(R) Xeon(R) Processor")


def speed_row(case: SpeedCase, *samples_ns: int, at: str = "2026-11-30T00:28:51Z") -> SpeedRow:
    return SpeedRow(case, at, samples_ns)


def case(n_prompt: int, n_gen: int, n_threads: int = 2, **setup: int) -> SpeedCase:
    setup_ = Setup(n_threads=n_threads, type_k="f16", type_v="f16", **setup)  # their default
    return SpeedCase(n_prompt, n_gen, setup_)


def with_spread(case: SpeedCase, mean: float, deviation: float) -> SpeedRow:
    """Two repetitions with this mean and deviation of tokens per second."""
    count, off = case.n_prompt + case.n_gen, deviation / 2**0.5
    return speed_row(case, *(round(1e9 * count / (mean + d)) for d in (-off, off)))


RECORD = speed_row(case(64, 0), 11401255, 11019780, 10687137)


def written(format_: speed_text.Format, *rows: SpeedRow) -> str:
    body = "".join(format_.row(row, TINY, {}) for row in rows)
    return format_.header() + body + format_.footer()


@pytest.mark.usefixtures("as_theirs")
def test_speed_table() -> None:
    format_ = speed_text.make_format("md", ["n_threads"], {})
    rows = (with_spread(case(64, 0), 5279.56, 76.24), with_spread(case(0, 16), 1137.64, 34.69))
    assert written(format_, *rows) == golden.SPEED_TABLE


@pytest.mark.usefixtures("as_theirs")
def test_speed_table_with_more_columns() -> None:
    format_ = speed_text.make_format("md", ["n_threads", "n_batch", "n_ubatch"], {})
    row = with_spread(case(32, 8, 1, n_batch=32, n_ubatch=32, n_depth=64), 2657.68, 41.25)
    assert format_.header() + format_.row(row, TINY, {}) == golden.SPEED_TABLE_BATCH


def test_speed_table_with_cache_types() -> None:
    format_ = speed_text.make_format("md", ["n_threads", "type_k", "type_v"], {})
    types = replace(case(32, 0), setup=replace(case(32, 0).setup, type_k="q8_0", type_v="bf16"))
    text = format_.header() + format_.row(with_spread(types, 2657.68, 41.25), TINY, {})
    head, rule, row = text.splitlines()
    assert head.endswith("| threads | type_k | type_v |            test |                  t/s |")
    assert rule.endswith("| ------: | -----: | -----: | --------------: | -------------------: |")
    assert row.endswith("|       2 |   q8_0 |   bf16 |            pp32 |      2657.68 ± 41.25 |")


def test_speed_table_of_a_large_file() -> None:
    large = ModelFacts("mid.gguf", "qwen4exp ?B NVFP4", int(6.1 * 2**30), 10_500_000_000, "cpu")
    format_ = speed_text.make_format("md", ["n_threads"], {})
    row = with_spread(case(0, 16, n_depth=256), 10.09, 0.53)
    assert format_.row(row, large, {}) == golden.SPEED_ROW_GIB


@pytest.mark.parametrize(
    ("n_bytes", "n_params", "size", "params"),
    [
        (2**30 - 1, 10**9 - 1, "1024.00 MiB", "1000.00 M"),
        (2**30, 10**9, "1.00 GiB", "1.00 B"),
    ],
)
def test_units_change(n_bytes: int, n_params: int, size: str, params: str) -> None:
    model = ModelFacts("m", "t", n_bytes, n_params, "cpu")
    row = speed_text.make_format("md", [], {}).row(RECORD, model, {})
    assert f"{size} |" in row and f"{params} |" in row


@pytest.mark.usefixtures("as_theirs")
def test_speed_json_lines() -> None:
    assert written(speed_text.make_format("jsonl", [], {}), RECORD) == golden.SPEED_JSON_LINES


@pytest.mark.usefixtures("as_theirs")
def test_speed_json() -> None:
    at = "2026-11-30T00:28:56Z"
    rows = (speed_row(case(16, 0), 3853464, at=at), speed_row(case(0, 4), 3936145, at=at))
    assert written(speed_text.make_format("json", [], {}), *rows) == golden.SPEED_JSON


@pytest.mark.usefixtures("as_theirs")
def test_speed_csv() -> None:
    text = written(speed_text.make_format("csv", [], {}), RECORD)
    assert text == golden.NAMES + ",".join(f'"{v}"' for v in golden.VALUES) + "\n"


@pytest.mark.usefixtures("as_theirs")
def test_speed_sql() -> None:
    text = written(speed_text.make_format("sql", [], {}), RECORD)
    names = ", ".join(golden.NAMES.strip().split(","))
    values = ", ".join(f"'{v}'" for v in golden.VALUES)
    assert text == (f"{golden.SQL_TABLE}INSERT INTO llama_bench ({names}) VALUES ({values});\n")


def test_quotes_survive_csv_and_sql() -> None:
    odd = ModelFacts('it\'s "odd", really.gguf', "t", 1, 1, "cpu")
    extra = {"note": "a 'b' \"c\"", "hit_rate": None, "decode_ts": 1.5}
    types = {"note": "TEXT", "hit_rate": "REAL", "decode_ts": "REAL"}
    for name in ("csv", "sql"):
        format_ = speed_text.make_format(name, [], types)
        text = format_.header() + format_.row(RECORD, odd, extra)
        if name == "csv":
            record = next(csv.DictReader(io.StringIO(text)))
            assert record["hit_rate"] == "" and record["decode_ts"] == "1.500000"
        else:
            base = sqlite3.connect(":memory:")
            base.row_factory = sqlite3.Row
            base.executescript(text)
            record = dict(base.execute("SELECT * FROM llama_bench").fetchone())
            base.close()
            assert record["hit_rate"] is None and record["decode_ts"] == 1.5
        assert record["model_filename"] == odd.filename
        assert record["note"] == extra["note"]


def test_speed_notes_parse() -> None:
    misfit = SpeedMisfit(case(512, 0), "no\nmemory")
    notes = {
        name: speed_text.make_format(name, [], {"note": "TEXT"}) for name in speed_text.FORMATS
    }
    assert notes["md"].note(misfit) == "| pp512 | no\nmemory |\n"
    assert json.loads(notes["jsonl"].note(misfit))["note"] == "no\nmemory"
    array = notes["json"].header() + notes["json"].note(misfit) + notes["json"].footer()
    assert json.loads(array)[0]["n_prompt"] == 512
    table = notes["csv"].header() + notes["csv"].note(misfit)
    assert next(csv.DictReader(io.StringIO(table)))["note"] == "no\nmemory"
    base = sqlite3.connect(":memory:")
    base.executescript(notes["sql"].header() + notes["sql"].note(misfit))
    base.close()


def test_json_of_no_rows() -> None:
    format_ = speed_text.make_format("json", [], {})
    assert json.loads(format_.header() + format_.footer()) == []
