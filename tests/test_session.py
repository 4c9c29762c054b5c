"""Sessions and sequences from Python: limits, errors that leave things as they were, threads,
Ctrl-C, and views that outlive what they show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from imp_runtime import ImpError, Model, Session
from tests.models import tiny

TEXT = [int(t) for t in np.random.RandomState(1).randint(0, 300, 400)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with every block, converted."""
    from imp_runtime.convert import ConvertOptions, convert

    folder = tmp_path_factory.mktemp("session")
    convert(tiny.write(folder / "base", "base"), folder / "base.gguf", ConvertOptions())
    return folder / "base.gguf"


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return Model.load(path)


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with Session(model, n_ctx=128, max_seqs=3, n_ubatch=32, n_threads=1, poison=True) as s:
        yield s


def logits(session: Session, tokens: list[int]) -> np.ndarray:
    with session.open() as seq:
        return np.array(seq.extend(tokens, outputs="all"))


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n_ctx": -1}, ["context of -1", "1073741824"]),
        ({"n_ctx": 2**30 + 1}, ["1073741825", "1073741824"]),
        ({"max_seqs": 0}, ["0 sequences", "65536"]),
        ({"max_seqs": 65537, "n_ctx": 16}, ["65537 sequences", "65536"]),
        ({"n_ubatch": 0}, ["steps of 0", "65536"]),
        ({"n_ubatch": 65537}, ["steps of 65537", "65536"]),
        ({"max_outputs": -1}, ["logits of -1", "65536"]),
        ({"max_outputs": 65537}, ["logits of 65537", "65536"]),
        ({"n_threads": -1}, ["-1 threads", "1024"]),
        ({"n_threads": 1025}, ["1025 threads", "1024"]),
        ({"kernels": "sse"}, ["'sse'", "generic"]),
        ({"n_ctx": 2**30, "max_seqs": 65536}, ["65536 sequences", "available"]),
    ],
    ids=str,
)
def test_options_are_refused(model: Model, options: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ImpError) as error:
        Session(model, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


def test_smallest_and_largest_options(model: Model) -> None:
    with Session(model, n_ctx=1, n_ubatch=1, n_threads=1) as s, s.open() as seq:
        assert seq.extend([1]).shape == (1, model.vocab_size)
        with pytest.raises(ImpError, match="2 tokens in a context of 1"):
            seq.extend([1])
    with Session(model, n_ctx=16, n_ubatch=65536, max_seqs=65536, n_threads=1024) as s:
        assert s.n_ubatch == 65536
    with Session(model) as s:
        assert s.n_ctx == model.context_length


def test_full_context(session: Session) -> None:
    with session.open() as seq:
        seq.extend(TEXT[:127])
        for more in (2, 40):  # within a step, and in several
            with pytest.raises(ImpError, match=f"{127 + more} tokens in a context of 128"):
                seq.extend(TEXT[:more])
            assert seq.length == 127
        seq.extend([5])
        with pytest.raises(ImpError, match="129 tokens in a context of 128"):
            seq.extend([5])
        assert seq.length == 128


def test_sequences_are_counted(session: Session) -> None:
    seqs = [session.open() for _ in range(3)]
    for more in (session.open, seqs[0].fork):
        with pytest.raises(ImpError, match="sequences: 1 needed, 0 available"):
            more()
    seqs[1].close()
    seqs[1].close()  # nothing left to do
    session.open().close()
    with pytest.raises(ImpError, match="closed"):
        seqs[1].extend([1])


@pytest.mark.parametrize("bad", [-1, 311, 2**31 - 1, -(2**31), 2**31, 2**40])
@pytest.mark.parametrize("at", [0, 3, 70])
def test_token_outside_the_vocabulary(session: Session, bad: int, at: int) -> None:
    tokens = TEXT[:90]
    tokens[at] = bad
    with session.open() as seq:
        seq.extend(TEXT[:5])
        with pytest.raises(ImpError, match=str(bad)):
            seq.extend(tokens)
        with pytest.raises(ImpError, match=str(bad)):
            seq.score(tokens)
        assert seq.tokens == TEXT[:5]


@pytest.mark.parametrize("tokens", [[], [[1, 2]], 5, [1.5], ["a"], np.array([1.0]), None], ids=repr)
def test_not_a_list_of_tokens(session: Session, tokens: object) -> None:
    with session.open() as seq:
        with pytest.raises(ImpError):
            seq.extend(tokens)  # type: ignore[arg-type]
        assert seq.length == 0


def test_kinds_of_tokens(session: Session) -> None:
    want = logits(session, TEXT[:10])
    for kind in (np.int64, np.uint16, np.int32):
        np.testing.assert_array_equal(logits(session, np.array(TEXT[:10], kind)), want)  # type: ignore[arg-type]
    every_second = np.array(TEXT[:20], np.int32)
    every_second[::2] = TEXT[:10]
    np.testing.assert_array_equal(logits(session, every_second[::2]), want)  # type: ignore[arg-type]


def test_outputs(session: Session) -> None:
    for n in (20, 70):  # one step, and three
        want = logits(session, TEXT[:n])
        cases = {
            "last": n - 1,
            "all": 0,
            "none": n,
            0: 0,
            7: 7,
            n - 1: n - 1,
            n: n,
            np.int64(40): 40,
        }
        for outputs, first in cases.items():
            if first <= n:
                with session.open() as seq:
                    got = seq.extend(TEXT[:n], outputs=outputs)  # type: ignore[arg-type]
                    np.testing.assert_array_equal(got, want[first:])
        for bad in (-1, n + 1, "first", "every"):
            with session.open() as seq:
                with pytest.raises(ImpError, match=str(bad)):
                    seq.extend(TEXT[:n], outputs=bad)  # type: ignore[arg-type]
                assert seq.length == 0


def test_few_outputs_take_more_steps(model: Model) -> None:
    tokens = TEXT[:50]
    with (
        Session(model, n_ctx=64, n_ubatch=32) as usual,
        Session(model, n_ctx=64, n_ubatch=32, max_outputs=3) as few,
    ):
        assert (usual.max_outputs, few.max_outputs) == (32, 3)
        want = logits(usual, tokens)
        np.testing.assert_array_equal(logits(few, tokens), want)
        with few.open() as seq, usual.open() as other:
            np.testing.assert_array_equal(seq.score(tokens), other.score(tokens))
        ids = np.array(tokens, np.int32)
        with few.open() as seq:
            np.testing.assert_array_equal(few.core.step([(seq.id, ids[:20], 17)]), want[17:20])
            with pytest.raises(ImpError, match="a step with logits of 4 tokens, at most 3"):
                few.core.step([(seq.id, ids[20:40], 16)])
            np.testing.assert_array_equal(few.core.step([(seq.id, ids[20:23], 0)]), want[20:23])


def test_core_checks_for_itself(session: Session) -> None:
    """What the Python layer checks first, the core refuses as well."""
    seq = session.open()
    ids = np.array([1, 2], np.int32)
    step = session.core.step
    for requests, words in [
        ([], "a step of 0 tokens"),
        ([(seq.id, ids, 0), (seq.id, ids, 0)], "twice"),
        ([(seq.id + 9, ids, 0)], "not open"),
        ([(seq.id, ids[:0], 0)], "without tokens"),
        ([(seq.id, ids, 3)], "first output 3 of 2"),
        ([(seq.id, np.array([311], np.int32), 0)], "token 311"),
        ([(seq.id, np.zeros(33, np.int32), 0)], "a step of 33 tokens, at most 32"),
    ]:
        with pytest.raises(ImpError, match=words):
            step(requests)
    with pytest.raises(TypeError):
        step([(seq.id, ids.astype(np.float32), 0)])  # never converted silently
    assert seq.length == 0


# ---------------------------------------------------------------- lifetimes


def test_closed_session(model: Model) -> None:
    s = Session(model, n_ctx=64)
    seq = s.open()
    s.close()
    for use in (lambda: seq.extend([1]), s.open, lambda: seq.length, s.taps and (lambda: s.n_ctx)):
        with pytest.raises(ImpError, match="session is closed"):
            use()
    with pytest.raises(ImpError, match="session is closed"):
        s.close()


def test_session_outlives_the_handle_of_its_model(path: Path) -> None:
    handle = Model.load(path)
    with Session(handle, n_ctx=128, n_ubatch=32) as s, s.open() as seq:
        handle.close()
        assert np.isfinite(seq.extend(TEXT[:100], outputs="all")).all()
        with pytest.raises(ImpError, match="model is closed"):
            _ = handle.path


OLD_VIEWS = """
import sys
import numpy as np
from imp_runtime import Model, Session
session = Session(Model.load(sys.argv[1]), n_ctx=512, n_ubatch=512)
seq = session.open()
view = seq.extend([1, 2, 3])
assert not view.flags.writeable
before = np.array(view)
if sys.argv[2] == "larger step":
    seq.extend(list(range(1, 300)), outputs="all")
else:
    session.close()
    del session, seq
view.sum()  # what it holds is open, but it must be there
print("alive")
"""


@pytest.mark.parametrize("after", ["larger step", "close"])
def test_an_old_view_never_crashes(path: Path, after: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", OLD_VIEWS, str(path), after], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout == "alive\n", run.stderr


def test_poison_is_never_read(model: Model) -> None:
    """Freed and fresh memory is NaN; what a sequence computes never is."""
    with Session(model, n_ctx=96, max_seqs=2, n_ubatch=32, poison=True) as s:
        want = logits(s, TEXT[:40])
        assert np.isfinite(want).all()
        for n in (1, 17, 96, 5):
            other = logits(s, TEXT[100 : 100 + n])
            assert np.isfinite(other).all()
            np.testing.assert_array_equal(logits(s, TEXT[:40]), want)
    with Session(model, n_ctx=96, max_seqs=2, n_ubatch=32) as clean:
        np.testing.assert_array_equal(logits(clean, TEXT[:40]), want)


def test_everything_comes_back(session: Session) -> None:
    pages, rows = session.core.free_pages, session.core.free_rows
    for _ in range(3):
        a = session.open()
        a.extend(TEXT[:50])
        b = a.fork()
        b.extend(TEXT[:40])
        assert session.core.free_pages < pages and session.core.free_rows == rows - 2
        a.close()
        c = b.fork()
        b.close()
        c.extend(TEXT[:3])
        c.close()
        assert (session.core.free_pages, session.core.free_rows) == (pages, rows)


def test_two_sessions_over_one_model(model: Model) -> None:
    with (
        Session(model, n_ctx=128, n_ubatch=13) as a,
        Session(model, n_ctx=128, n_threads=1) as b,
        a.open() as x,
        b.open() as y,
    ):
        for begin in range(0, 100, 20):
            part = TEXT[begin : begin + 20]
            got = np.array(x.extend(part, outputs="all"))
            np.testing.assert_array_equal(y.extend(part, outputs="all"), got)


# ---------------------------------------------------------------- threads and signals


def test_a_second_thread_gets_an_error(model: Model) -> None:
    text = np.array((TEXT * 11)[:4096], np.int32)
    with Session(model, n_ctx=8192, max_seqs=2, n_ubatch=4096) as s:
        long, short = s.open(), s.open()
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                try:
                    s.core.step([(long.id, text, len(text))])
                    done.set()
                except ImpError as error:  # the main thread was inside
                    assert "busy in another thread" in str(error)

        thread = threading.Thread(target=work)
        thread.start()
        refused = False
        while not refused:
            assert not done.is_set(), "the step was over before anybody else asked"
            try:
                s.core.length(short.id)
            except ImpError as error:
                assert "busy in another thread" in str(error)
                refused = True
        for use in (s.close, s.open, short.fork, lambda: short.extend([1])):
            with pytest.raises(ImpError, match="busy in another thread"):
                use()
        assert not done.is_set()
        thread.join()
        assert done.is_set() and long.length == len(text)
        short.extend([1])


def test_two_threads_in_two_sessions(model: Model) -> None:
    results: list[np.ndarray] = []

    def work() -> None:
        with Session(model, n_ctx=128, n_ubatch=32) as s:
            for _ in range(5):
                results.append(logits(s, TEXT[:100]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 10
    for r in results:
        np.testing.assert_array_equal(r, results[0])


def test_ctrl_c_between_steps(model: Model) -> None:
    """The interrupt comes out soon; the sequence has whole steps and goes on."""
    text = (TEXT * 50)[:8000]
    with Session(model, n_ctx=8192, max_seqs=2, n_ubatch=16) as s, s.open() as seq:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            seq.extend(text, outputs="none")
        timer.join()
        done = seq.length
        assert 0 < done < len(text) and done % 16 == 0
        assert seq.tokens == text[:done]
        got = np.array(seq.extend(text[done : done + 20], outputs="all"))
        with s.open() as other:
            want = other.extend(text[: done + 20], outputs=done)
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 86400.1])
def test_step_timeouts_have_limits(model: Model, seconds: float) -> None:
    with pytest.raises(ImpError, match=r"a step timeout of .* s; imp takes more than 0 to 86400"):
        Session(model, n_ctx=16, step_timeout=seconds)
    with Session(model, n_ctx=16, step_timeout=86400.0) as session:
        assert session.verify_experts().slots == 0  # no cache on the CPU
