"""Tiny checkpoints, converted and run, against stored results of an independent implementation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from imp_runtime.model import Model
from imp_runtime.session import Session
from tests.models import tiny
from tests.models.golden import SEQUENCES, Golden

Load = Callable[[str], Model]
# Largest |difference| over largest |logit|. Float32 noise is 1e-5; a missing block is 1e-2.
TOLERANCE = 1e-4
KERNELS = ["generic", "avx2", "avx512"]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def logits_of(session: Session, tokens: list[int], pieces: list[int] | None = None) -> np.ndarray:
    """float32 [T, V]; the tokens go in as `pieces`, or at once"""
    rows = []
    with session.open() as seq:
        at = 0
        for n in pieces or [len(tokens)]:
            rows.append(np.array(seq.extend(tokens[at : at + n], outputs="all")))
            at += n
    assert at == len(tokens)
    return np.concatenate(rows)


def check(name: str, sequence: str, got: np.ndarray) -> None:
    golden = Golden(name)
    tokens = golden.tokens(sequence)
    scale = golden.meta["max_abs_logit"]
    at = golden[sequence + ".positions"]
    worst = np.abs(got[at] - golden[sequence + ".logits"]).max(axis=1)
    assert worst.max() < TOLERANCE * scale, f"{sequence}, position {at[worst.argmax()]}"
    assert (got.argmax(axis=1) == golden[sequence + ".argmax"]).all()
    x = got.astype(np.float64)
    logp = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    of_next = logp[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(of_next, golden[sequence + ".logprob"], atol=TOLERANCE * scale)


@pytest.mark.parametrize("name", tiny.RECIPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits(name: str, kernels: str, model: Load) -> None:
    if kernels not in supported_kernels():
        pytest.skip(f"this processor lacks {kernels}")
    with Session(model(name), n_ctx=256, kernels=kernels) as session:
        for s in SEQUENCES:
            check(name, s, logits_of(session, Golden(name).tokens(s)))


@pytest.mark.parametrize("name", tiny.RECIPES)
@pytest.mark.parametrize(
    "pieces", [[1, 1, 5, 57, 1, 64, 61], [190], [187, 1, 1, 1]], ids=["mixed", "split", "decode"]
)
def test_logits_in_pieces(name: str, pieces: list[int], model: Load) -> None:
    """The same numbers whatever the calls and the step size (13 tokens here)."""
    with Session(model(name), n_ctx=192, n_ubatch=13, n_threads=1) as session:
        check(name, "long", logits_of(session, Golden(name).tokens("long"), pieces))


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_taps(name: str, model: Load) -> None:
    """Layer by layer; the first that differs is the one to look at."""
    golden = Golden(name)
    taps = ("blk.*.attn_out", "blk.*.ffn_out", "blk.*.residual", "result_norm", "blk.*.expert_ids")
    with Session(model(name), n_ctx=256, taps=taps) as session:
        logits_of(session, golden.tokens("long"))
        got = session.taps()
    stored = golden.taps()
    assert set(stored) <= set(got)
    at = golden["long.tap_positions"]
    layers = len(tiny.RECIPES[name].text["layer_types"])
    order = [f"blk.{i}.{t}" for i in range(layers) for t in ("attn_out", "ffn_out", "residual")]
    for tap in [*order, "result_norm"]:
        assert relative(got[tap][at], stored[tap]) < TOLERANCE, tap
    for i in (0, layers - 1):
        np.testing.assert_array_equal(got[f"blk.{i}.expert_ids"], golden[f"long.experts.{i}"])


def supported_kernels() -> list[str]:
    """Kernel sets that this processor runs."""
    with open("/proc/cpuinfo") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    have = ["generic"]
    have += ["avx2"] * ({"avx2", "fma", "f16c"} <= set(flags))
    have += ["avx512"] * ({"avx512f", "avx512bw", "avx512vl"} <= set(flags))
    return have
