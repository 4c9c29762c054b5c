"""Comparison of intermediates: numbers, order, the first difference, stored runs."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.eval import EvalError, TapRun, diff, load_run, record, save_run

NAMES = ("blk.0.attn_out", "blk.0.residual", "blk.1.expert_ids", "blk.1.residual", "logits")
TOKENS = np.array([5, 7, 9], np.int32)


def taps(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=(3, 8)).astype(np.float32) for name in NAMES}
    values["blk.1.expert_ids"] = rng.permutation(24).reshape(3, 8).astype(np.int32)
    return values


def run(label: str = "a", **changes: np.ndarray) -> TapRun:
    return TapRun(label, TOKENS, {**taps(), **changes})


def test_equal_runs() -> None:
    report = diff(run(), run("b"), 0.0)
    assert report.equal and [tap.name for tap in report.taps] == list(NAMES)
    assert all(tap.relative == 0 == tap.max_diff for tap in report.taps)
    assert report.taps[0].cosine == pytest.approx(1) and math.isnan(report.taps[2].cosine)


def test_first_difference_is_the_earliest_beyond_the_tolerance() -> None:
    late, early = taps()["logits"], taps()["blk.0.residual"]
    late[1, 2] += 10
    top = np.abs(early).max()
    early[2, 3] += np.float32(0.001) * top
    changed = run("b", **{"logits": late, "blk.0.residual": early})
    report = diff(run(), changed, 0.0011)
    assert report.first is not None and report.first.name == "logits"
    report = diff(run(), changed, 0.0009)
    assert report.first is not None and report.first.name == "blk.0.residual"
    assert report.first.relative == pytest.approx(0.001, rel=1e-3)
    assert report.first.max_value == top
    a, b = taps()["logits"].astype(float).ravel(), late.astype(float).ravel()
    expected = a @ b / math.sqrt((a @ a) * (b @ b))
    assert report.taps[-1].cosine == pytest.approx(expected, rel=1e-12)


def test_tolerance_is_inclusive() -> None:
    a = run(logits=np.array([[4.0, -2.0]], np.float32))
    b = run("b", logits=np.array([[4.0, -1.0]], np.float32))
    assert diff(a, b, 0.25).equal and not diff(a, b, 0.2499).equal


def test_integers_count_unequal_entries() -> None:
    ids = taps()["blk.1.expert_ids"]
    ids[0, 0], ids[0, 1] = ids[0, 1], ids[0, 0]
    report = diff(run(), run("b", **{"blk.1.expert_ids": ids}))
    assert report.first is not None and report.first.relative == 2 / 24


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_values_differ(bad: float, side: int) -> None:
    values = taps()["blk.0.residual"]
    values[0, 0] = bad
    runs = [run("a"), run("b")]
    runs[side] = run("c", **{"blk.0.residual": values})
    report = diff(*runs)
    assert report.first is not None and report.first.relative == math.inf
    assert report.first.note == "1 of 24 entries are not finite"


def test_shapes_that_differ_and_zeros() -> None:
    report = diff(run(), run("b", logits=np.zeros((2, 8), np.float32)))
    assert report.first is not None and report.first.name == "logits"
    assert report.first.note == "shape [3, 8], the other has [2, 8]"
    zero = np.zeros((3, 8), np.float32)
    assert diff(run(logits=zero), run("b", logits=zero)).equal
    assert not diff(run(logits=zero), run("b")).equal
    assert not diff(run(), run("b", logits=zero)).equal


def test_names_of_one_side_only() -> None:
    b = TapRun("b", TOKENS, {"logits": taps()["logits"], "extra": taps()["logits"]})
    report = diff(run(), b)
    assert report.only_a == list(NAMES[:4]) and report.only_b == ["extra"]
    assert [tap.name for tap in report.taps] == ["logits"] and report.equal
    with pytest.raises(EvalError, match="no intermediate of the same name"):
        diff(run(), TapRun("b", TOKENS, {"extra": taps()["logits"]}))


def test_tokens_must_be_the_same() -> None:
    with pytest.raises(EvalError, match="a ran 3 tokens, b ran 2"):
        diff(run(), TapRun("b", TOKENS[:2], taps()))


def test_stored_runs_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    save_run(run(), path)
    assert os.listdir(tmp_path) == ["run.npz"]
    back = load_run(path)
    assert list(back.taps) == list(NAMES) and diff(run(), back, 0.0).equal


def test_files_that_are_no_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    save_run(run(), path)
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(EvalError, match="is not a stored run"):
        load_run(path)
    for end in (10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(EvalError, match="is not a stored run"):
            load_run(path)
    path.write_bytes(whole.replace(b"'<f4'", b"'|O' "))
    with pytest.raises(EvalError, match="is not a stored run"):
        load_run(path)
    for arrays in ({"tokens": TOKENS}, taps(), {**taps(), "tokens": np.zeros(3)}):
        np.savez(path, **arrays)
        with pytest.raises(EvalError, match="lacks its tokens or its intermediates"):
            load_run(path)
    with pytest.raises(OSError, match="absent"):
        load_run(tmp_path / "absent.npz")


class Session:
    """Gives the same intermediates whatever runs."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.values = values
        self.calls: list[object] = []

    def open(self) -> "Session":
        return self

    def extend(self, tokens: np.ndarray, outputs: object) -> None:
        self.calls.append((tokens.tolist(), outputs))

    def close(self) -> None:
        self.calls.append("closed")

    def taps(self) -> dict[str, np.ndarray]:
        return self.values


def test_record_copies_the_intermediates() -> None:
    session = Session(taps())
    kept = record(session, [5, 7, 9], "here")
    session.values["logits"][:] = 0
    assert diff(run(), kept, 0.0).equal and kept.label == "here"
    assert session.calls == [([5, 7, 9], "all"), "closed"]
    with pytest.raises(EvalError, match="no intermediate has a name that matches"):
        record(Session({}), [1])
