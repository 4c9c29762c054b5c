"""Cutting into steps, token sources, sharing of sessions, the probe of the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imp_runtime.bench import RandomTokens, TextTokens, machine, measure_ceiling, samples
from imp_runtime.bench.sessions import Need, Sessions
from imp_runtime.bench.steps import pieces
from imp_runtime.errors import ImpError


@pytest.mark.parametrize(
    ("lengths", "n_batch", "n_ubatch", "want"),
    [
        ([4], 8, 8, [[(0, 0, 4)]]),
        ([4, 4], 8, 8, [[(0, 0, 4), (1, 0, 4)]]),
        ([5, 5], 8, 4, [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)], [(1, 3, 5)]]),
        ([7], 5, 4, [[(0, 0, 4)], [(0, 4, 5)], [(0, 5, 7)]]),  # a batch ends inside a step
        ([0, 0], 8, 8, []),
        ([0, 2], 8, 8, [[(1, 0, 2)]]),
    ],
)
def test_pieces(lengths: list[int], n_batch: int, n_ubatch: int, want: list[object]) -> None:
    assert list(pieces(lengths, n_batch, n_ubatch)) == want


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 30), st.integers(1, 30))
def test_pieces_cover_everything_once(lengths: list[int], n_batch: int, n_ubatch: int) -> None:
    steps = list(pieces(lengths, n_batch, n_ubatch))
    done = [0] * len(lengths)
    total = 0
    for step in steps:
        size = 0
        assert len({index for index, *_ in step}) == len(step)
        for index, begin, end in step:
            assert begin == done[index] < end
            done[index] = end
            size += end - begin
        assert size <= n_ubatch
        # No step lies across the end of a logical batch.
        assert total // n_batch == (total + size - 1) // n_batch
        total += size
    assert done == lengths


def test_random_tokens() -> None:
    source = RandomTokens(50, seed=3)
    tokens = source.take(20, 30)
    assert tokens.dtype == np.int32 and tokens.shape == (20, 30)
    assert set(tokens.flat) == set(range(50))
    np.testing.assert_array_equal(tokens, source.take(20, 30))
    assert (tokens != RandomTokens(50, seed=4).take(20, 30)).any()
    assert source.label == "random (seed 3)"
    assert (RandomTokens(50, bos_id=49).take(3, 5)[:, 0] == 49).all()
    assert RandomTokens(50, bos_id=49).take(3, 0).shape == (3, 0)


def test_text_tokens() -> None:
    source = TextTokens.of([5, 6, 7, 8, 9], "a.txt")
    assert source.take(2, 2).tolist() == [[5, 6], [7, 8]]
    assert source.take(2, 3).tolist() == [[5, 6, 7], [8, 9, 5]]
    assert source.take(2, 0).shape == (2, 0)
    assert source.label == "text a.txt (5 tokens)"
    with pytest.raises(ImpError, match=r"a\.txt holds no tokens"):
        TextTokens.of([], "a.txt")


class FakeSession:
    opened: list[Need] = []
    closed = 0

    def close(self) -> None:
        FakeSession.closed += 1


def test_sessions_share_or_split() -> None:
    def opens(limit: int) -> tuple[list[str], list[Need]]:
        FakeSession.opened, FakeSession.closed = [], 0

        def open_session(need: Need) -> FakeSession:
            if need.n_ctx * need.max_seqs > limit:
                raise ImpError(f"{need.n_ctx * need.max_seqs} tokens, {limit} fit")
            FakeSession.opened.append(need)
            return FakeSession()

        got = []
        needs = [Need(10, 1), Need(4, 8), Need(40, 1)]
        with Sessions(open_session, needs) as sessions:  # type: ignore[arg-type]
            for need in needs:
                try:
                    sessions.get(need)
                    got.append("")
                except ImpError as error:
                    got.append(str(error))
        assert FakeSession.closed == len(FakeSession.opened)
        return got, FakeSession.opened

    assert opens(320) == (["", "", ""], [Need(40, 8)])
    assert opens(319) == (["", "", ""], [Need(10, 1), Need(4, 8), Need(40, 1)])
    assert opens(39) == (["", "", "40 tokens, 39 fit"], [Need(10, 1), Need(4, 8)])


def test_samples() -> None:
    assert samples.deviation([5.0]) == 0 and samples.deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert samples.median([9.0, 1.0, 2.0]) == 2 and samples.median([]) == 0
    assert samples.rate(6, 2.0) == 3 and samples.rate(6, 0.0) == 0 and samples.rate(0, 2.0) == 0


def test_cpu_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some: CPU\nmodel name\t: other\n")
    assert machine.cpu_name(info) == "Some: CPU"
    assert machine.cpu_name(tmp_path / "absent") == ""


def test_probe_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine._core, "system_info", lambda: {"memory_available_bytes": 1 << 28})
    ceiling = measure_ceiling(1)
    assert ceiling.read_bytes == 1 << 26  # a quarter of what is free
    # From slow emulation to the fastest sockets.
    assert 0.05 < ceiling.read_gb_per_s < 5000
    assert 0.05 < ceiling.gflop_per_s < 1e6
    assert "64 MiB" in ceiling.describe() and "threads = 1" in ceiling.describe()


def test_probe_gets_its_threads_and_fails_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "probe.py"
    monkeypatch.setattr(machine, "PROBE", script)
    script.write_text(
        "import json, os, sys\n"
        "same = all(os.environ[n] == sys.argv[1] for n in ('OPENBLAS_NUM_THREADS',"
        " 'OMP_NUM_THREADS', 'MKL_NUM_THREADS'))\n"
        "print(json.dumps({'read_gb_per_s': same, 'read_bytes': 1, 'gflop_per_s': 2}))\n"
    )
    assert measure_ceiling(3) == machine.Ceiling(3, True, 1, 2)
    script.write_text("raise SystemExit('no room')")
    with pytest.raises(ImpError, match="ceiling cannot be measured: no room"):
        measure_ceiling(1)
    script.write_text("print('?')")
    with pytest.raises(ImpError, match="ceiling cannot be measured"):
        measure_ceiling(1)
    monkeypatch.setattr(machine, "PROBE_SECONDS", 0.05)
    script.write_text("import time; time.sleep(5)")
    with pytest.raises(ImpError, match="ceiling cannot be measured"):
        measure_ceiling(1)


def test_probe_script_prints_json() -> None:
    done = subprocess.run(
        [machine.sys.executable, str(machine.PROBE), "2", "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == {"read_gb_per_s", "read_bytes", "gflop_per_s"}
