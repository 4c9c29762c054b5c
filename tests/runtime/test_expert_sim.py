"""Simulated caches against a plain LRU, stack distances and the published curve."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from imp_runtime import expert_sim
from imp_runtime.errors import ImpError
from imp_runtime.trace import Trace


def random_trace(tokens: int = 400, layers: int = 3, experts: int = 40, k: int = 4) -> Trace:
    """Skewed choices, so that hit rates differ from chance."""
    rng = np.random.RandomState(5)
    weight = 1.0 / np.arange(1, experts + 1)
    orders = [rng.permutation(experts) for _ in range(layers)]
    draw = [
        [order[rng.choice(experts, k, replace=False, p=weight / weight.sum())] for order in orders]
        for _ in range(tokens)
    ]
    ones = np.ones(tokens, np.int32)
    return Trace(np.array(draw, np.uint16), ones, experts, "random", 0, "")


def plain_lru(trace: Trace, capacity: int, rows: int = 1) -> tuple[int, int]:
    """(distinct experts wanted, found) of one LRU cache a layer.

    Hits are counted against what was there before the step; experts of the same step are equally
    recent and the ones that came into lower slots leave first.
    """
    wanted = found = 0
    for layer in range(trace.layers):
        slots: list[int | None] = [None] * capacity
        used: dict[int, int] = {}
        for step, begin in enumerate(range(0, len(trace.ids), rows), 1):
            now = sorted(set(trace.ids[begin : begin + rows, layer].ravel().tolist()))
            missing = [e for e in now if e not in slots]
            wanted, found = wanted + len(now), found + len(now) - len(missing)
            used.update(dict.fromkeys(now, step))
            for e in missing:
                free = [s for s in range(capacity) if slots[s] not in now]
                s = min(free, key=lambda s: (0 if slots[s] is None else used[slots[s]], s))
                slots[s] = e
    return wanted, found


@pytest.mark.parametrize("capacity", [4, 7, 20, 39, 40])
def test_lru_equals_a_plain_one(capacity: int) -> None:
    trace = random_trace()
    point = expert_sim.simulate(trace, 3 * capacity, "lru")
    assert (point.wanted, point.hits) == plain_lru(trace, capacity)
    assert point.kept == point.wanted - point.hits and point.steps == 400
    assert point.hit_rate == pytest.approx(point.hits / point.wanted)


@pytest.mark.parametrize(("rows", "capacity"), [(2, 12), (5, 20), (7, 32)])
def test_batches_equal_a_plain_one(rows: int, capacity: int) -> None:
    trace = random_trace()
    point = expert_sim.simulate(expert_sim.batched(trace, rows), 3 * capacity, "lru")
    assert point.uncached == 0
    assert (point.wanted, point.hits) == plain_lru(trace, capacity, rows)


def test_hits_follow_from_stack_distances() -> None:
    """One expert a token: it hits if fewer than n others were used since its last use."""
    trace = random_trace(tokens=600, layers=1, k=1)
    stack: OrderedDict[int, None] = OrderedDict()
    depths = []
    for e in trace.ids[:, 0, 0].tolist():
        depths.append(list(reversed(stack)).index(e) if e in stack else 1000)
        stack[e] = None
        stack.move_to_end(e)
    for n in (1, 2, 5, 13, 40):
        point = expert_sim.simulate(trace, n, "lru")
        assert point.hits == sum(d < n for d in depths)
        assert expert_sim.simulate(trace, n, "pool").hits == point.hits  # one layer


def test_planted_prose_follows_the_published_points() -> None:
    published = {31: 0.50, 62: 0.68, 74: 0.75, 97: 0.80, 118: 0.84, 173: 0.92, 256: 0.97}
    trace = expert_sim.planted("prose", tokens=4000, layers=4, experts=512, used=10)
    slots = [4 * n for n in published]
    for point in expert_sim.hit_curve(trace, ["lru"], slots, first_counted=1000):
        assert abs(point.hit_rate - published[int(point.per_layer)]) < 0.03, point


def test_planted_uniform_hits_by_chance() -> None:
    trace = expert_sim.planted("uniform", tokens=3000, layers=2, experts=64, used=4)
    for policy in ("lru", "pool", "lrfu:32"):
        point = expert_sim.simulate(trace, 2 * 32, policy, 500)
        assert point.hit_rate == pytest.approx(0.5, abs=0.04), policy


def test_the_predicted_rate_is_that_of_a_warm_cache() -> None:
    distinct, rate = expert_sim.predict(experts=512, used=10, per_layer=173, rows=1, policy="lru")
    assert distinct == 10 and rate == pytest.approx(0.92, abs=0.02)
    distinct, eight = expert_sim.predict(experts=512, used=10, per_layer=173, rows=8, policy="lru")
    assert 40 < distinct < 80 and eight < rate


def test_warm_up_is_not_counted() -> None:
    trace = random_trace()
    whole = expert_sim.simulate(trace, 60, "lru")
    warm = expert_sim.simulate(trace, 60, "lru", first_counted=100)
    assert warm.steps == 300 and warm.wanted == 300 * 12
    head = Trace(trace.ids[:100], trace.step_rows[:100], 40, "", 0, "")
    assert warm.hits == whole.hits - expert_sim.simulate(head, 60, "lru").hits


def test_batches_keep_every_token() -> None:
    trace = random_trace(tokens=10)
    assert expert_sim.batched(trace, 4).step_rows.tolist() == [4, 4, 2]
    assert expert_sim.batched(trace, 5).step_rows.tolist() == [5, 5]
    assert expert_sim.batched(trace, 11).step_rows.tolist() == [10]
    with pytest.raises(ImpError, match="steps of 0 tokens"):
        expert_sim.batched(trace, 0)


def test_steps_that_do_not_fit_are_told() -> None:
    point = expert_sim.simulate(expert_sim.batched(random_trace(), 20), 3 * 4, "lru")
    assert point.uncached == 60 and point.wanted == 0 and point.hit_rate == 0.0


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(tokens=4)
    with pytest.raises(ImpError, match="2 slots for 3 layers"):
        expert_sim.simulate(trace, 2, "lru")
    with pytest.raises(ImpError, match="expert policy 'mru'"):
        expert_sim.simulate(trace, 30, "mru")
    monkeypatch.setattr(expert_sim, "MAX_PLANTED_IDS", 40)
    made = expert_sim.planted("prose", tokens=2, layers=2, experts=20, used=10)
    assert made.ids.shape == (2, 2, 10)
    with pytest.raises(ImpError, match="60 expert ids, at most 40 can be"):
        expert_sim.planted("prose", tokens=3, layers=2, experts=20, used=10)
    with pytest.raises(ImpError, match="10 of 9 experts"):
        expert_sim.planted("prose", tokens=1, layers=1, experts=9, used=10)
    with pytest.raises(ImpError, match="routing 'verse': prose or uniform"):
        expert_sim.planted("verse", tokens=1, layers=1, experts=9, used=1)
