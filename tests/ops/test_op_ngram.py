"""The n-gram block's gate and dilated convolution against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import harness as h
from tests.ops import refs

TOLERANCE = 5e-6
EPS = float(np.float32(1e-6))
AT, MORE = 32, 16


def gate_args(rng: np.random.RandomState, rows: int, streams: int, hidden: int) -> h.Arrays:
    wide = streams * hidden
    return {
        "r": h.normal(rng, rows, wide),
        "key": h.normal(rng, rows, wide),
        "v": h.normal(rng, rows, hidden),
        "w_key": h.normal(rng, wide),
        "w_query": h.normal(rng, wide),
        "w_conv": h.normal(rng, wide),
    }


def check_gate(device: h.Device, a: h.Arrays, streams: int) -> None:
    got = device.run("ngram_gate", a | {"streams": streams, "eps": EPS})
    x = {name: h.f64(value) for name, value in a.items()}
    value = refs.ngram_gate(x["key"], x["v"], x["r"], x["w_key"], x["w_query"], EPS, streams)
    h.close(got["value"], value, TOLERANCE)
    h.close(got["n"], refs.grouped_rms_norm(value, x["w_conv"], EPS, streams), TOLERANCE)


@pytest.mark.parametrize("streams", [2, 4])
def test_ngram_gate(device: h.Device, streams: int) -> None:
    rng = np.random.RandomState(1)
    for rows, hidden in [(1, n) for n in range(2, 18)] + [(3, 40), (65, 640), (97, 16)]:
        check_gate(device, gate_args(rng, rows, streams, hidden), streams)


def test_ngram_gate_below_its_floor(device: h.Device) -> None:
    """u = 0 exactly gives 1/2; tiny u keeps its sign and takes the floor."""
    rng = np.random.RandomState(2)
    a = gate_args(rng, 3, 2, 16)
    a["key"][0] = 0
    a["w_key"] *= 1e-8
    check_gate(device, a, 2)
    got = device.run("ngram_gate", a | {"streams": 2, "eps": EPS})["value"]
    np.testing.assert_array_equal(got[0], np.tile(a["v"][0] / 2, 2))


CHUNKS = [
    [(0, 1)],
    [(0, 2), (5, 1)],
    [(7, 3), (0, 65), (64, 9), (3, 10)],
    [(64, 64), (0, 97)],
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("kernel, dilation", [(4, 3), (2, 1), (1, 3), (3, 5)])
def test_ngram_conv(
    device: h.Device, chunks: list[tuple[int, int]], kernel: int, dilation: int
) -> None:
    rng = np.random.RandomState(3)
    s = h.steps(rng, chunks)
    rows = (kernel - 1) * dilation
    for cols in (1, 7, 16, 17, 40, 640):
        r, value, n = (h.normal(rng, s.total, cols) for _ in range(3))
        taps = h.normal(rng, kernel, cols)
        end = AT + rows * cols
        state = s.state(end + MORE)
        for row in s.state_rows:
            state[row, AT:end] = h.normal(rng, rows * cols)
        expected = state.copy()
        args = {"r": r, "value": value, "n": n, "w": taps.ravel()}
        args |= {"kernel": kernel, "dilation": dilation, "state": AT}
        got = device.run("ngram_conv", args, s.inputs(state=state))["r"]
        for i, row in enumerate(s.state_rows):
            history = h.f64(expected[row, AT:end]).reshape(rows, cols)
            y, tail = refs.dilated_conv(h.f64(n[s.part(i)]), history, h.f64(taps).T, dilation)
            before, gated = h.f64(r[s.part(i)]), h.f64(value[s.part(i)])
            want = before + gated + refs.silu(y)
            h.close(got[s.part(i)], want, TOLERANCE, before, gated, y)
            expected[row, AT:end] = tail.ravel()
        h.same(state, expected)
