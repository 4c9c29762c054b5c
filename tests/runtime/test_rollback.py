"""What was taken back has never happened."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Sequence, Session
from tests.models.golden import MODELS, Golden

Load = Callable[[str], Model]
ROLLBACK = 8


def run(seq: Sequence, tokens: list[int]) -> np.ndarray:
    return np.array(seq.extend(tokens, outputs="all"))


@pytest.mark.parametrize("name", MODELS)
def test_truncate_and_continue(name: str, model: Load) -> None:
    tokens = Golden(name).tokens("long")
    other = tokens[::-1]
    options = {"n_ctx": 192, "n_ubatch": 64, "n_threads": 1, "poison": True}
    with Session(model(name), max_seqs=2, rollback_tokens=ROLLBACK, **options) as session:
        with session.open() as seq:
            want = np.concatenate([run(seq, tokens[:96]), run(seq, tokens[96:160])])
        for at in (1, 7, 15, 16, 17, 31, 32, 33, 64, 100):  # pages and blocks around
            for back in (1, 3, ROLLBACK):
                for size in (1, 5, back):  # how the tokens to take back came
                    seq = session.open()
                    got = [run(seq, tokens[:at])]
                    for i in range(0, back, size):
                        seq.extend(other[i : min(i + size, back)], outputs="none")
                    seq.truncate(at)
                    assert seq.tokens == tokens[:at]
                    got.append(run(seq, tokens[at : at + 40]))
                    np.testing.assert_array_equal(np.concatenate(got), want[: at + 40], f"{at}")
                    seq.close()
        assert session.core.free_pages == session.core.pages


def test_a_fork_does_not_feel_it(model: Load) -> None:
    tokens = Golden("base").tokens("long")
    with Session(
        model("base"), n_ctx=192, max_seqs=3, n_threads=1, poison=True, rollback_tokens=ROLLBACK
    ) as session:
        with session.open() as seq:
            want = run(seq, tokens[:80])
        for at in (20, 32, 35):
            seq = session.open()
            seq.extend(tokens[: at - 4])
            seq.extend(tokens[at - 4 : at])
            fork = seq.fork()
            seq.truncate(at - 6)  # rewrites pages that the fork reads
            seq.extend([5, 6, 7])
            np.testing.assert_array_equal(run(fork, tokens[at:80]), want[at:])
            fork.truncate(80 - 3)
            np.testing.assert_array_equal(run(fork, tokens[77:80]), want[77:])
            for s in (seq, fork):
                s.close()
        assert session.core.free_pages == session.core.pages


@pytest.mark.parametrize("name", ["base", "options", "experts512", "prose"])
def test_random_walk(name: str, model: Load) -> None:
    """Any mix of extending, taking back and forking equals reading the tokens that are left."""
    rng = np.random.RandomState(3)
    with Session(
        model(name), n_ctx=128, max_seqs=3, n_threads=1, poison=True, rollback_tokens=ROLLBACK
    ) as session:
        for _ in range(6):
            seq = session.open()
            for _ in range(30):
                length = seq.length
                oldest = session.core.oldest_length(seq.id)
                if rng.randint(3) == 0 and oldest < length:
                    seq.truncate(int(rng.randint(oldest, length)))
                elif rng.randint(6) == 0:
                    fork = seq.fork()
                    seq.close()
                    seq = fork
                elif length < 100:
                    seq.extend(rng.randint(0, 300, 1 + rng.randint(12)), outputs="none")
            got = run(seq, [3, 4])
            with session.open() as fresh:
                np.testing.assert_array_equal(got, run(fresh, seq.tokens)[-2:])
            seq.close()


def test_limits(model: Load) -> None:
    tokens = Golden("base").tokens("long")
    with Session(model("base"), n_ctx=64, n_threads=1, rollback_tokens=ROLLBACK) as session:
        seq = session.open()
        seq.extend(tokens[:20])
        seq.extend(tokens[20:40])
        with pytest.raises(ImpError, match=r"of 40 tokens to 31, it can go back to 32"):
            seq.truncate(39 - ROLLBACK)
        with pytest.raises(ImpError, match=r"to 41 tokens, it has 40"):
            seq.truncate(41)
        with pytest.raises(ImpError, match=r"-1 tokens"):
            seq.truncate(-1)
        assert seq.length == 40
        seq.truncate(40)
        seq.truncate(40 - ROLLBACK)
        assert seq.length == 32
    with Session(model("base"), n_ctx=64, n_threads=1) as session:
        seq = session.open()
        seq.extend(tokens[:20])
        with pytest.raises(ImpError, match=r"to 19, it can go back to 20"):
            seq.truncate(19)
    for bad in (-1, 4097):
        with pytest.raises(ImpError, match=rf"rollback of {bad} tokens.* 4096"):
            Session(model("base"), n_ctx=64, rollback_tokens=bad)
    with Session(model("base"), n_ctx=64, rollback_tokens=4096):
        pass


def test_no_room_for_the_copies(model: Load) -> None:
    """A truncation that cannot have its pages changes nothing."""
    tokens = Golden("base").tokens("long")
    with Session(
        model("base"),
        n_ctx=64,
        max_seqs=2,
        cache_tokens=48,
        n_threads=1,
        poison=True,
        rollback_tokens=ROLLBACK,
    ) as session:
        with session.open() as seq:
            want = run(seq, tokens[:44])
        seq = session.open()
        seq.extend(tokens[:30])
        seq.extend(tokens[30:40])  # three pages, all there are
        fork = seq.fork()
        with pytest.raises(ImpError, match="cache pages: 2 needed, 0 available"):
            seq.truncate(35)
        fork.close()
        assert seq.length == 40
        np.testing.assert_array_equal(run(seq, tokens[40:44]), want[40:])
