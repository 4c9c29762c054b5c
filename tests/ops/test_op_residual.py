"""Residual streams against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import harness as h
from tests.ops import refs

TOLERANCE = 2e-6
SPLIT_TOLERANCE = 2e-5
"""On tensor cores fp32 activations are sums of two bf16 and lose up to 2^-17 = 7.6e-6 of each."""
SIZES = [(1, n) for n in range(1, 18)] + [(3, 40), (65, 640), (97, 16)]


@pytest.mark.parametrize("groups", [1, 4])
def test_group_norm(device: h.Device, groups: int) -> None:
    rng = np.random.RandomState(1)
    for rows, n in SIZES:
        x, w = h.normal(rng, rows, groups * n), h.normal(rng, groups * n)
        x[0] *= 1e-4  # eps counts here
        args = {"x": x, "w": w, "groups": groups, "eps": 1e-6}
        got = device.run("group_norm", args)["y"]
        want = refs.grouped_rms_norm(h.f64(x), h.f64(w), float(np.float32(1e-6)), groups)
        h.close(got, want, TOLERANCE)


def test_norm_of_zeros_is_zero(device: h.Device) -> None:
    args = {"x": np.zeros((2, 32), np.float32), "w": np.ones(32, np.float32)}
    got = device.run("group_norm", args | {"groups": 2, "eps": 1e-6})["y"]
    assert (got == 0).all()


@pytest.mark.parametrize("streams", [2, 4])
def test_residual_mix(device: h.Device, streams: int) -> None:
    rng = np.random.RandomState(2)
    for rows, n in SIZES:
        x, gate = h.normal(rng, rows, streams * n), 3 * h.normal(rng, rows, streams * n)
        got = device.run("residual_mix", {"n": x, "gate": gate, "streams": streams})["x"]
        gated = refs.sigmoid(h.f64(gate)) * h.f64(x)
        h.close(got, gated.reshape(rows, streams, n).mean(axis=1), TOLERANCE)


@pytest.mark.parametrize("streams", [2, 4])
def test_residual_inject(device: h.Device, streams: int) -> None:
    rng = np.random.RandomState(3)
    for rows, n in SIZES:
        r, y = h.normal(rng, rows, streams * n), h.normal(rng, rows, n)
        s = h.f32(rng.uniform(0, 1, (rows, streams)))
        before = r.copy()
        got = device.run("residual_inject", {"r": r, "y": y, "s": s})["r"]
        want = refs.residual_inject(h.f64(before), h.f64(y), 2 * h.f64(s))
        h.close(got, want, TOLERANCE, before)
        h.same(r, before)


def test_read_gate_of_four_ops(device: h.Device) -> None:
    """norm, two linears and the mix make the model's read gate."""
    rng = np.random.RandomState(4)
    rows, streams, n, low = 7, 4, 40, 16
    r, w = h.normal(rng, rows, streams * n), h.normal(rng, streams * n)
    down, down_values = h.weight(rng, "BF16", low, streams * n, 0.1)
    up, up_values = h.weight(rng, "F16", streams * n, low, 0.5)
    inject, inject_values = h.weight(rng, "F32", streams, streams * n, 0.1)
    eps = float(np.float32(1e-6))
    norm = device.run("group_norm", {"x": r, "w": w, "groups": streams, "eps": eps})["y"]
    args = {"x": norm, "w": down, "alpha": 1 / streams, "act": "silu"}
    narrow = device.run("linear", args)["y"]
    gate = device.run("linear", {"x": narrow, "w": up, "alpha": 1.0, "act": "none"})["y"]
    x = device.run("residual_mix", {"n": norm, "gate": gate, "streams": streams})["x"]
    args = {"x": norm, "w": inject, "alpha": 1 / streams, "act": "sigmoid"}
    s = device.run("linear", args)["y"]
    want, want_s = refs.residual_mix(
        h.f64(r), h.f64(w), down_values, up_values, inject_values, eps, streams
    )
    h.close(x, want, 1e-5)
    assert want_s is not None
    h.close(2 * s, want_s, 1e-5)


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "Q8_0"])
def test_linear_mix(device: h.Device, kind: str) -> None:
    rng = np.random.RandomState(5)
    sizes = [(4, 1, 40, 64), (4, 2, 33, 320), (4, 9, 640, 96), (4, 16, 16, 32), (4, 17, 50, 352)]
    sizes += [(4, 64, 65, 64), (4, 130, 40, 320), (2, 3, 24, 32)]
    sizes += [(4, 20, 1100, 64), (4, 270, 4096, 32)]  # large maps on CUDA, whole and in pieces
    sizes += [(4, rows, 2116, 96) for rows in (17, 32, 33, 64, 65)]  # ... of warp groups
    sizes += [(4, 33, 2117, 96)]
    for streams, rows, n, low in sizes:
        w, values = h.weight(rng, kind, streams * n, low, 0.5)
        narrow, norm = h.normal(rng, rows, low), h.normal(rng, rows, streams * n)
        args = {"low": narrow, "n": norm, "w": w, "streams": streams}
        gated = refs.sigmoid(h.f64(narrow) @ values.T) * h.f64(norm)
        want = gated.reshape(rows, streams, n).mean(axis=1)
        h.close(device.run("linear_mix", args)["x"], want, 1e-5)


