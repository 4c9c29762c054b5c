"""imp diff: what it runs, prints and returns."""

import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from imp_runtime.cli import diff as cli
from imp_runtime.errors import ImpError
from imp_runtime.eval import TapRun, load_run

APP = typer.Typer()
cli.register(APP)
APP.command("other")(lambda: None)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Models by name: x and y are equal, z differs in its second layer."""
    calls: list[tuple] = []

    def run_model(path: Path, ids, taps, device, threads) -> TapRun:
        calls.append((str(path), ids.tolist(), taps, device, threads))
        if path.name == "absent.gguf":
            raise ImpError("absent.gguf cannot be opened")
        values = {
            f"blk.{layer}.residual": np.outer(ids, np.arange(1, 4) + layer).astype(np.float32)
            for layer in range(3)
        }
        if path.name == "z.gguf":
            values["blk.1.residual"][0, 0] += 1
            values["blk.2.residual"][0, 0] += 2
        return TapRun(str(path), ids, values)

    monkeypatch.setattr(cli, "run_model", run_model)
    monkeypatch.setattr(cli, "tokenize", lambda _, text: np.array([ord(c) for c in text], np.int32))
    return calls


def invoke(*arguments: str):
    return CliRunner().invoke(APP, ["diff", *arguments])


def test_equal_models_exit_0(models) -> None:
    run = invoke("x.gguf", "y.gguf", "-p", "ab", "-t", "3", "--device", "cpu")
    assert run.exit_code == 0 and run.stdout.splitlines()[-1] == "equal: 3 taps within 0.0002"
    assert models == [(name, [97, 98], cli.DEFAULT_TAPS, "cpu", 3) for name in ("x.gguf", "y.gguf")]


def test_the_first_layer_that_differs_exits_1() -> None:
    run = invoke("x.gguf", "z.gguf", "--tokens", "10,20")
    assert run.exit_code == 1
    assert "first difference: blk.1.residual (relative 1.25e-02 > 0.0002)" in run.stdout
    rows = re.findall(r"^(blk\S+) +(\S+) +(\S+) +(\S+)  (\S+)( +<- differs)?$", run.stdout, re.M)
    assert [(row[0], bool(row[5])) for row in rows] == [
        ("blk.0.residual", False), ("blk.1.residual", True), ("blk.2.residual", True),
    ]  # fmt: skip
    assert [float(value) for value in rows[1][1:4]] == [1, 80, 0.0125]
    assert invoke("x.gguf", "z.gguf", "--tokens", "10,20", "--tolerance", "0.1").exit_code == 0


def test_stored_runs_bring_their_tokens(tmp_path: Path, models) -> None:
    path = str(tmp_path / "x.npz")
    run = invoke("x.gguf", "--tokens", "10,20", "--save", path, "--taps", "blk.*", "--taps", "l?")
    assert run.exit_code == 0 and "3 intermediates of 2 tokens stored" in run.stdout
    assert models[-1][2] == ("blk.*", "l?")
    assert load_run(Path(path)).tokens.tolist() == [10, 20]
    assert invoke(path, "y.gguf").exit_code == 0 and models[-1][1] == [10, 20]
    assert invoke("z.gguf", path).exit_code == 1
    assert invoke(path, path).exit_code == 0
    wrong = invoke(path, "y.gguf", "--tokens", "10")
    assert wrong.exit_code == 2 and "ran 2 tokens" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.gguf",), "a second model or stored run is needed, or --save"),
        (("x.gguf", "y.gguf"), "one text is needed (-p, -f or --tokens), 0 are given"),
        (("x.gguf", "y.gguf", "-p", "a", "--tokens", "1"), "2 are given"),
        (("x.gguf", "y.gguf", "--tokens", "1,x"), "--tokens is '1,x', it must be ids"),
        (("x.gguf", "y.gguf", "--tokens", "9999999999"), "it must be ids like 1,2,3"),
        (("x.gguf", "y.gguf", "-p", ""), "the text has 0 tokens, at least 1 is needed"),
        (("x.gguf", "y.gguf", "-f", "absent.txt"), "absent.txt"),
        (("absent.gguf", "y.gguf", "-p", "a"), "absent.gguf cannot be opened"),
        (("absent.npz", "y.gguf"), "absent.npz"),
        (("x.gguf", "y.gguf", "--nope"), "--nope"),
        (("x.gguf", "y.gguf", "--tolerance", "-1"), "tolerance"),
    ],
)
def test_failures_exit_2(arguments: tuple[str, ...], message: str) -> None:
    run = invoke(*arguments)
    assert run.exit_code == 2 and message in run.stderr and not run.stdout
