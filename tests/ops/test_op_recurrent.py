"""The delta-net's convolution, delta rule and gated norm against float64, state included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.ops import harness as h
from tests.ops import refs

CONV_TOLERANCE = 2e-6
DELTA_TOLERANCE = 1e-5  # grows slowly with the length: old state decays
NORM_TOLERANCE = 2e-6
NET_TOLERANCE = 5e-5  # the norm divides by what may be small
AT = 16  # offset of the op's part in a state row; its neighbours must not change
MORE = 32  # floats behind it

CHUNKS = [
    [(0, 1)],
    [(0, 2), (5, 1)],
    [(7, 3), (0, 65), (64, 1), (3, 2)],
    [(64, 64), (0, 97)],
]

# ---------------------------------------------------------------- convolution


def conv_case(
    rng: np.random.RandomState, s: h.Steps, channels: int, kernel: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x [rows, channels], taps [kernel, channels], state)"""
    history = (kernel - 1) * channels
    state = s.state(AT + history + MORE)
    for row in s.state_rows:
        state[row, AT : AT + history] = h.normal(rng, history)
    return h.normal(rng, s.total, channels), h.normal(rng, kernel, channels), state


def check_conv(device: h.Device, chunks: list[tuple[int, int]], channels: int, kernel: int) -> None:
    rng = np.random.RandomState(channels * 10 + kernel)
    s = h.steps(rng, chunks)
    x, taps, state = conv_case(rng, s, channels, kernel)
    before = state.copy()
    args = {"x": x, "w": taps.ravel(), "kernel": kernel, "state": AT}
    y = device.run("conv_silu", args, s.inputs(state=state))["y"]
    expected = before.copy()
    for i, row in enumerate(s.state_rows):
        end = AT + (kernel - 1) * channels
        history = before[row, AT:end].reshape(kernel - 1, channels)
        want, tail = refs.conv_silu(h.f64(x[s.part(i)]), h.f64(history), h.f64(taps).T)
        h.close(y[s.part(i)], want, CONV_TOLERANCE)
        expected[row, AT:end] = tail.ravel()  # copies of x: exact
    h.same(state, expected)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_conv_silu(device: h.Device, chunks: list[tuple[int, int]]) -> None:
    for channels in (*range(1, 18), 40, 640):
        check_conv(device, chunks, channels, 4)


@pytest.mark.parametrize("kernel", [1, 2, 3, 32])
def test_conv_silu_kernels(device: h.Device, kernel: int) -> None:
    """Chunks shorter and longer than the history."""
    check_conv(device, [(40, 1), (0, 2), (9, 31), (9, 70)], 24, kernel)


# ---------------------------------------------------------------- delta rule


