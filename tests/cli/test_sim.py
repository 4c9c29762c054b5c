"""`imp trace` and `imp sim` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from imp_runtime import expert_sim, trace
from imp_runtime.cli import sim
from imp_runtime.cli.main import main

SMALL = ("--routing", "prose", "--layers", "3", "--experts", "64", "--used", "4", "--tokens", "400")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def test_trace_then_sim(
    prose_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "t.npz"
    text.write_text("It is a truth universally acknowledged, that a single man must be in want.")
    args = ("trace", str(prose_gguf), "-f", str(text), "-o", str(out), "--device", "cpu")
    status, printed, err = run(capsys, *args, "--decode", "-g", "5")
    assert (status, printed) == (0, "")
    made = trace.load(out)
    assert err == (
        f"{out}: {len(made.ids)} tokens of text.txt in {len(made.ids)} steps, 8 layers, "
        "8 of 64 experts\n"
    )
    assert (made.text, made.model) == ("text.txt", "Prose Nvfp4")
    status, printed, err = run(capsys, "sim", "--trace", str(out), "--trace", str(out), "--json")
    assert (status, err) == (0, "")
    first, second = json.loads(printed)
    assert first == second and first["tokens"] == len(made.ids)
    for point in first["points"]:
        want = expert_sim.simulate(made, point["slots"], point["policy"])
        assert point["hits"] == want.hits and point["wanted"] == len(made.ids) * 64
    assert len(first["points"]) == 3 * 5

    status, _, err = run(capsys, *args, "-n", "4", "-ub", "3")
    assert status == 0 and trace.load(out).step_rows.tolist() == [3, 1]
    status, _, err = run(capsys, *args, "-g", "8192")
    assert status == 1 and "the model's context has 8192: -n takes fewer" in err


def test_table_is_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, "sim", *SMALL, "--policy", "lru,pool", "--experts-per-layer", "32,8"
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "routing: planted (prose); 3 layers, 4 of 64 experts; 300 steps counted, 1 tokens a step"
    )
    made = expert_sim.planted("prose", tokens=400, layers=3, experts=64, used=4)
    for policy in ("lru", "pool"):
        (row,) = [line for line in lines if line.startswith(f"│ {policy} ")]
        rates = [expert_sim.simulate(made, 3 * n, policy, 100).hit_rate for n in (8, 32)]
        assert [cell.strip() for cell in row.split("│")[2:4]] == [f"{r:.1%}" for r in rates]


def test_sizes_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    def points(*args: str) -> list[dict[str, object]]:
        status, out, err = run(capsys, "sim", *SMALL, "--policy", "lru", "--json", *args)
        assert (status, err) == (0, "")
        found: list[dict[str, object]] = json.loads(out)[0]["points"]
        return found

    assert [p["slots"] for p in points()] == [24, 48, 72, 96, 144]
    sizes = points("--vram", "1MB,500kB,1GiB", "--expert-size", "10kB")
    assert [p["slots"] for p in sizes] == [50, 100, 192]
    assert sizes[-1]["slots"] == 3 * 64  # no more than there are
    assert points("--batch", "8", "--warm", "0")[4]["steps"] == 50
    assert points("--warm", "399")[0]["wanted"] == 12


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "routing is needed: --trace FILE or --routing prose"),
        (("--trace", "x.npz", "--routing", "prose"), "routing is needed"),
        (("--trace", "none.npz"), "none.npz"),
        (("--routing", "verse"), "routing 'verse': prose or uniform"),
        ((*SMALL, "--policy", "lru,mru"), "expert policy 'mru'"),
        ((*SMALL, "--policy", ","), "--policy names none"),
        ((*SMALL, "--experts-per-layer", "8,x"), "--experts-per-layer is '8,x'"),
        ((*SMALL, "--experts-per-layer", "0"), "0 slots for 3 layers"),
        ((*SMALL, "--experts-per-layer", "8", "--vram", "1GB"), "two lists of sizes"),
        ((*SMALL, "--vram", "8G"), "--vram is '8G'"),
        ((*SMALL, "--vram", "8GB", "--expert-size", "0"), "--expert-size is 0"),
        ((*SMALL, "--warm", "400"), "--warm is 400, prose has 400 steps"),
        (("--routing", "prose", "--tokens", "100000000"), "at most 268435456 can be"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    status, out, err = run(capsys, "sim", *args)
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not there
    status, out, err = run(capsys, "sim", *SMALL, "--plot", str(path))
    assert (status, out) == (1, "") and not path.exists()
    assert err == "error: --plot needs matplotlib: pip install 'imp-runtime[plot]'\n"
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert run(capsys, "sim", *SMALL, "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_size_of_a_released_expert() -> None:
    from imp_runtime.planner import synthetic_sizes

    assert synthetic_sizes("flash-next").blob_bytes == sim.RELEASED_BLOB_BYTES
