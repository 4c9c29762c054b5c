"""`imp convert`: thin over the Python calls; messages, exit status, nothing on wrong streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from imp_runtime.cli.main import main
from tests.convert.builder import Built, build


@pytest.fixture(scope="module")
def built() -> Built:
    return build(experts="nvfp4", mtp="block", table="fp8")


@pytest.fixture
def src(built: Built, tmp_path: Path) -> Path:
    return built.write(tmp_path / "src")


def test_converts(src: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = src.parent / "out.gguf"
    assert main(["convert", str(src), str(out)]) == 0
    captured = capsys.readouterr()
    assert out.exists()
    assert captured.out.startswith(f"{out}: ")
    assert "values verified" in captured.out
    assert "/s" in captured.out
    assert "experts rounded to BF16 (3 tensors)" in captured.err
    assert "writing: " in captured.err
    assert main(["convert", str(src), str(out)]) == 1
    assert capsys.readouterr().err == f"error: {out} exists already; --force replaces it\n"


def test_quiet(src: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(src), str(src.parent), "--quiet", "--no-verify"]) == 0
    assert capsys.readouterr() == ("", "")
    assert (src.parent / "src.gguf").exists()


def test_dry_run_prints_the_plan_and_changes_nothing(
    src: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(src.parent.rglob("*"))
    assert main(["convert", str(src), str(src.parent / "out.gguf"), "--dry-run"]) == 0
    assert sorted(src.parent.rglob("*")) == before
    lines = capsys.readouterr().out.splitlines()
    table = next(line for line in lines if line.startswith("per_layer_token_embd.weight_e4m3"))
    assert table.split()[1:4] == ["32", "x", "896"]
    assert table.endswith("FP8 per tensor -> I8  28672")
    experts = next(line for line in lines if line.startswith("blk.2.ffn_up_exps.weight"))
    assert experts.endswith(f"NVFP4 (ModelOpt) -> NVFP4  {128 * 64 * 12 // 64 * 36}")
    for word in ("source", "tensors", "disk", "RAM", "VRAM", "state", "note"):
        assert any(line.startswith(word) for line in lines), word


def test_options_reach_the_conversion(src: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dense", "f32", "--ngram", "bf16", "--experts", "q8_0", "--mtp", "drop",
             "--split-max-size", "1M"]  # fmt: skip
    assert main(["convert", str(src), str(src.parent / "out.gguf"), *words]) == 0
    assert len(list(src.parent.glob("out-0000*-of-0000*.gguf"))) > 1
    assert "MTP left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--dense", "q3_k"], 1, "error: --dense q3_k: one of bf16, f16, f32, q8_0 is needed"),
        (["--split-max-size", "5X"], 1, "error: --split-max-size 5X: a number followed by M or G"),
        (["--pre", "none"], 1, "error: --pre none: one of "),
        (["--nonsense"], 2, "No such option: --nonsense"),
    ],
)
def test_wrong_words(
    src: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, sentence: str
) -> None:
    assert main(["convert", str(src), str(src.parent / "out.gguf"), *words]) == status
    assert sentence in capsys.readouterr().err
    assert list(src.parent.iterdir()) == [src]


def test_output_is_needed(src: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(src)]) == 1
    assert "OUT is missing" in capsys.readouterr().err
    assert main(["convert", str(src), "--dry-run"]) == 0
