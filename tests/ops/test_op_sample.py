"""Chosen tokens: the CPU's are exactly the sampler's, away from ties those of float64. CUDA
chooses the same, or leaves it to the host where more candidates are kept than it holds."""

from __future__ import annotations

import numpy as np
import pytest

from imp_runtime._core import Sampler
from tests.ops import harness as h
from tests.ops import refs

VOCABS = [1, 31, 300, 1024, 1025, 20_000, 248_320]
MAX_CANDIDATES = 1024  # that CUDA sorts
MAX_TOP_K = 500  # that CUDA always decides for these logits; it is more than half of its parts
Draw = tuple[float, int, float, float, float, list[int]]
"""temperature, top_k, top_p, min_p, uniform, suppressed ids"""


def choose(device: h.Device, logits: np.ndarray, draws: list[Draw]) -> np.ndarray:
    """int32 [rows]"""
    return device.run("sample", {"logits": logits}, {"draws": draws})["ids"][:, 0]


def sampler_says(logits: np.ndarray, draw: Draw) -> tuple[int, int]:
    """The token that the sampler chooses with the draw's random number, and among how many."""
    temperature, top_k, top_p, min_p, seed, suppressed = draw
    sampler = Sampler(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        penalty_last_n=0,
        seed=int(seed),
        suppress=suppressed,
    )
    token = sampler.sample(logits, np.empty(0, np.int32))
    return token, len(sampler.candidates())


def uniform(seed: int) -> float:
    """The first random number of the sampler with that seed: splitmix64."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return float((z ^ (z >> 31)) >> 11) * 2.0**-53


def draws_of(rng: np.random.RandomState, vocab: int, n: int) -> list[Draw]:
    """Random parameters, the fifth of them a seed."""
    out: list[Draw] = []
    for _ in range(n):
        ids = rng.randint(0, vocab, rng.choice([0, 0, 1, 4])) if vocab > 8 else []
        out.append(
            (
                float(rng.choice([0.0, 0.3, 1.0, 1.7])),
                int(rng.choice([0, 1, 40, MAX_TOP_K, vocab + 1])),
                float(rng.choice([0.0, 0.4, 0.95, 1.0])),
                float(rng.choice([0.0, 0.05, 0.5])),
                int(rng.randint(0, 2**31)),
                [int(i) for i in set(ids)],
            )
        )
    return out


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy(device: h.Device, vocab: int) -> None:
    """The lowest id among equals, -0 equal to 0, suppressed ids left out."""
    rng = np.random.RandomState(vocab)
    logits = h.f32(rng.randint(-3, 3, (9, vocab)))  # many ties
    logits[logits == 0] = -0.0
    logits[:, ::2] += np.float32(0)  # some of them 0
    greedy: Draw = (0.0, 40, 0.5, 0.5, 0.0, [])
    got = choose(device, logits, [greedy] * 9)
    np.testing.assert_array_equal(got, logits.argmax(1))
    if vocab > 8:
        suppressed = [[int(i) for i in np.flatnonzero(x == x.max())[:4]] for x in logits]
        got = choose(device, logits, [(*greedy[:5], s) for s in suppressed])
        for x, s in zip(logits, suppressed, strict=True):
            x[s] = -np.inf
        np.testing.assert_array_equal(got, logits.argmax(1))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_draws(device: h.Device, vocab: int, spread: float) -> None:
    rng = np.random.RandomState(vocab)
    n = 33 if vocab > 100_000 else 100
    logits = h.f32(rng.normal(0, spread, (n, vocab)))
    draws = draws_of(rng, vocab, n)
    got = choose(device, logits, [(*d[:4], uniform(int(d[4])), d[5]) for d in draws])
    left = 0
    for row, draw, token in zip(logits, draws, got.tolist(), strict=True):
        want, kept = sampler_says(row, draw)
        if token < 0:
            left += 1
            assert device.backend == "cuda" and vocab > MAX_CANDIDATES and kept > 128, draw
            assert not 0 < draw[1] <= MAX_TOP_K, draw
            continue
        assert token == want, draw
        exact = refs.sample(row, *draw[:4], uniform(int(draw[4])), draw[5])
        assert token in exact, (draw, exact)
    assert left < n / 2


def test_the_random_number_decides(device: h.Device) -> None:
    """Each token for as much of [0, 1) as it is likely, best first."""
    logits = h.f32(np.log([[0.1, 0.6, 0.3]]))
    for filters in ((0, 1.0, 1e-9), (3, 1.0, 0.0), (0, 0.9999, 0.0)):
        for u, want in ((0.0, 1), (0.59, 1), (0.61, 2), (0.89, 2), (0.91, 0), (1 - 2**-53, 0)):
            assert choose(device, logits, [(1.0, *filters, u, [])]) == want
    for u, want in ((0.09, 0), (0.11, 1), (0.69, 1), (0.71, 2)):  # by id
        assert choose(device, logits, [(1.0, 0, 1.0, 0.0, u, [])]) == want


def test_ties_at_the_edge_of_top_k(device: h.Device) -> None:
    logits = np.zeros((8, 5000), np.float32)
    logits[:, 4999] = 1
    for i, row in enumerate(logits):
        row[100 + i :: 700] = 0.5
    top = [(1.0, 4, 1.0, 0.0, u, []) for u in np.linspace(0, 0.999, 8)]
    for i, token in enumerate(choose(device, logits, top).tolist()):
        assert token in (4999, 100 + i, 800 + i, 1500 + i)


def test_what_the_host_has_to_choose(device: h.Device) -> None:
    logits = h.normal(np.random.RandomState(1), 7, 2000)
    logits[1, 0], logits[2, 1999], logits[3, 7] = np.nan, np.inf, -np.inf
    plain: Draw = (1.0, 40, 0.95, 0.05, 0.5, [])
    draws: list[Draw] = [plain] * 7
    draws[4] = (-1.0, 0, 1.0, 0.0, 0.0, [])  # no draw
    draws[5] = (0.0, 0, 1.0, 0.0, 0.0, [])
    got = choose(device, logits, draws)
    np.testing.assert_array_equal(got < 0, [False, True, True, True, True, False, False])
    greedy: Draw = (0.0, 0, 1.0, 0.0, 0.0, [])
    np.testing.assert_array_equal(choose(device, logits[1:4], [greedy] * 3), [-1] * 3)
    assert choose(device, logits[:1, :2], [(0.0, 0, 1.0, 0.0, 0.0, [0, 1])]) == -1  # all suppressed


def test_results_repeat(device: h.Device) -> None:
    rng = np.random.RandomState(4)
    logits = h.normal(rng, 64, 20_000)
    draws = [(*d[:4], uniform(int(d[4])), d[5]) for d in draws_of(rng, 20_000, 64)]
    h.same(choose(device, logits, draws), choose(device, logits, draws))
    some = [0, 7, 63]
    h.same(
        choose(device, logits[some], [draws[i] for i in some]), choose(device, logits, draws)[some]
    )
