"""Keys and values that are stored rounded: every way to the same tokens gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import CACHE_TYPES, Sequence, Session
from tests.models.golden import Golden

Load = Callable[[str], Model]
PAIRS = [("f16", "f16"), ("bf16", "f32"), ("q8_0", "bf16"), ("f32", "q8_0"), ("q8_0", "q8_0")]
PARTS = (1, 15, 16, 17, 64, 100)  # pages and index blocks around
ROLLBACK = 4
WINDOW = 512


def types(pair: tuple[str, str]) -> dict[str, str]:
    return {"cache_type_k": pair[0], "cache_type_v": pair[1]}


def run(seq: Sequence, tokens: list[int]) -> np.ndarray:
    return np.array(seq.extend(tokens, outputs="all"))


def whole(session: Session, tokens: list[int]) -> np.ndarray:
    with session.open() as seq:
        return run(seq, tokens)


CASES = [*(("base", pair) for pair in PAIRS), ("dense_attention", ("bf16", "f16"))]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, model: Load) -> Iterator[tuple[Session, list[int]]]:
    name, pair = request.param
    options = {"n_ctx": 192, "max_seqs": 4, "n_ubatch": 256, "n_threads": 1, "poison": True}
    with Session(model(name), rollback_tokens=ROLLBACK, **options, **types(pair)) as session:
        yield session, Golden(name).tokens("long")


def test_pieces(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    want = whole(session, tokens)
    assert np.isfinite(want).all()
    for sizes in ([1] * 40, [64, 64], [5, 57, 2], [17] * 5):
        with session.open() as seq:
            at = 0
            for n in [*sizes, len(tokens) - sum(sizes)]:
                np.testing.assert_array_equal(run(seq, tokens[at : at + n]), want[at : at + n])
                at += n


def test_a_batch_is_its_sequences_alone(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    texts = [tokens[:90], tokens[::-1][:33], tokens[50:51]]
    want = [whole(session, t) for t in texts]
    seqs = [session.open() for _ in texts]
    requests = [(s.id, np.array(t, np.int32), 0) for s, t in zip(seqs, texts, strict=True)]
    got = np.array(session.core.step(requests))
    np.testing.assert_array_equal(got, np.concatenate(want))
    for seq in seqs:
        seq.close()


def test_fork_truncate_restore(case: tuple[Session, list[int]]) -> None:
    session, tokens = case
    want = whole(session, tokens)
    for at in PARTS:
        seq = session.open()
        seq.extend(tokens[:at])
        branches = [seq.fork(), session.restore(seq.save())]
        seq.extend(tokens[::-1][:ROLLBACK])  # goes elsewhere and comes back
        seq.truncate(at)
        for branch in (*branches, seq):
            np.testing.assert_array_equal(run(branch, tokens[at:]), want[at:], str(at))
            branch.close()
    assert session.core.free_pages == session.core.pages


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_rounding_shows_and_is_small(pair: tuple[str, str], model: Load) -> None:
    """KL divergence from exact storage on the shipped model, nats a token."""
    tokens = [int(t) for t in Golden("prose")["tokens"][:WINDOW]]

    def log_probs(**options: str) -> np.ndarray:
        with Session(model("prose"), n_ctx=WINDOW, **options) as session:
            x = whole(session, tokens).astype(float)
        x -= x.max(axis=1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))

    exact, rounded = log_probs(), log_probs(**types(pair))
    kl = (np.exp(exact) * (exact - rounded)).sum(axis=1)
    assert 1e-9 < kl.mean() < 2e-4


def test_pages_take_what_they_store(model: Load) -> None:
    loaded = model("base")
    tokens, values, layers, index = 16, 2 * 32, 2, 16 // 4 * 16 * 4
    size = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
    for k in CACHE_TYPES:
        for v in CACHE_TYPES:
            page = layers * (tokens * values * (size[k] + size[v]) + index)
            assert _core.memory_cost(loaded.arch, loaded.keys, k, v)["page_bytes"] == page
            with Session(loaded, n_ctx=32, **types((k, v))) as session:
                assert session.core.cache_types == (k, v)
                assert session.core.page_bytes == page
                with session.open() as seq:
                    before = len(seq.save().data)
                    seq.extend([1])
                    assert len(seq.save().data) - before == page + 4  # and a token


def test_room_is_counted_in_what_is_stored(model: Load) -> None:
    loaded, n_ctx = model("base"), 2**30
    for pair in (("f32", "f32"), ("f16", "q8_0")):
        cost = _core.memory_cost(loaded.arch, loaded.keys, *pair)
        needed = n_ctx // 16 * cost["page_bytes"] + cost["row_bytes"]
        with pytest.raises(ImpError, match=f"need {needed} bytes of cache and state"):
            Session(loaded, n_ctx=n_ctx, **types(pair))


def test_a_snapshot_of_other_types(model: Load) -> None:
    with Session(model("base"), n_ctx=64, **types(("f16", "q8_0"))) as session:
        seq = session.open()
        seq.extend(list(range(20)))
        snapshot = seq.save()
    for pair in (("f32", "f32"), ("bf16", "q8_0"), ("q8_0", "f16")):  # the second of equal size
        with Session(model("base"), n_ctx=64, **types(pair)) as session:
            with pytest.raises(ImpError) as e:
                session.restore(snapshot)
            assert str(e.value) == (
                "the snapshot: a snapshot of f16 keys and q8_0 values, "
                f"the session stores {pair[0]} keys and {pair[1]} values"
            )
            assert session.core.free_pages == session.core.pages


def test_heads_that_are_not_whole_blocks(model: Load) -> None:
    dim = model("dense_attention").keys["qwen4exp.attention.key_length"]
    assert dim % 32
    for pair in (("q8_0", "f32"), ("f16", "q8_0")):
        with pytest.raises(ImpError) as e:
            Session(model("dense_attention"), n_ctx=16, **types(pair))
        assert str(e.value) == (
            f"cache type q8_0 needs heads of a multiple of 32 dimensions, the model's have {dim}"
        )


def test_unknown_types(model: Load) -> None:
    for name in ("q4_0", "F16", ""):
        with pytest.raises(ImpError, match=f"cache type {name} is not supported, only f32, f16,"):
            Session(model("base"), n_ctx=16, cache_type_v=name)
