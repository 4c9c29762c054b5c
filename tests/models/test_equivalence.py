"""A sequence's logits do not depend on how its tokens arrive or on what else the session holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Sequence, Session
from tests.models.golden import MODELS, Golden

Load = Callable[[str], Model]
# Of the largest logit. Sums may be grouped differently; no decision is close in these tokens.
TOLERANCE = 1e-5
# Conv tails, the first sparse token, the borders of delta chunks, the end.
FORKS = (1, 3, 37, 64, 129, 189)


@pytest.fixture(params=MODELS)
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


# ---------------------------------------------------------------- bit for bit
# A sequence's delta-net may run whole chunks of its own tokens in a parallel form. Cuts on that
# grid change nothing at all; cuts elsewhere change rounding.
GRID = 64
PIECES = [1, 5, 57, GRID, 2 * GRID, (1, 5, 57, 64, 2, 63), (GRID, 190)]


def cuts(pieces: int | tuple[int, ...], n: int) -> list[int]:
    """Sizes that add up to n."""
    sizes = [pieces] if isinstance(pieces, int) else list(pieces)
    out: list[int] = []
    while sum(out) < n:
        out.append(min(sizes[len(out) % len(sizes)], n - sum(out)))
    return out


def in_pieces(session: Session, tokens: list[int], sizes: list[int]) -> np.ndarray:
    with session.open() as seq:
        at, rows = 0, []
        for n in sizes:
            rows.append(run(seq, tokens[at : at + n]))
            at += n
    return np.concatenate(rows)


def on_grid(sizes: list[int], n_ubatch: int) -> bool:
    """Every step of a call begins and ends on the grid, or at the end of the tokens."""
    ends = np.cumsum(sizes)[:-1]
    split = max(sizes) > n_ubatch and n_ubatch % GRID != 0
    return not split and bool((ends % GRID == 0).all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 512])
def test_pieces_and_step_sizes(name: str, n_ubatch: int, model: Load) -> None:
    tokens = Golden(name).tokens("long")
    with Session(model(name), n_ctx=192, n_ubatch=512, n_threads=1) as session:
        want = whole(session, tokens)
    options = {"n_ctx": 192, "n_ubatch": n_ubatch, "n_threads": 1}
    with Session(model(name), poison=True, **options) as session:
        for pieces in PIECES:
            sizes = cuts(pieces, len(tokens))
            got = in_pieces(session, tokens, sizes)
            assert same(got, want), pieces
            if on_grid(sizes, n_ubatch):
                np.testing.assert_array_equal(got, want, str(pieces))
            if n_ubatch == 512:  # the same calls give the same bits
                np.testing.assert_array_equal(in_pieces(session, tokens, sizes), got, str(pieces))


@pytest.mark.parametrize("name", MODELS)
def test_several_sequences_in_one_step(name: str, model: Load) -> None:
    """Each as if it were alone, bit for bit, in any order."""
    long = Golden(name).tokens("long")
    texts = [long, long[::-1][:100], long[30:160], long[:1] * 64]
    with Session(
        model(name), n_ctx=192, max_seqs=8, n_ubatch=256, n_threads=1, poison=True
    ) as session:
        sizes = [1, 7, 64, 13]
        alone = [in_pieces(session, t, cuts(s, len(t))) for t, s in zip(texts, sizes, strict=True)]
        rng = np.random.RandomState(1)
        for _ in range(2):
            seqs = [session.open() for _ in texts]
            at = [0] * len(texts)
            while any(a < len(t) for a, t in zip(at, texts, strict=True)):
                turn = [int(i) for i in rng.permutation(len(texts)) if at[i] < len(texts[i])]
                turn = turn[: 1 + rng.randint(len(turn))]
                parts = [np.array(texts[i][at[i] : at[i] + sizes[i]], np.int32) for i in turn]
                skips = [int(rng.randint(0, len(p) + 1)) for p in parts]
                logits = session.core.step(
                    [(seqs[i].id, p, s) for i, p, s in zip(turn, parts, skips, strict=True)]
                )
                row = 0
                for i, p, s in zip(turn, parts, skips, strict=True):
                    want = alone[i][at[i] + s : at[i] + len(p)]
                    np.testing.assert_array_equal(logits[row : row + len(want)], want)
                    row += len(want)
                    at[i] += len(p)
                assert row == len(logits)
            for seq in seqs:
                seq.close()


@pytest.mark.parametrize("name", MODELS)
def test_fork_is_replay_bit_for_bit(name: str, model: Load) -> None:
    """With the same cuts; both branches go on, the elder first or last."""
    tokens = Golden(name).tokens("long")
    with Session(
        model(name), n_ctx=192, max_seqs=4, n_ubatch=64, n_threads=1, poison=True
    ) as session:
        for at in (1, 15, 16, 17, 64, 100):
            branches = [tokens[at : at + 50], tokens[::-1][:50]]
            want = [in_pieces(session, tokens[:at] + b, [at, len(b)])[at:] for b in branches]
            for order in ((0, 1), (1, 0)):
                elder = session.open()
                elder.extend(tokens[:at], outputs="none")
                pair = (elder, elder.fork())
                for i in order:
                    np.testing.assert_array_equal(run(pair[i], branches[i]), want[i], str(at))
                for s in pair:
                    s.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_matter(threads: int, model: Load) -> None:
    for name in MODELS:
        tokens = Golden(name).tokens("long")
        with Session(model(name), n_ctx=192, n_threads=2) as session:
            want = whole(session, tokens)
        with Session(model(name), n_ctx=192, n_threads=threads) as session:
            np.testing.assert_array_equal(whole(session, tokens), want)


# ---------------------------------------------------------------- the shipped model


def test_prose_in_pieces(model: Load) -> None:
    tokens = [int(t) for t in Golden("prose")["tokens"][:192]]
    with Session(model("prose"), n_ctx=192) as session:
        want = whole(session, tokens)
        for pieces in (64, 57, (100, 1, 1, 1)):
            sizes = cuts(pieces, len(tokens))
            got = in_pieces(session, tokens, sizes)
            assert same(got, want), pieces
            if on_grid(sizes, session.n_ubatch):
                np.testing.assert_array_equal(got, want)


def test_prose_decodes_as_it_reads(model: Load) -> None:
    tokens = [int(t) for t in Golden("prose")["tokens"][:100]]
    with Session(model("prose"), n_ctx=128, max_seqs=2, poison=True) as session:
        want = whole(session, tokens)
        seq = session.open()
        seq.extend(tokens[:60])
        fork = seq.fork()
        for s in (seq, fork):
            got = np.concatenate([run(s, [t]) for t in tokens[60:]])
            assert same(got, want[60:])