@pytest.mark.parametrize("streams", [2, 4])
def test_inject_norm(device: h.Device, streams: int) -> None:
    rng = np.random.RandomState(6)
    for rows, n in [*SIZES, (2, 2560), (1, 2561)]:
        r, y = h.normal(rng, rows, streams * n), h.normal(rng, rows, n)
        s, w = h.f32(rng.uniform(0, 1, (rows, streams))), h.normal(rng, streams * n)
        before = r.copy()
        got = device.run("inject_norm", {"r": r, "y": y, "s": s, "w": w, "eps": 1e-6})
        want = refs.residual_inject(h.f64(before), h.f64(y), 2 * h.f64(s))
        h.close(got["r"], want, TOLERANCE, before)
        normed = refs.grouped_rms_norm(want, h.f64(w), float(np.float32(1e-6)), streams)
        h.close(got["n"], normed, 1e-5)


@pytest.mark.parametrize(
    ("down", "inject", "up"),
    [
        ("BF16", "F32", "BF16"),
        ("F16", "BF16", "Q8_0"),
        ("Q8_0", "Q8_0", "F16"),
        ("F32", "F16", "F32"),
        ("NVFP4", "NVFP4", "NVFP4"),
    ],
    ids=str,
)
def test_residual_read(device: h.Device, down: str, inject: str, up: str) -> None:
    """The write, the norm and the read that one op makes of them."""
    rng = np.random.RandomState(7)
    eps = float(np.float32(1e-6))
    sizes = [
        (4, 1, 64, 64),
        (4, 2, 64, 64),
        (4, 1, 192, 320),
        (4, 9, 128, 64),
        (2, 1, 64, 64),
        (4, 1, 2560, 320),
        (4, 1, 5248, 448),
        (4, 3, 192, 320),
        (4, 8, 2560, 320),
        (4, 5, 5248, 448),
    ]
    for streams, rows, n, low in sizes:
        r, y = h.normal(rng, rows, streams * n), h.normal(rng, rows, n)
        s, w = h.f32(rng.uniform(0, 1, (rows, streams))), h.normal(rng, streams * n)
        weights = {
            "down": h.weight(rng, down, low, streams * n, 0.1),
            "inject": h.weight(rng, inject, streams, streams * n, 0.1),
            "up": h.weight(rng, up, streams * n, low, 0.5),
        }
        before = r.copy()
        args = {"r": r, "y": y, "s": s, "w": w, "eps": eps} | {k: v[0] for k, v in weights.items()}
        got = device.run("residual_read", args)
        written = refs.residual_inject(h.f64(before), h.f64(y), 2 * h.f64(s))
        h.close(got["r"], written, TOLERANCE, before)
        down_values, up_values, inject_values = (weights[k][1] for k in ("down", "up", "inject"))
        x, next_s = refs.residual_mix(
            written, h.f64(w), down_values, up_values, inject_values, eps, streams
        )
        tolerance = SPLIT_TOLERANCE if device.backend == "cuda" and rows > 1 else 1e-5
        h.close(got["x"], x, tolerance)
        assert next_s is not None
        h.close(2 * got["s"], next_s, tolerance)
        h.same(r, before)


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_residual_read_of_rows(cuda: h.Device, kind: str) -> None:
    """From two rows on, each has the bits that it has among any others."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(8)
    n, low, most = 2560, 320, 16
    r, y = h.normal(rng, most, 4 * n), h.normal(rng, most, n)
    s, w = h.f32(rng.uniform(0, 1, (most, 4))), h.normal(rng, 4 * n)
    weights = {
        "down": h.weight(rng, kind, low, 4 * n, 0.1)[0],
        "inject": h.weight(rng, "F32", 4, 4 * n, 0.1)[0],
        "up": h.weight(rng, kind, 4 * n, low, 0.5)[0],
    }
    args = {"w": w, "eps": 1e-6} | weights
    whole = cuda.run("residual_read", args | {"r": r, "y": y, "s": s})
    for rows in range(2, most):
        part = {"r": r[-rows:], "y": y[-rows:], "s": s[-rows:]}
        for name, got in cuda.run("residual_read", args | part).items():
            h.same(got, whole[name][-rows:])


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
@pytest.mark.parametrize("n", [16384, 16448])
@pytest.mark.parametrize("rows", [16, 17])
def test_limits_of_residual_read_in_rows(cuda: h.Device, n: int, rows: int) -> None:
    """The widest stream and the most rows of the fused kernels, and one step beyond each."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(9)
    r, y = h.normal(rng, rows, 4 * n), h.normal(rng, rows, n)
    s, w = h.f32(rng.uniform(0, 1, (rows, 4))), h.normal(rng, 4 * n)
    shapes = {"down": (32, 4 * n), "inject": (4, 4 * n), "up": (4 * n, 32)}
    made = {name: h.weight(rng, "BF16", *shape, 0.1) for name, shape in shapes.items()}
    args = {"r": r, "y": y, "s": s, "w": w, "eps": 1e-6} | {k: v[0] for k, v in made.items()}
    got = cuda.run("residual_read", args)
    written = refs.residual_inject(h.f64(r), h.f64(y), 2 * h.f64(s))
    down, inject, up = (made[k][1] for k in ("down", "inject", "up"))
    x, next_s = refs.residual_mix(written, h.f64(w), down, up, inject, 1e-6, 4)
    h.close(got["r"], written, TOLERANCE)
    h.close(got["x"], x, SPLIT_TOLERANCE)
    assert next_s is not None
    h.close(2 * got["s"], next_s, SPLIT_TOLERANCE)
