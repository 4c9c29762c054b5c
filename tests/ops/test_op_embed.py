"""Row look-ups against float64: decoded weights are exact up to the rounding of one product."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import harness as h
from tests.ops import refs

ROUNDING = 1e-7  # one fp32 multiplication


@pytest.mark.parametrize("kind", h.MATRIX_TYPES)
@pytest.mark.parametrize("streams", [1, 4])
def test_embed_streams(device: h.Device, kind: str, streams: int) -> None:
    rng = np.random.RandomState(1)
    for cols in (h.BLOCK[kind], 3 * h.BLOCK[kind], 640):
        w, values = h.weight(rng, kind, 9, cols, 0.7)
        for tokens in ([8], [0, 8, 8, 3, 1], rng.randint(0, 9, 65).tolist()):
            args = {"table": w, "streams": streams}
            y = device.run("embed_streams", args, {"tokens": tokens})["y"]
            h.close(y, refs.embed(values, tokens, streams), ROUNDING)


@pytest.mark.parametrize("kind", ["F8_E4M3", "BF16", "Q8_0", "F32", "F16"])
def test_ngram_rows(device: h.Device, kind: str) -> None:
    rng = np.random.RandomState(2)
    for dim, heads in ((32, 1), (160, 16), (32, 3)):
        w, values = h.weight(rng, kind, 50, dim, 0.03)
        for tokens in (1, 5, 97):
            rows = rng.randint(0, 50, (tokens, heads))
            rows[0, 0] = 49  # the last one
            step = {"ngram_rows": [rows.ravel().tolist()]}
            y = device.run("ngram_rows", {"table": w, "heads": heads}, step)["y"]
            h.close(y, values[rows].reshape(tokens, -1), ROUNDING)


def test_every_code_of_a_table(device: h.Device) -> None:
    """E4M3: 253 finite values, two zeros, NaN stays NaN."""
    codes = np.arange(256, dtype=np.uint8)
    w = (h.IDS["F8_E4M3"], codes, 1, 256, 1.0)
    y = device.run("ngram_rows", {"table": w, "heads": 1}, {"ngram_rows": [[0]]})["y"]
    np.testing.assert_array_equal(y[0].astype(np.float64), refs.decode_e4m3(codes))


def test_gather_outputs(device: h.Device) -> None:
    x = h.normal(np.random.RandomState(3), 65, 17)
    for outputs in ([0], [64], [0, 1, 64], list(range(65))):
        h.same(device.run("gather_outputs", {"x": x}, {"outputs": outputs})["y"], x[outputs])
