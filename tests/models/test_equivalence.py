"""A sequence's logits do not depend on how its tokens arrive or on what else the session holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Sequence, Session
from tests.models import tiny
from tests.models.golden import Golden

Load = Callable[[str], Model]
# Of the largest logit. Sums may be grouped differently; no decision is close in these tokens.
TOLERANCE = 1e-5
# Conv tails, the first sparse token, the borders of delta chunks, the end.
FORKS = (1, 3, 37, 64, 129, 189)


@pytest.fixture(params=tiny.RECIPES)
def case(request: pytest.FixtureRequest, model: Load) -> Iterator[tuple[Session, list[int]]]:
    name = request.param
    with Session(
        model(name), n_ctx=192, max_seqs=4, n_ubatch=64, n_threads=1, poison=True
    ) as session:
        yield session, Golden(name).tokens("long")


def run(seq: Sequence, tokens: list[int]) -> np.ndarray:
    return np.array(seq.extend(tokens, outputs="all"))


def whole(session: Session, tokens: list[int]) -> np.ndarray:
    with session.open() as seq:
        return run(seq, tokens)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got - want).max() <= TOLERANCE * np.abs(want).max())


def test_fork_is_replay(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    want = whole(session, tokens)
    for at in FORKS:
        seq = session.open()
        seq.extend(tokens[:at])
        first = seq.fork()
        second = first.fork()
        seq.extend([7, 9, 11])  # the original goes elsewhere
        for fork in (first, second):
            assert same(run(fork, tokens[at:]), want[at:]), at
        for s in (seq, first, second):
            s.close()


def test_sequences_do_not_see_each_other(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    texts = [tokens, tokens[::-1], tokens[50:150]]
    want = [whole(session, t) for t in texts]
    seqs = [session.open() for _ in texts]
    got: list[list[np.ndarray]] = [[] for _ in texts]
    at = [0] * len(texts)
    sizes = [1, 2, 5, 19, 3, 13]
    turn = 0
    while any(a < len(t) for a, t in zip(at, texts, strict=True)):
        for i, text in enumerate(texts):
            turn += 1
            piece = text[at[i] : at[i] + sizes[turn % len(sizes)]]
            if piece:
                got[i].append(run(seqs[i], piece))
                at[i] += len(piece)
    for parts, w in zip(got, want, strict=True):
        assert same(np.concatenate(parts), w)


def test_a_closed_sequence_leaves_nothing_behind(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    want = whole(session, tokens[:20])
    for _ in range(5):  # more than there are slots
        whole(session, tokens[::-1][:70])
        assert same(whole(session, tokens[:20]), want)


def test_a_refused_token_changes_nothing(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    want = whole(session, tokens)
    with session.open() as seq:
        first = run(seq, tokens[:40])
        for bad in (-1, session.model.vocab_size):
            with pytest.raises(ImpError, match=str(bad)):
                seq.extend([tokens[40], bad])
        with pytest.raises(ImpError, match="192"):
            seq.extend(tokens[:20] * 8)  # 200 tokens in all, several steps
        assert seq.length == 40
        assert same(np.concatenate([first, run(seq, tokens[40:])]), want)
