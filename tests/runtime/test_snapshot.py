"""Sequences that leave their session and come back, in this process or another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.snapshot import Snapshot
from tests.models.golden import MODELS, Golden

Load = Callable[[str], Model]


@pytest.mark.parametrize("name", MODELS)
def test_restored_goes_on_as_if_nothing_was(name: str, model: Load) -> None:
    tokens = Golden(name).tokens("long")
    options = {"n_ctx": 192, "n_threads": 1, "poison": True, "max_seqs": 2}
    with Session(model(name), **options) as session, Session(model(name), **options) as another:
        with session.open() as seq:
            want = np.array(seq.extend(tokens[:150], outputs="all"))
        for at in (0, 1, 15, 16, 17, 63, 64, 100):
            seq = session.open()
            if at:
                seq.extend(tokens[:at])
            snapshot = seq.save()
            assert snapshot.tokens == tokens[:at]
            seq.close()
            for where in (session, another):
                back = where.restore(snapshot)
                assert back.tokens == tokens[:at]
                got = back.extend(tokens[at:150], outputs="all")
                np.testing.assert_array_equal(got, want[at:], str(at))
                back.close()
        for s in (session, another):
            assert (s.core.free_pages, s.core.free_rows) == (s.core.pages, 2)


CHILD = """
import sys
import numpy as np
from imp_runtime import Model, Session
from imp_runtime.snapshot import Snapshot
model, snapshot, out, *tokens = sys.argv[1:]
with Session(Model.load(model), n_ctx=192, n_threads=1) as session:
    sequence = session.restore(Snapshot.read(snapshot))
    np.save(out, sequence.extend([int(t) for t in tokens], outputs="all"))
"""


@pytest.mark.parametrize("name", ["experts512", "prose"])
def test_across_processes(name: str, model: Load, tmp_path: Path) -> None:
    tokens = Golden(name).tokens("long")
    loaded = model(name)
    with Session(loaded, n_ctx=192, n_threads=1) as session:
        seq = session.open()
        seq.extend(tokens[:70])
        seq.save().write(tmp_path / "s")
        want = np.array(seq.extend(tokens[70:90], outputs="all"))
    args = [loaded.path, tmp_path / "s", tmp_path / "out.npy", *map(str, tokens[70:90])]
    subprocess.run([sys.executable, "-c", CHILD, *map(str, args)], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), want)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.npy", "s"]


def test_damaged_files_are_refused(model: Load, tmp_path: Path) -> None:
    file = tmp_path / "s"
    with Session(model("dense_attention"), n_ctx=64, n_threads=1) as session:
        seq = session.open()
        seq.extend(list(range(20)))
        data = seq.save().data
        seq.close()

        def refused(bad: bytes, what: str) -> None:
            file.write_bytes(bad)
            for read in (Snapshot.read, lambda f: session.restore(Snapshot(bad, str(f)))):
                with pytest.raises(ImpError, match=what) as e:
                    read(file)
                assert str(file) in str(e.value) and "\n" not in str(e.value)

        for size in (0, 7, 47):
            refused(data[:size], f"not a snapshot .{size} bytes")
        for size in (48, 100, len(data) - 1):
            refused(data[:size], f"in {size} bytes")
        refused(data + b"\0", f"in {len(data) + 1} bytes")
        refused(b"GGUF" + data[4:], "not a snapshot")
        refused(data[:8] + b"\2" + data[9:], "version 2, imp reads 1")
        refused(data[:24] + b"\xff" * 8 + data[32:], "tokens")  # a count that would overflow
        rng = np.random.RandomState(0)
        places = [12, 16, 40, 48, 127, 128, len(data) - 1, *rng.randint(48, len(data), 40)]
        for at in places:
            flipped = bytearray(data)
            flipped[at] ^= 1 << rng.randint(8)
            refused(bytes(flipped), "checksum")
        assert session.core.free_pages == session.core.pages
        session.restore(Snapshot(data)).close()
    with pytest.raises(ImpError, match="nothing.*No such file"):
        Snapshot.read(tmp_path / "nothing")
    with pytest.raises(ImpError, match="nowhere"):
        Snapshot(data).write(tmp_path / "nowhere" / "s")


def test_foreign_and_too_long(model: Load) -> None:
    with Session(model("base"), n_ctx=64, n_threads=1) as session:
        seq = session.open()
        seq.extend(list(range(40)))
        snapshot = seq.save()
    with (
        Session(model("options"), n_ctx=64, n_threads=1) as session,
        pytest.raises(ImpError, match="^x: a snapshot of another model$"),
    ):
        session.restore(Snapshot(snapshot.data, "x"))
    with (
        Session(model("base"), n_ctx=39, n_threads=1) as session,
        pytest.raises(ImpError, match="40 tokens.* 39"),
    ):
        session.restore(snapshot)
    with (
        Session(model("base"), n_ctx=64, cache_tokens=32, n_threads=1) as session,
        pytest.raises(ImpError, match="cache pages: 3 needed, 2 available"),
    ):
        session.restore(snapshot)
    assert session is not None


def test_a_shortage_leaves_nothing_behind(model: Load) -> None:
    with Session(model("base"), n_ctx=64, max_seqs=2, cache_tokens=64, n_threads=1) as session:
        seq = session.open()
        seq.extend(list(range(40)))
        snapshot = seq.save()
        with pytest.raises(ImpError, match="3 needed, 1 available"):
            session.restore(snapshot)
        seq.close()
        assert (session.core.free_pages, session.core.free_rows) == (4, 2)
        session.restore(snapshot)
