"""Matrix products and the gated product against float64."""

from __future__ import annotations

import numpy as np
import pytest

from imp_runtime import _core
from tests.ops import harness as h
from tests.ops import refs

TOLERANCE = 5e-6  # fp32 sums of up to 640 products
SPLIT_TOLERANCE = 2e-5
"""On tensor cores fp32 activations are sums of two bf16 and lose up to 2^-17 = 7.6e-6 of each; the
argument of a sigmoid can be several times its largest value."""
ACTS = {"none": lambda x: x, "silu": refs.silu, "sigmoid": refs.sigmoid}


def check(
    device: h.Device,
    kind: str,
    rows: int,
    n: int,
    cols: int,
    act: str = "none",
    alpha: float = 1.0,
    tolerance: float | None = None,
) -> None:
    rng = np.random.RandomState(rows * 1000 + n * 100 + cols)
    w, values = h.weight(rng, kind, n, cols, 0.6)
    x = h.normal(rng, rows, cols)
    y = device.run("linear", {"x": x, "w": w, "alpha": alpha, "act": act})["y"]
    want = ACTS[act](refs.linear(h.f64(x), values, float(np.float32(alpha))))
    split = device.backend == "cuda" and kind in ("BF16", "Q8_0") and rows > 1
    h.close(y, want, tolerance or (SPLIT_TOLERANCE if split else TOLERANCE))


@pytest.mark.parametrize("kind", [*h.MATRIX_TYPES, "F8_E4M3"])
def test_linear_rows(device: h.Device, kind: str) -> None:
    """Block edges of the activation rows: 96 share a task."""
    for rows in (1, 2, 3, 7, 64, 65, 96, 97, 193):
        check(device, kind, rows, 37, 128)


@pytest.mark.parametrize("kind", [*h.MATRIX_TYPES, "F8_E4M3"])
def test_linear_columns(device: h.Device, kind: str) -> None:
    sizes = [*range(1, 18), 40, 640] if h.BLOCK[kind] == 1 else [32, 64, 96, 128, 640]
    for cols in sizes:
        if cols % h.BLOCK[kind] == 0:
            check(device, kind, 5, 19, cols)


@pytest.mark.parametrize("kind", h.MATRIX_TYPES)
def test_linear_outputs(device: h.Device, kind: str) -> None:
    """One output, panel edges, and more than one task."""
    for n in (1, 2, 15, 16, 17, 64, 65, 640, 1025):
        check(device, kind, 3, n, 64)


@pytest.mark.parametrize("act", ACTS)
def test_linear_activation(device: h.Device, act: str) -> None:
    for alpha in (1.0, 0.25, -3.0):
        for n in (1, 16, 37):
            check(device, "BF16", 5, n, 64, act, alpha)


def test_linear_of_extreme_values(device: h.Device) -> None:
    """silu and sigmoid at both ends: no overflow, no NaN."""
    x = h.f32([[-1e4], [-100.0], [-88.0], [-0.0], [88.0], [100.0], [1e4]])
    w = (h.IDS["F32"], np.ones(1, "<f4").view(np.uint8), 1, 1, 1.0)
    for act in ("silu", "sigmoid"):
        y = device.run("linear", {"x": x, "w": w, "alpha": 1.0, "act": act})["y"]
        want = ACTS[act](h.f64(x))
        assert np.isfinite(y).all()
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-30)


def test_swiglu(device: h.Device) -> None:
    rng = np.random.RandomState(5)
    for rows, cols in [(1, c) for c in range(1, 18)] + [(3, 40), (65, 640), (97, 33)]:
        gate, up = 4 * h.normal(rng, rows, cols), h.normal(rng, rows, cols)
        y = device.run("swiglu", {"gate": gate, "up": up})["y"]
        h.close(y, refs.silu(h.f64(gate)) * h.f64(up), 1e-6)


