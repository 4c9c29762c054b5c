"""Planted and recorded routing in a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from imp_runtime import ImpError, expert_sim, trace
from imp_runtime.model import Model
from imp_runtime.session import Session

SPEC = "flash-next:layers=2,experts=24,vocab=64,table=64"
STEPS = np.full(20, 3, np.int32)


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


def test_rows_take_recorded_ids_in_order_whatever_the_steps() -> None:
    rng = np.random.RandomState(4)
    ids = np.stack([[rng.permutation(24)[:10] for _ in range(2)] for _ in range(64)])
    model = Model.synthetic(SPEC, device="cpu")
    options = {"taps": ["blk.*.expert_ids"], "routing": ids.astype(np.uint16)}
    got = []
    with Session(model, n_ctx=64, max_seqs=3, **options) as session:  # type: ignore[arg-type]
        a, b, c = (session.open().id for _ in range(3))
        for step in ([(a, 5)], [(a, 1), (b, 1), (c, 1)], [(a, 1)], [(b, 4)], [(b, 1), (a, 1)]):
            session.core.step([(s, np.full(n, 2, np.int32), 0) for s, n in step])
            taps = session.core.taps()
            got.append(np.stack([taps[f"blk.{i}.expert_ids"] for i in range(2)], axis=1))
    np.testing.assert_array_equal(np.concatenate(got), ids[:15])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A trace of 40 tokens whose ids are as skewed as those of text."""
    rng = np.random.RandomState(2)
    odds = 1 / np.arange(1, 25)
    ids = [
        [rng.choice(24, 10, replace=False, p=odds / odds.sum()) for _ in range(2)]
        for _ in range(40)
    ]
    steps = np.ones(40, np.int32)
    made = trace.Trace(np.array(ids, np.uint16), steps, 24, "some model", 7, "a.txt")
    trace.save(made, tmp_path / "t.npz")
    return tmp_path / "t.npz"


def test_a_trace_routes_every_session_of_a_model(file: Path) -> None:
    ids = trace.load(file).ids
    model = Model.synthetic(SPEC, device="cpu", routing=f"trace:{file}")
    assert model.notes[-1] == (
        f"routing: recorded (trace:{file}: 40 tokens of a.txt by some model, then from the first "
        "again)"
    )
    for _ in range(2):
        np.testing.assert_array_equal(chosen(model, [1, 2, 3])[0], ids[:3])
    got = chosen(Model.synthetic(SPEC, device="cpu"), [1] * 45, routing=f"trace:{file}")[0]
    np.testing.assert_array_equal(got, ids[np.arange(45) % 40])


def test_the_engine_wants_what_the_simulation_replays(file: Path) -> None:
    """Three sequences that decode together, past the end of the trace, at 3 sizes and policies."""
    model = Model.synthetic(SPEC, device="cpu", routing=f"trace:{file}")
    parts = []
    with Session(model, n_ctx=64, max_seqs=3, taps=["blk.*.expert_ids"]) as session:
        seqs = [session.open() for _ in range(3)]
        for step in range(20):
            session.core.step([(s.id, np.array([step], np.int32), 0) for s in seqs])
            taps = session.core.taps()
            parts.append(np.stack([taps[f"blk.{i}.expert_ids"] for i in range(2)], axis=1))
    once = trace.load(file)
    twice = replace(once, ids=np.concatenate([once.ids, once.ids[:20]]), step_rows=STEPS)
    ran = replace(once, ids=np.concatenate(parts).astype(np.uint16), step_rows=STEPS)
    for policy in ("lru", "pool", "lrfu"):
        for slots in (40, 44, 48):
            want = expert_sim.simulate(twice, slots, policy)
            got = expert_sim.simulate(ran, slots, policy)
            assert want.wanted and abs(got.hit_rate - want.hit_rate) < 0.001


def test_refusals(file: Path) -> None:
    model = Model.synthetic(SPEC, device="cpu")
    with pytest.raises(ImpError, match="routing 'poetry': prose or uniform"):
        Session(model, n_ctx=32, routing="poetry")
    with pytest.raises(ImpError, match="routing 'poetry': prose or uniform"):
        Model.synthetic(SPEC, device="cpu", routing="poetry")
    other = Model.synthetic(SPEC.replace("24", "32"), device="cpu")
    with pytest.raises(
        ImpError, match=f"{file}: a trace of 2 layers, 10 of 24 experts; .* has 2 .* 10 of 32 exp"
    ):
        Session(other, n_ctx=32, routing=f"trace:{file}")
    with pytest.raises(OSError, match="none.npz"):
        Session(other, n_ctx=32, routing="trace:none.npz")
    with pytest.raises(ImpError, match="3 layers, 10 experts a token; the model has 2 and 10"):
        Session(model, n_ctx=32, routing=np.zeros((1, 3, 10), np.uint16))
    with pytest.raises(ImpError, match="0 recorded experts"):
        Session(model, n_ctx=32, routing=np.zeros((0, 2, 10), np.uint16))
    bad = np.full((1, 2, 10), 24, np.uint16)
    with Session(model, n_ctx=32, routing=bad) as session, session.open() as seq:
        with pytest.raises(ImpError, match="planted expert 24 of 24 in layer 0"):
            seq.extend([1])
