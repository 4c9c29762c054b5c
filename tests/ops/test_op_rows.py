"""A row's result is the same bits whatever rows share its step and however many threads run it; on
CUDA, as batch_invariant asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.ops import harness as h

ROWS = 101  # more than a task of a matrix product takes


@dataclass
class Case:
    """Arguments of `rows` rows. `by_row`: name -> rows of that array per row of the step."""

    args: dict[str, Any]
    by_row: dict[str, int]
    step: dict[str, Any] = field(default_factory=dict)
    step_by_row: dict[str, int] = field(default_factory=dict)

    def part(self, rows: slice) -> tuple[dict[str, Any], dict[str, Any]]:
        def cut(values: dict[str, Any], by_row: dict[str, int]) -> dict[str, Any]:
            out = dict(values)
            for name, n in by_row.items():
                out[name] = out[name][rows.start * n : rows.stop * n]
            return out

        step = cut(self.step, self.step_by_row)
        if "ngram_rows" in step:
            step["ngram_rows"] = [step["ngram_rows"]]
        return cut(self.args, self.by_row), step


rng = np.random.RandomState(1)
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


@case
def embed_streams() -> Case:
    w, _ = h.weight(rng, "Q8_0", 20, 64)
    tokens = rng.randint(0, 20, ROWS).tolist()
    return Case({"table": w, "streams": 4}, {}, {"tokens": tokens}, {"tokens": 1})


@case
def ngram_rows() -> Case:
    w, _ = h.weight(rng, "F8_E4M3", 20, 16)
    rows = rng.randint(0, 20, 3 * ROWS).tolist()
    return Case({"table": w, "heads": 3}, {}, {"ngram_rows": rows}, {"ngram_rows": 3})


def make_linear(kind: str) -> Callable[[], Case]:
    def linear() -> Case:
        w, _ = h.weight(rng, kind, 150, 192)
        args = {"x": h.normal(rng, ROWS, 192), "w": w, "alpha": 0.5, "act": "silu"}
        return Case(args, {"x": 1})

    return linear


for kind in h.MATRIX_TYPES:
    CASES[f"linear:{kind}"] = make_linear(kind)


def make_linear_mix(kind: str) -> Callable[[], Case]:
    def linear_mix() -> Case:
        w, _ = h.weight(rng, kind, 4 * 40, 96)
        args = {"low": h.normal(rng, ROWS, 96), "n": h.normal(rng, ROWS, 4 * 40), "w": w}
        return Case(args | {"streams": 4}, {"low": 1, "n": 1})

    return linear_mix


for kind in h.MATRIX_TYPES:
    if 96 % h.BLOCK[kind] == 0:
        CASES[f"linear_mix:{kind}"] = make_linear_mix(kind)


@case
def swiglu() -> Case:
    args = {"gate": h.normal(rng, ROWS, 33), "up": h.normal(rng, ROWS, 33)}
    return Case(args, {"gate": 1, "up": 1})


@case
def group_norm() -> Case:
    args = {"x": h.normal(rng, ROWS, 68), "w": h.normal(rng, 68), "groups": 4, "eps": 1e-6}
    return Case(args, {"x": 1})


@case
def residual_mix() -> Case:
    args = {"n": h.normal(rng, ROWS, 68), "gate": h.normal(rng, ROWS, 68), "streams": 4}
    return Case(args, {"n": 1, "gate": 1})


@case
def residual_inject() -> Case:
    args = {"r": h.normal(rng, ROWS, 68), "y": h.normal(rng, ROWS, 17), "s": h.normal(rng, ROWS, 4)}
    return Case(args, {"r": 1, "y": 1, "s": 1})


@case
def gated_norm() -> Case:
    args = {"o": h.normal(rng, ROWS, 72), "z": h.normal(rng, ROWS, 72), "w": h.normal(rng, 24)}
    return Case(args | {"dim": 24, "eps": 1e-6, "act": "sigmoid"}, {"o": 1, "z": 1})


@case
def rope_table() -> Case:
    positions = rng.randint(0, 100000, ROWS).tolist()
    return Case({"dim": 64, "theta": 1e7}, {}, {"positions": positions}, {"positions": 1})


@case
def head_norm_rope() -> Case:
    args = {"x": h.normal(rng, ROWS, 120), "rope": h.normal(rng, ROWS, 8), "w": h.normal(rng, 40)}
    args |= {"heads": 3, "dim": 40, "stride": 40, "rotary_dim": 8, "eps": 1e-6}
    return Case(args, {"x": 1, "rope": 1})


@case
def route() -> Case:
    args = {"logits": h.normal(rng, ROWS, 512), "k": 10, "renormalise": 1}
    return Case(args, {"logits": 1})


def make_expert_ffn(kind: str) -> Callable[[], Case]:
    def expert_ffn() -> Case:
        gate, _ = h.bank(rng, kind, 6, 64, 128)
        up, _ = h.bank(rng, kind, 6, 64, 128)
        down, _ = h.bank(rng, kind, 6, 128, 64)
        ids = np.stack([rng.permutation(6)[:3] for _ in range(ROWS)]).astype(np.int32)
        args = {"x": h.normal(rng, ROWS, 128), "ids": ids, "gate": gate, "up": up, "down": down}
        return Case(args, {"x": 1, "ids": 1})

    return expert_ffn


for kind in h.MATRIX_TYPES:
    CASES[f"expert_ffn:{kind}"] = make_expert_ffn(kind)


@case
def combine() -> Case:
    args = {"slots": h.normal(rng, 3 * ROWS, 33), "weights": h.normal(rng, ROWS, 3)}
    args |= {"shared": h.normal(rng, ROWS, 33), "shared_gate": h.normal(rng, ROWS, 1)}
    return Case(args, {"slots": 3, "weights": 1, "shared": 1, "shared_gate": 1})


@case
def ngram_gate() -> Case:
    wide = {name: h.normal(rng, ROWS, 68) for name in ("r", "key")}
    weights = {name: h.normal(rng, 68) for name in ("w_key", "w_query", "w_conv")}
    args = wide | weights | {"v": h.normal(rng, ROWS, 17), "streams": 4, "eps": 1e-6}
    return Case(args, {"r": 1, "key": 1, "v": 1})


@pytest.mark.parametrize("name", CASES)
def test_stateless_rows(device: h.Device, name: str) -> None:
    c = CASES[name]()
    op = name.partition(":")[0]
    whole = device.run(op, *c.part(slice(0, ROWS)), threads=1, batch_invariant=True)
    for threads in (2, 5):
        again = device.run(op, *c.part(slice(0, ROWS)), threads=threads, batch_invariant=True)
        for key, value in again.items():
            h.same(value, whole[key])
    for begin, end in [(0, 1), (1, 2), (2, 5), (5, 64), (64, ROWS), (ROWS - 1, ROWS), (31, 32)]:
        part = device.run(op, *c.part(slice(begin, end)), batch_invariant=True)
        for key, value in part.items():
            per = len(whole[key]) // ROWS
            h.same(value, whole[key][begin * per : end * per])


# ---------------------------------------------------------------- ops with a state or a cache

CHUNKS = [(0, 7), (30, 40), (3, 1)]


def test_convolutions_in_pieces(device: h.Device) -> None:
    s = h.steps(rng, CHUNKS)
    x, value, r = (h.normal(rng, s.total, 40) for _ in range(3))
    w = h.normal(rng, 4 * 40)
    for op in ("conv_silu", "ngram_conv"):
        more = {"w": w, "kernel": 4, "state": 0}
        rows = {"x": x} if op == "conv_silu" else {"n": x, "value": value, "r": r}
        more |= {} if op == "conv_silu" else {"dilation": 3}
        start = h.normal(rng, s.n_state_rows, 9 * 40)
        states, outputs = [], []
        for threads in (1, 3):
            states.append(start.copy())
            step = s.inputs(state=states[-1])
            outputs += device.run(op, rows | more, step, threads).values()
        h.same(outputs[0], outputs[1])
        for size in (1, 5, 64):
            states.append(start.copy())
            for part, at in s.split(size):
                args = {name: np.ascontiguousarray(a[at]) for name, a in rows.items()} | more
                (y,) = device.run(op, args, part.inputs(state=states[-1])).values()
                h.same(y, outputs[0][at])
        for state in states[1:]:
            h.same(state, states[0])


def test_attention_in_pieces(device: h.Device) -> None:
    s = h.steps(rng, CHUNKS)
    q, qg = h.normal(rng, s.total, 12 * 32), h.normal(rng, s.total, 24 * 32)
    k, v = h.normal(rng, s.total, 64), h.normal(rng, s.total, 64)
    iq, raw, w = h.normal(rng, s.total, 4 * 16), h.normal(rng, s.total, 16), h.normal(rng, 16)
    start = [h.normal(rng, s.n_pages, 16, 64) for _ in range(2)] + [h.normal(rng, s.n_pages, 4, 16)]
    first_state = h.normal(rng, s.n_state_rows, 64)
    rotation = {"rotary_dim": 8, "theta": 1e7, "eps": 1e-6}

    def run(part: h.Steps, at: slice, kv: list, state: np.ndarray, threads: int = 2) -> np.ndarray:
        def cut(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x[at])

        step = part.inputs(kv=[tuple(kv)], state=state)
        device.run("kv_store", {"k": cut(k), "v": cut(v)}, step, threads)
        args = {"raw": cut(raw), "w": w, "ratio": 4, "state": 0} | rotation
        device.run("index_keys", args, step, threads)
        args = {"q": cut(iq), "heads": 4, "ratio": 4, "blocks": 5}
        selected = device.run("index_select", args, step, threads)["selected"]
        args = {"q": cut(q), "qg": cut(qg), "heads": 12, "kv_heads": 2, "ratio": 4, "blocks": 5}
        args |= {"selected": selected}
        y: np.ndarray = device.run("attend", args, step, threads)["y"]
        return y

    results = []
    for threads in (1, 3):
        kv, state = [x.copy() for x in start], first_state.copy()
        results.append((run(s, slice(0, s.total), kv, state, threads), *kv, state))
    for size in (1, 5, 64):
        kv, state = [x.copy() for x in start], first_state.copy()
        y = [run(part, at, kv, state) for part, at in s.split(size)]
        results.append((np.concatenate(y), *kv, state))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            h.same(got, want)