EDGES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 512)
"""Rows around the tiles of activations."""


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
@pytest.mark.parametrize(
    ("n", "cols"), [(48, 320), (7, 328), (324, 10240), (9000, 264), (2500, 2056), (65, 8)]
)
def test_tiles_of_tensor_cores(cuda: h.Device, n: int, cols: int) -> None:
    """Few weights and many, columns that end within a tile; the same bits for one row as for all if
    that is asked for, otherwise large maps may go to cuBLASLt."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(n)
    w, values = h.weight(rng, "BF16", n, cols, 0.5)
    x = h.normal(rng, max(EDGES), cols)
    want = 2 * h.f64(x) @ values.T
    args = {"w": w, "alpha": 2.0, "act": "none"}
    whole = cuda.run("linear", args | {"x": x}, batch_invariant=True)["y"]
    h.close(whole, want, SPLIT_TOLERANCE)
    for rows in EDGES:
        first = max(EDGES) - rows
        part = args | {"x": x[first:]}
        h.same(cuda.run("linear", part, batch_invariant=True)["y"], whole[first:])
        if rows > 1:
            h.close(cuda.run("linear", part)["y"], want[first:], SPLIT_TOLERANCE)
    h.close(cuda.run("linear", args | {"x": x[:1]})["y"], want[:1], TOLERANCE)


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "cols", "large"),
    [
        (16, 5200, 264, False),  # too few rows
        (17, 5200, 264, True),
        (32, 2559, 64, False),  # rows * outputs from 81920 on
        (32, 2560, 64, True),
        (257, 17000, 64, True),  # outputs in pieces
        (513, 328, 10240, True),  # rows in pieces
    ],
)
def test_large_maps(cuda: h.Device, rows: int, n: int, cols: int, large: bool) -> None:
    """On both sides of what cuBLASLt takes; the bits are its own, and the same in every run."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(n)
    w, values = h.weight(rng, "BF16", n, cols, 0.5)
    x = h.normal(rng, rows, cols)
    args = {"w": w, "x": x, "alpha": 2.0, "act": "none"}
    got = cuda.run("linear", args)["y"]
    own = cuda.run("linear", args, cublas_lt=False)["y"]
    for y in (got, own):
        h.close(y, 2 * h.f64(x) @ values.T, SPLIT_TOLERANCE)
    h.same(cuda.run("linear", args)["y"], got)
    assert (got.tobytes() != own.tobytes()) == (large and _core.cublas_lt()[0])


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
@pytest.mark.parametrize(
    ("heights", "cols", "act"),
    [((8449,), 328, "none"), ((8400, 64, 200, 1), 640, "silu"), ((17001,), 72, "sigmoid")],
)
def test_wide_maps(cuda: h.Device, heights: tuple[int, ...], cols: int, act: str) -> None:
    """Up to 128 rows by products of warp groups where the device has them: tiles and stages that
    end early, several maps in a tile, more tiles than multiprocessors."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(cols)
    x = h.normal(rng, 129, cols)
    made = [h.weight(rng, "BF16", n, cols, 0.2) for n in heights]
    parts = {f"w{i}": w for i, (w, _) in enumerate(made)}
    for rows in (17, 24, 32, 33, 64, 65, 100, 127, 128, 129):
        args = parts | {"x": x[:rows], "alpha": 0.25, "act": act, "n": len(made)}
        got, again = (cuda.run("linears", args) for _ in range(2))
        for i, (_, values) in enumerate(made):
            want = ACTS[act](0.25 * h.f64(x[:rows]) @ values.T)
            h.close(got[f"y{i}"], want, SPLIT_TOLERANCE)
            h.same(again[f"y{i}"], got[f"y{i}"])


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
def test_large_maps_of_one_input(cuda: h.Device) -> None:
    """Weights that lie one after the other are one product; others, and other types, are not."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(4)
    x = h.normal(rng, 40, 640)
    heights = (("BF16", 3000), ("BF16", 41), ("F32", 16), ("BF16", 129), ("BF16", 2500))
    made = [h.weight(rng, kind, n, 640, 0.2) for kind, n in heights]
    parts = {f"w{i}": w for i, (w, _) in enumerate(made)}
    got = cuda.run("linears", parts | {"x": x, "alpha": 0.25, "act": "silu", "n": len(made)})
    for i, (_, values) in enumerate(made):
        z = 0.25 * h.f64(x) @ values.T
        h.close(got[f"y{i}"], z * refs.sigmoid(z), SPLIT_TOLERANCE)


