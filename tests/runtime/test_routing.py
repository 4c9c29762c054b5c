"""Planted and recorded routing in a session."""

from __future__ import annotations

import numpy as np
import pytest

from imp_runtime import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Session

SPEC = "flash-next:layers=2,experts=24,vocab=64,table=64"


def chosen(model: Model, tokens: list[int], **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids [tokens, layers, k] of a run, token by token, and the last logits."""
    with Session(model, n_ctx=64, taps=["blk.*.expert_ids"], **options) as session:  # type: ignore[arg-type]
        with session.open() as seq:
            steps = []
            for t in tokens:
                logits = seq.extend([t]).copy()
                taps = session.taps()
                steps.append(np.stack([taps[f"blk.{i}.expert_ids"][0] for i in range(2)]))
    return np.stack(steps), logits


def test_recorded_ids_replace_the_routers_and_come_round_again() -> None:
    model = Model.synthetic(SPEC, device="cpu")
    tokens = [3, 1, 4, 1, 5]
    own, logits = chosen(model, tokens)
    again, same = chosen(model, tokens, routing=own.astype(np.uint16))
    np.testing.assert_array_equal(again, own)
    np.testing.assert_array_equal(same, logits)
    rng = np.random.RandomState(1)
    ids = np.stack([[rng.permutation(24)[:10] for _ in range(2)] for _ in range(3)])
    got, other = chosen(model, tokens, routing=ids.astype(np.uint16))
    np.testing.assert_array_equal(got, ids[[0, 1, 2, 0, 1]])
    assert not np.array_equal(other, logits)


def test_planted_routing_repeats_and_names_itself() -> None:
    model = Model.synthetic(SPEC, device="cpu")
    first, _ = chosen(model, [1, 2, 3], routing="prose")
    second, _ = chosen(model, [7, 8, 9], routing="prose")
    np.testing.assert_array_equal(first, second)
    assert all(len(set(row)) == 10 for step in first for row in step)
    with Session(model, n_ctx=32, routing="uniform") as session:
        assert session.routing == "uniform"


def test_refusals() -> None:
    model = Model.synthetic(SPEC, device="cpu")
    with pytest.raises(ImpError, match="routing 'poetry': prose or uniform"):
        Session(model, n_ctx=32, routing="poetry")
    with pytest.raises(ImpError, match="3 layers, 10 experts a token; the model has 2 and 10"):
        Session(model, n_ctx=32, routing=np.zeros((1, 3, 10), np.uint16))
    with pytest.raises(ImpError, match="0 recorded experts"):
        Session(model, n_ctx=32, routing=np.zeros((0, 2, 10), np.uint16))
    bad = np.full((1, 2, 10), 24, np.uint16)
    with Session(model, n_ctx=32, routing=bad) as session, session.open() as seq:
        with pytest.raises(ImpError, match="planted expert 24 of 24 in layer 0"):
            seq.extend([1])
