"""Traces of experts: recorded, saved, read back, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imp_runtime import trace
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.trace import Trace


def made(tokens: int = 6, layers: int = 3, k: int = 2, experts: int = 9) -> Trace:
    rng = np.random.RandomState(3)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens * layers)])
    ids = ids.reshape(tokens, layers, k).astype(np.uint16)
    return Trace(ids, np.array([tokens - 2, 1, 1], np.int32), experts, "m", 7, "t.txt")


def same(a: Trace, b: Trace) -> None:
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.step_rows, b.step_rows)
    fields = ("experts", "model", "model_hash", "text")
    assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    one = replace(made(), model="Größe", model_hash=(1 << 64) - 1)
    trace.save(one, path)
    same(trace.load(path), one)
    trace.save(made(20), path)  # replaces
    assert len(trace.load(path).ids) == 20
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
    with np.load(path, allow_pickle=False) as file:  # a plain npz
        assert sorted(file.files) == ["ids", "meta", "step_rows"]


def write(path: Path, *, meta: dict[str, Any] | None = None, **arrays: Any) -> None:
    """A trace file with other parts."""
    one = made()
    head = {
        "format": trace.FORMAT,
        "version": trace.VERSION,
        "model": "m",
        "model_hash": 7,
        "text": "t",
        "experts": 9,
        "layers": 3,
        "k": 2,
    } | (meta or {})
    parts = {
        "ids": one.ids,
        "step_rows": one.step_rows,
        "meta": np.frombuffer(json.dumps(head).encode(), np.uint8),
    } | arrays
    with path.open("wb") as file:
        np.savez(file, **{name: value for name, value in parts.items() if value is not None})


IDS = made().ids
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"meta": {"format": "other"}}, "not a trace of experts"),
    ({"meta": {"version": 2}}, "a trace of version 2, this imp reads 1"),
    ({"meta": {"experts": "9"}}, "the trace's 'experts' is '9'"),
    ({"meta": {"experts": True}}, "the trace's 'experts' is True"),
    ({"meta": {"experts": int(IDS.max())}}, f"expert {IDS.max()} in a layer of {IDS.max()}"),
    ({"meta": {"experts": 1}}, "2 experts of 1 a token"),
    ({"meta": {"layers": 4}}, r"'ids' is \[6, 3, 2\], its header says \[4, 2\] a token"),
    ({"ids": None}, "it has no 'ids'"),
    ({"ids": IDS.astype(np.int32)}, r"'ids' is int32 \[6, 3, 2\]"),
    ({"ids": IDS[0]}, r"'ids' is uint16 \[3, 2\]"),
    ({"ids": IDS[:0]}, "'ids' has 0 values"),
    ({"ids": np.asfortranarray(IDS)}, "column order"),
    ({"ids": np.array([{}], object)}, "'ids' is object"),
    ({"step_rows": np.array([5], np.int32)}, "steps of 5 tokens in all, ids of 6"),
    ({"step_rows": np.array([7, -1], np.int32)}, "a step of a trace has no tokens"),
    ({"step_rows": np.ones(7, np.int32)}, "'step_rows' has 7 values, 1 to 6 can be"),
    ({"step_rows": np.array([2**31 - 1] * 2, np.int32)}, "steps of 4294967294 tokens"),
]


@pytest.mark.parametrize(("parts", "message"), HOSTILE)
def test_parts_that_do_not_fit(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.npz"
    write(path, **parts)
    with pytest.raises(ImpError, match=message) as caught:
        trace.load(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_every_truncation_and_flip_is_refused_or_read(tmp_path: Path) -> None:
    path, whole = tmp_path / "t.npz", tmp_path / "whole.npz"
    trace.save(made(), whole)
    data = whole.read_bytes()
    for n in range(0, len(data), 7):
        path.write_bytes(data[:n])
        with pytest.raises(ImpError, match="not a trace of experts"):
            trace.load(path)
    for n in range(0, len(data), 3):
        path.write_bytes(data[:n] + bytes([data[n] ^ 0xFF]) + data[n + 1 :])
        try:
            same(trace.load(path), made())  # a byte that nothing depends on
        except ImpError as error:
            assert str(error).startswith(f"{path}: ")


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    write(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<u2", "fortran_order": False, "shape": (1 << 27, 3, 2)}
    )
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    for claim, message in (
        (header.getvalue(), "'ids' ends after 0 of 1610612736 bytes"),
        (header.getvalue().replace(b"134217728", b"934217728"), "1 to 2147483648 can be"),
        (header.getvalue().replace(b"(134217728, 3, 2)", b"(0, 3, 2)        "), "0 values"),
        (header.getvalue() + b" " * 4096, "takes"),
    ):
        if message == "takes":
            claim = claim.replace(b"(134217728, 3, 2)", b"(1, 3, 2)        ")
        parts["ids.npy"] = claim
        with zipfile.ZipFile(path, "w") as new:
            for name, content in parts.items():
                new.writestr(name, content)
        with pytest.raises(ImpError, match=message):
            trace.load(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    for data in (b"", b"GGUF", b"PK\x03\x04" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(ImpError, match="not a trace of experts"):
            trace.load(path)
    with pytest.raises(OSError, match="none.npz"):
        trace.load(tmp_path / "none.npz")


def test_more_ids_than_a_file_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.npz"
    monkeypatch.setattr(trace, "MAX_IDS", 36)
    trace.save(made(6), path)
    with pytest.raises(ImpError, match="42 expert ids, a file holds at most 36"):
        trace.save(made(7), path)
    same(trace.load(path), made(6))
    monkeypatch.setattr(trace, "MAX_IDS", 35)
    with pytest.raises(ImpError, match="'ids' has 36 values, 1 to 35 can be"):
        trace.load(path)


def test_a_run_is_recorded_as_its_taps_say(prose_gguf: Path) -> None:
    """Prefill in steps, one token at a time, and greedy tokens after it."""
    prompt = list(range(40, 57))
    with Model.load(prose_gguf, device="cpu") as model:
        steps = trace.record(model, prompt, text="x", step=7)
        single = trace.record(model, prompt, text="x", decode=True)
        longer = trace.record(model, prompt, text="x", step=7, generate=3)
        with (
            Session(model, n_ctx=64, taps=["blk.*.expert_ids"], n_ubatch=32) as session,
            session.open() as seq,
        ):
            logits = seq.extend(prompt)
            taps = session.taps()
            want = np.stack([taps[f"blk.{i}.expert_ids"] for i in range(8)], axis=1)
            for i in range(3):
                token = int(np.argmax(logits[-1]))
                logits = seq.extend([token])
                got = [session.taps()[f"blk.{n}.expert_ids"][0] for n in range(8)]
                np.testing.assert_array_equal(longer.ids[17 + i], np.stack(got))
            assert steps.model_hash == session.core.model_hash
    np.testing.assert_array_equal(steps.ids, want)
    np.testing.assert_array_equal(single.ids, want)
    assert steps.step_rows.tolist() == [7, 7, 3]
    assert single.step_rows.tolist() == [1] * 17
    assert longer.step_rows.tolist() == [7, 7, 3, 1, 1, 1]
    assert (steps.layers, steps.k, steps.experts) == (8, 8, 64)
    with Model.load(prose_gguf, device="cpu") as model, pytest.raises(ImpError, match="no tokens"):
        trace.record(model, [], text="x")