@pytest.mark.parametrize("cuda", [d for d in h.DEVICES if d.backend == "cuda"], ids=str)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "F32"])
@pytest.mark.parametrize(("n", "cols"), [(1, 32), (47, 2560), (512, 2560), (9000, 288)])
def test_few_rows_on_tensor_cores(cuda: h.Device, kind: str, n: int, cols: int) -> None:
    """A row's bits depend neither on how many there are nor on the maps beside it. F32 weights keep
    the precision of fp32: they choose experts."""
    if cuda.missing():
        pytest.skip(cuda.missing())
    rng = np.random.RandomState(n)
    w, values = h.weight(rng, kind, n, cols, 0.5)
    most = 16 if kind == "BF16" else 130
    x = h.normal(rng, most, cols)
    args = {"w": w, "alpha": 1.0, "act": "none"}
    whole = cuda.run("linear", args | {"x": x})["y"]
    h.close(whole, h.f64(x) @ values.T, 3e-7 if kind == "F32" else SPLIT_TOLERANCE)
    for rows in (2, 3, 7, 8, 9, 16, 17, 32, 33, 64):
        if rows > most:
            break
        h.same(cuda.run("linear", args | {"x": x[-rows:]})["y"], whole[-rows:])
        two = {"w0": w, "w1": w, "n": 2, "alpha": 1.0, "act": "none", "x": x[-rows:]}
        h.same(cuda.run("linears", two)["y1"], whole[-rows:])
    if kind != "BF16":
        h.same(cuda.run("linear", args | {"x": x[:1]}, batch_invariant=True)["y"], whole[:1])


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 65])
def test_linears(device: h.Device, rows: int) -> None:
    """Several maps of one input, of different types and heights; those of CUDA's BF16 share the
    columns of many rows by what they are together, all others have the bits of single maps."""
    rng = np.random.RandomState(rows)
    for cols in (64, 640):
        x = h.normal(rng, rows, cols)
        heights = {"BF16": 129, "F32": 512, "NVFP4": 4, "Q8_0": 48, "F16": 1}
        weights = [h.weight(rng, kind, n, cols, 0.5) for kind, n in heights.items()]
        args = {"x": x, "alpha": 0.25, "act": "silu"}
        parts = {f"w{i}": w for i, (w, _) in enumerate(weights)}
        got = device.run("linears", args | parts | {"n": len(weights)})
        for i, (w, values) in enumerate(weights):
            if device.backend == "cpu" or rows <= 16 or list(heights)[i] != "BF16":
                h.same(got[f"y{i}"], device.run("linear", args | {"w": w})["y"])
            z = 0.25 * h.f64(x) @ values.T
            h.close(got[f"y{i}"], z * refs.sigmoid(z), 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_linears_of_one_type(device: h.Device, rows: int) -> None:
    rng = np.random.RandomState(rows)
    heights = (129, 16, 1, 64, 4)
    x = h.normal(rng, rows, 2568)
    made = [h.weight(rng, "BF16", n, 2568, 0.2) for n in heights]
    parts = {f"w{i}": w for i, (w, _) in enumerate(made)}
    args = {"x": x, "alpha": 0.25, "act": "sigmoid", "n": len(made)}
    got = device.run("linears", args | parts)
    for i, (_, values) in enumerate(made):
        h.close(got[f"y{i}"], refs.sigmoid(0.25 * h.f64(x) @ values.T), 1e-5)


def test_linears_of_odd_widths(device: h.Device) -> None:
    rng = np.random.RandomState(1)
    x = h.normal(rng, 3, 17)
    (a, a_values), (b, b_values) = (h.weight(rng, "F32", n, 17) for n in (1, 33))
    got = device.run("linears", {"x": x, "w0": a, "w1": b, "n": 2, "alpha": 1.0, "act": "none"})
    h.close(got["y0"], h.f64(x) @ a_values.T, 1e-5)
    h.close(got["y1"], h.f64(x) @ b_values.T, 1e-5)