@dataclass
class Delta:
    """One call of the op: heads and dims, inputs, state."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    qkv: np.ndarray
    alpha: np.ndarray
    b: np.ndarray
    a: np.ndarray
    dt: np.ndarray
    state: np.ndarray

    @property
    def floats(self) -> int:
        """Of the op's part in a state row."""
        return self.value_heads * self.key_dim * self.value_dim

    def args(self, rows: slice = slice(None)) -> dict[str, object]:
        return {
            "qkv": np.ascontiguousarray(self.qkv[rows]),
            "alpha": np.ascontiguousarray(self.alpha[rows]),
            "b": np.ascontiguousarray(self.b[rows]),
            "a": self.a,
            "dt": self.dt,
            "key_heads": self.key_heads,
            "value_heads": self.value_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "state": AT,
        }

    def reference(self, rows: slice, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """state float32 [floats] -> (o float64 [T, value_heads * value_dim], state [floats])"""
        q, k, v, g, beta = refs.delta_inputs(
            h.f64(self.qkv[rows]),
            h.f64(self.alpha[rows]),
            h.f64(self.b[rows]),
            h.f64(self.a),
            h.f64(self.dt),
            self.key_heads,
            self.key_dim,
        )
        q = refs.spread_heads(q, self.value_heads, tiled=True)
        k = refs.spread_heads(k, self.value_heads, tiled=True)
        shape = (self.value_heads, self.key_dim, self.value_dim)
        o, end = refs.delta_recurrent(q, k, v, g, beta, h.f64(state).reshape(shape))
        return o.reshape(len(o), -1), end.ravel()


def delta(
    rng: np.random.RandomState, s: h.Steps, dims: tuple[int, int, int, int] = (2, 6, 16, 16)
) -> Delta:
    key_heads, value_heads, key_dim, value_dim = dims
    width = 2 * key_heads * key_dim + value_heads * value_dim
    d = Delta(
        *dims,
        qkv=h.normal(rng, s.total, width),
        alpha=h.normal(rng, s.total, value_heads),
        b=h.normal(rng, s.total, value_heads),
        a=-h.f32(rng.uniform(0.05, 2, value_heads)),
        dt=h.normal(rng, value_heads),
        state=np.empty(0, np.float32),
    )
    d.state = s.state(AT + d.floats + MORE)
    for row in s.state_rows:
        d.state[row, AT : AT + d.floats] = h.normal(rng, d.floats)
    return d


def check_delta(device: h.Device, s: h.Steps, d: Delta) -> None:
    before = d.state.copy()
    inputs = d.qkv.copy()
    o = device.run("delta_rule", d.args(), s.inputs(state=d.state))["o"]
    h.same(d.qkv, inputs)
    for i, row in enumerate(s.state_rows):
        part = slice(AT, AT + d.floats)
        want, end = d.reference(s.part(i), before[row, part])
        h.close(o[s.part(i)], want, DELTA_TOLERANCE)
        h.close(d.state[row, part], end, DELTA_TOLERANCE)
        d.state[row, part] = before[row, part]
    h.same(d.state, before)  # nothing else changed


@pytest.mark.parametrize("chunks", [*CHUNKS, [(1, 200)]], ids=str)
def test_delta_rule(device: h.Device, chunks: list[tuple[int, int]]) -> None:
    rng = np.random.RandomState(1)
    s = h.steps(rng, chunks)
    check_delta(device, s, delta(rng, s))


@pytest.mark.parametrize(
    "dims",
    [(1, 1, 1, 1), (1, 3, 2, 5), (2, 2, 16, 17), (3, 3, 40, 8), (1, 2, 128, 128), (2, 4, 64, 80)],
    ids=str,
)
def test_delta_rule_dimensions(device: h.Device, dims: tuple[int, int, int, int]) -> None:
    rng = np.random.RandomState(2)
    s = h.steps(rng, [(0, 5), (60, 70)])
    check_delta(device, s, delta(rng, s, dims))


@pytest.mark.parametrize("which", ["decay", "beta0", "beta1", "keys", "zeros", "state"])
def test_delta_rule_extremes(device: h.Device, which: str) -> None:
    rng = np.random.RandomState(3)
    s = h.steps(rng, [(0, 66), (128, 64), (3, 2)])
    d = delta(rng, s)
    if which == "decay":  # e^g = 0 in fp32 now and then, and close to 1 else
        d.alpha[::3] = 60
        d.alpha[1::3] = -60
    if which == "beta0":
        d.b[:] = -200
    if which == "beta1":
        d.b[:] = 200
    if which == "keys":
        d.qkv[::2, : 2 * d.key_heads * d.key_dim] = 0
    if which == "zeros":
        d.qkv[:] = 0
    if which == "state":
        d.state[np.isfinite(d.state)] *= 1000
    check_delta(device, s, d)


def test_delta_rule_in_pieces(device: h.Device) -> None:
    """Bit for bit where pieces begin and end on the chunk grid, within rounding elsewhere."""
    grid = 64
    rng = np.random.RandomState(4)
    s = h.steps(rng, [(0, 130), (grid, 2 * grid), (13, 70)])
    d = delta(rng, s)
    start = d.state.copy()
    whole = device.run("delta_rule", d.args(), s.inputs(state=d.state))["o"]
    for size, exact in ((grid, True), (2 * grid, True), (1, False), (5, False), (57, False)):
        state = start.copy()
        for part, rows in s.split(size):
            o = device.run("delta_rule", d.args(rows), part.inputs(state=state))["o"]
            if exact and part.positions[0] % grid == 0:
                h.same(o, whole[rows])
            else:
                h.close(o, h.f64(whole[rows]), DELTA_TOLERANCE)
        for row in s.state_rows:
            h.close(state[row, AT:][: d.floats], h.f64(d.state[row, AT:][: d.floats]), 1e-5)


# ---------------------------------------------------------------- gated norm


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
def test_gated_norm(device: h.Device, act: str) -> None:
    rng = np.random.RandomState(5)
    for rows, heads, dim in [(1, 3, n) for n in range(1, 18)] + [(3, 1, 40), (65, 6, 128)]:
        o, z = h.normal(rng, rows, heads * dim), 3 * h.normal(rng, rows, heads * dim)
        w = h.normal(rng, dim)
        o[0] *= 1e-3
        eps = float(np.float32(1e-6))
        args = {"o": o, "z": z, "w": w, "dim": dim, "eps": eps, "act": act}
        got = device.run("gated_norm", args)["y"]
        shape = (rows, heads, dim)
        want = refs.gated_norm(h.f64(o).reshape(shape), h.f64(z).reshape(shape), h.f64(w), eps, act)
        h.close(got, want.reshape(rows, -1), NORM_TOLERANCE)


# ---------------------------------------------------------------- all three


@dataclass
class Net:
    """One call of the whole op: a delta rule's, whose qkv are what the convolution takes."""

    delta: Delta
    conv: np.ndarray  # [kernel, channels]
    z: np.ndarray
    norm: np.ndarray
    state: np.ndarray
    act: str
    eps: float = 1e-6

    @property
    def conv_floats(self) -> int:
        """Of the convolution's part in a state row; the delta rule's lies behind it."""
        return int(self.conv[1:].size)

    def args(self) -> dict[str, object]:
        d = self.delta
        args = d.args() | {"x": d.qkv, "z": self.z, "conv": self.conv.ravel(), "norm": self.norm}
        args |= {"kernel": len(self.conv), "conv_state": AT, "act": self.act, "eps": self.eps}
        del args["qkv"], args["state"]
        return args | {"delta_state": AT + self.conv_floats}

    def reference(self, rows: slice, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """state float32 [conv floats + delta floats] -> (y float64, state)"""
        d = self.delta
        history = h.f64(state[: self.conv_floats]).reshape(-1, self.conv.shape[1])
        qkv, tail = refs.conv_silu(h.f64(d.qkv[rows]), history, h.f64(self.conv).T)
        convolved = Delta(**{**vars(d), "qkv": np.zeros(d.qkv.shape)})
        convolved.qkv[rows] = qkv
        o, end = convolved.reference(rows, state[self.conv_floats :])
        shape = (len(o), d.value_heads, d.value_dim)
        z = h.f64(self.z[rows]).reshape(shape)
        y = refs.gated_norm(o.reshape(shape), z, h.f64(self.norm), self.eps, self.act)
        return y.reshape(len(o), -1), np.concatenate([tail.ravel(), end])


def net(
    rng: np.random.RandomState, s: h.Steps, dims: tuple[int, int, int, int], kernel: int, act: str
) -> Net:
    d = delta(rng, s, dims)
    conv = h.normal(rng, kernel, d.qkv.shape[1])
    z, norm = h.normal(rng, s.total, d.value_heads * d.value_dim), h.normal(rng, d.value_dim)
    n = Net(d, conv, z, norm, np.empty(0, np.float32), act)
    floats = n.conv_floats + d.floats
    n.state = s.state(AT + floats + MORE)
    for row in s.state_rows:
        n.state[row, AT : AT + floats] = h.normal(rng, floats)
    return n


RELEASED = (2, 6, 128, 128)  # but for the number of heads
ONE_EACH = [(0, 1), (3, 1), (70, 1), (64, 1), (1, 1)]


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
@pytest.mark.parametrize(
    "chunks", [[(5, 1)], ONE_EACH, [(0, 1), (2, 5), (9, 1)], [(4, 67)]], ids=str
)
@pytest.mark.parametrize(
    ("dims", "kernel"),
    [
        (RELEASED, 4),
        ((16, 48, 128, 128), 4),
        (RELEASED, 3),
        ((2, 4, 128, 128), 4),
        ((1, 3, 24, 40), 4),
    ],
    ids=str,
)
def test_gated_delta_net(
    device: h.Device,
    dims: tuple[int, int, int, int],
    kernel: int,
    chunks: list[tuple[int, int]],
    act: str,
) -> None:
    """Against float64, and the bits of the three ops that it is made of."""
    rng = np.random.RandomState(6)
    s = h.steps(rng, chunks)
    n = net(rng, s, dims, kernel, act)
    d, before = n.delta, n.state.copy()
    y = device.run("gated_delta_net", n.args(), s.inputs(state=n.state))["y"]
    parts = before.copy()
    args = {"x": d.qkv, "w": n.conv.ravel(), "kernel": kernel, "state": AT}
    qkv = device.run("conv_silu", args, s.inputs(state=parts))["y"]
    args = d.args() | {"qkv": qkv, "state": AT + n.conv_floats}
    o = device.run("delta_rule", args, s.inputs(state=parts))["o"]
    args = {"o": o, "z": n.z, "w": n.norm, "dim": d.value_dim, "eps": n.eps, "act": act}
    h.same(y, device.run("gated_norm", args)["y"])
    h.same(n.state, parts)
    for i, row in enumerate(s.state_rows):
        part = slice(AT, AT + n.conv_floats + d.floats)
        want, end = n.reference(s.part(i), before[row, part])
        h.close(y[s.part(i)], want, NET_TOLERANCE)
        h.close(n.state[row, part], end, DELTA_TOLERANCE)
        n.state[row, part] = before[row, part]
    h.same(n.state, before)  # nothing else changed


def test_gated_delta_net_padding(device: h.Device) -> None:
    """Rows behind the last chunk touch no state and change nothing for the others."""
    if device.backend != "cuda":
        pytest.skip("padding is for backends that ask for it")
    rng = np.random.RandomState(7)
    s = h.steps(rng, ONE_EACH[:3])
    n = net(rng, s, RELEASED, 4, "silu")
    before = n.state.copy()
    want = device.run("gated_delta_net", n.args(), s.inputs(state=n.state))["y"]
    args, rows = n.args(), s.total + 2
    d = n.delta
    for name, values in (("x", d.qkv), ("z", n.z), ("alpha", d.alpha), ("b", d.b)):
        padded = np.full((rows, values.shape[1]), np.nan, np.float32)
        padded[: s.total] = values
        args[name] = padded
    y = device.run("gated_delta_net", args, s.inputs(state=before, tokens=[0] * rows))["y"]
    h.same(y[: s.total], want)
    h.same(before, n.state)


@pytest.mark.parametrize("count", [7, 8, 150])
def test_gated_delta_net_of_many_sequences(device: h.Device, count: int) -> None:
    """Bits and states are those of few sequences at a time. CUDA streams states from 8 on, and from
    67 on its blocks have more than one unit of work."""
    if device.backend != "cuda":
        pytest.skip("other backends take each sequence by itself")
    rng = np.random.RandomState(8)
    s = h.steps(rng, [(i, 1) for i in range(count)])
    n = net(rng, s, RELEASED, 4, "silu")
    d, few = n.delta, n.state.copy()
    y = device.run("gated_delta_net", n.args(), s.inputs(state=n.state))["y"]
    for i in range(0, count, 5):
        rows = slice(i, min(i + 5, count))
        part = h.steps(rng, [(0, 1)] * (rows.stop - i))
        step = part.inputs(state=few)
        step["chunks"] = [
            (j, 1, 0, s.state_rows[i + j], list(part.pages[j])) for j in range(rows.stop - i)
        ]
        args = n.args() | d.args(rows) | {"x": d.qkv[rows], "z": n.z[rows]}
        del args["qkv"], args["state"]
        h.same(device.run("gated_delta_net", args, step)["y"], y[rows])
    h.same(few, n.state)
