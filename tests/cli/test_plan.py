"""`imp plan` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imp_runtime.cli.main import main
from tests.gguf.released import write_released

LIMITS = ("--vram-limit", "32GiB", "--ram-limit", "128GiB")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["plan", *args])
    out, err = capsys.readouterr()
    return status, out, err


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--synthetic", "flash-next", *LIMITS)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "model            synthetic flash-next"
    assert lines[1] == "plan             experts in pinned RAM, a cache in VRAM"
    assert lines[2].startswith("expert slots     8027 of 24576 (32.7%), 167 a layer, policy lrfu")
    numbers = [line.split() for line in lines]
    assert ["VRAM", "dense", "weights", "8,755,482,112", "8.15", "GiB"] in numbers
    assert ["RAM", "pinned", "experts", "67,947,724,800", "63.28", "GiB"] in numbers
    assert lines[-1].strip().startswith("step ") and "tok/s in all" in lines[-1]


def test_a_file_gives_the_same_plan_as_the_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "released.gguf"
    write_released(path, mtp=True)
    file = json.loads(run(capsys, str(path), *LIMITS, "--json")[1])
    shape = json.loads(run(capsys, "--synthetic", "flash-next", *LIMITS, "--json")[1])
    assert file["table_bytes"] == 51_200_245_760 + 4
    for key in ("tier", "slots", "n_ctx", "kv_tokens", "hit_rate", "ram"):
        assert file[key] == shape[key], key
    assert abs(file["vram_bytes"] - shape["vram_bytes"]) < 1 << 20  # vectors of other types
    assert shape["tier"] == "experts in pinned RAM, a cache in VRAM"
    assert 0.85 < shape["hit_rate"] < 0.95


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-c", "4096", "-np", "2", "-ub", "128", "-ctk", "q8_0", "-ctv", "q8_0")
    args = ("--synthetic", "flash-next:layers=8", "--dense", "8bit", *words, "--json")
    status, out, err = run(capsys, *args, "--vram-limit", "6GB", "--ram-limit", "20GB")
    assert (status, err) == (0, "")
    plan = json.loads(out)
    assert (plan["n_ctx"], plan["parallel"], plan["n_ubatch"]) == (4096, 2, 128)
    assert plan["kv_tokens"] == 8192


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "a model is needed: FILE or --synthetic flash-next"),
        (("x.gguf", "--synthetic", "flash-next"), "a model is needed"),
        (("--synthetic", "gpt"), "the shapes are: flash-next"),
        (("--synthetic", "flash-next", "--vram-limit", "lots"), "--vram-limit is 'lots'"),
        (("--synthetic", "flash-next", "--dense", "4bit"), "--dense is '4bit'"),
        (("--synthetic", "flash-next", "-ctk", "q4"), "-ctk is 'q4'"),
        (("--synthetic", "flash-next", "--vram-limit", "8GiB"), "8589934592 may be used"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    status, out, err = run(capsys, *args)
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"nothing")
    status, _, err = run(capsys, str(path))
    assert status == 1 and str(path) in err and err.count("\n") == 1
