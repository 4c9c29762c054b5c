"""What a cache of experts would hit: recorded or planted routing through the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.trace import Trace

WARM_UP_SHARE = 0.25
"""Part of a planted trace that only fills the cache; recorded traces count from the first step."""
MAX_PLANTED_IDS = 1 << 28
"""Expert ids of a planted trace at most."""
_PREDICTION = {"layers": 8, "tokens": 2048, "seed": 1}
_MOST_ROWS = 256  # of a prediction; larger steps count as such


@dataclass(frozen=True)
class Point:
    """One policy at one size of the cache."""

    policy: str
    slots: int
    """Experts of all layers together."""
    per_layer: float
    wanted: int
    """Distinct experts of all counted steps and layers."""
    hits: int
    kept: int
    """Misses that entered the cache."""
    uncached: int
    """Steps of a layer that wanted more experts than there are slots; not counted above."""
    steps: int
    """Counted."""

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were there; 0 if none was wanted."""
        return self.hits / self.wanted if self.wanted else 0.0


def planted(
    routing: str, *, tokens: int, layers: int, experts: int, used: int, seed: int = 1
) -> Trace:
    """A trace that follows a published hit curve, one token a step.

    Args:
        routing: "prose" or "uniform".
        tokens: of the trace.
        layers: with experts.
        experts: of a layer.
        used: experts of a token and layer.
        seed: of the draws.

    Raises:
        ImpError: a number out of range, or no such curve.
    """
    count = tokens * layers * used
    if min(tokens, layers, experts, used) < 1 or used > experts or experts > 1 << 16:
        raise ImpError(
            f"planted routing of {tokens} tokens, {layers} layers, {used} of {experts} experts"
        )
    if count > MAX_PLANTED_IDS:
        raise ImpError(f"planted routing of {count} expert ids, at most {MAX_PLANTED_IDS} can be")
    source = _core.PlantedRouting(layers=layers, experts=experts, k=used, curve=routing, seed=seed)
    rows = np.ones(tokens, np.int32)
    return Trace(source.next(tokens), rows, experts, "planted", 0, routing)


def batched(trace: Trace, rows: int) -> Trace:
    """The same tokens, `rows` of them in each step; the last step takes what is left."""
    if rows < 1:
        raise ImpError(f"steps of {rows} tokens")
    whole, rest = divmod(len(trace.ids), rows)
    steps = np.array([rows] * whole + [rest] * (rest > 0), np.int32)
    return Trace(trace.ids, steps, trace.experts, trace.model, trace.model_hash, trace.text)


def simulate(trace: Trace, slots: int, policy: str, first_counted: int = 0) -> Point:
    """Run a trace through a cache.

    Args:
        trace: recorded or planted.
        slots: experts of all layers together.
        policy: "lru", "pool", "lrfu[:half_life]" or "pool-lrfu[:half_life]".
        first_counted: steps before this one only fill the cache.

    Raises:
        ImpError: no such policy, or fewer slots than it needs (naming both numbers).
    """
    got = _core.simulate_experts(
        trace.ids,
        trace.step_rows.tolist(),
        experts=trace.experts,
        slots=slots,
        policy=policy,
        first_counted=first_counted,
    )
    return Point(
        policy,
        slots,
        slots / trace.layers,
        got["wanted"],
        got["hits"],
        got["kept"],
        got["uncached"],
        max(0, len(trace.step_rows) - first_counted),
    )


def hit_curve(
    trace: Trace, policies: Sequence[str], slots: Sequence[int], first_counted: int = 0
) -> list[Point]:
    """Every policy at every size, in that order. Raises ImpError as simulate()."""
    return [simulate(trace, n, policy, first_counted) for policy in policies for n in slots]


@lru_cache(maxsize=64)
def predict(
    *, experts: int, used: int, per_layer: float, rows: int, policy: str
) -> tuple[float, float]:
    """What running text would do to a warm cache, by the published curve.

    Args:
        experts: of a layer.
        used: experts of a token and layer.
        per_layer: slots of a layer.
        rows: tokens of a step.
        policy: as for simulate().

    Returns:
        (distinct experts of a step and layer, share of them that is in the cache).
    """
    layers, tokens = _PREDICTION["layers"], _PREDICTION["tokens"]
    rows = min(rows, _MOST_ROWS)
    trace = planted(
        "prose",
        tokens=tokens * max(1, rows // 8),
        layers=layers,
        experts=experts,
        used=used,
        seed=_PREDICTION["seed"],
    )
    steps = batched(trace, rows)
    first = len(steps.step_rows) // 2
    slots = max(layers, round(per_layer * layers))
    point = simulate(steps, min(slots, layers * experts), policy, first)
    if not point.wanted:  # every step wants more than a layer has
        return float(min(experts, used * rows)), 0.0
    return point.wanted / (point.steps * layers), point.hit_rate
