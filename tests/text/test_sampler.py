"""The C++ sampler against a plain numpy one."""

import numpy as np
import pytest

from imp_runtime._core import Sampler, log_probs
from imp_runtime.errors import ImpError
from imp_runtime.sampling import SamplingParams

NONE = np.empty(0, np.int32)
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def reference(logits: np.ndarray, recent: np.ndarray, p: SamplingParams) -> dict[int, float]:
    """Token -> probability, by the definition: float64, a full sort, one filter after the other."""
    x = logits.astype(np.float64)
    if p.penalty_last_n:
        window = recent if p.penalty_last_n < 0 else recent[-p.penalty_last_n :]
        for token, count in zip(*np.unique(window, return_counts=True), strict=True):
            x[token] *= 1 / p.repetition_penalty if x[token] > 0 else p.repetition_penalty
            x[token] -= count * p.frequency_penalty + p.presence_penalty
    kept = np.lexsort((np.arange(len(x)), -x))
    if p.top_k:
        kept = kept[: p.top_k]
    probs = np.exp(x[kept] - x[kept[0]])
    probs /= probs.sum()
    if p.top_p < 1:
        n = int(np.searchsorted(np.cumsum(probs), p.top_p)) + 1
        kept, probs = kept[:n], probs[:n]
    if p.min_p:
        big = probs >= p.min_p * probs[0]
        kept = kept[big]
    weights = np.exp((x[kept] - x[kept[0]]) / p.temperature)
    return dict(zip(kept.tolist(), (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize("case", range(60))
def test_kept_tokens(case: int) -> None:
    rng = np.random.default_rng(case)
    vocab = int(rng.choice([3, 50, 1000, 20_000]))
    logits = rng.normal(0, rng.choice([0.5, 3]), vocab).astype(np.float32)
    recent = rng.integers(0, vocab, int(rng.integers(0, 200))).astype(np.int32)
    params = SamplingParams(
        temperature=float(rng.choice([0.3, 1.0, 2.0])),
        top_k=int(rng.choice([0, 1, 5, 40, vocab, vocab + 1])),
        top_p=float(rng.choice([0.1, 0.5, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.05, 0.5])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        frequency_penalty=float(rng.choice([0.0, -0.3])),
        penalty_last_n=int(rng.choice([-1, 0, 1, 64])),
    )
    sampler = params.sampler()
    token = sampler.sample(logits, recent)
    expected = reference(logits, recent, params)
    assert sorted(sampler.candidates()) == sorted(expected)
    assert token in expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(**PLAIN),
        SamplingParams(**PLAIN | {"temperature": 0.5}),
        SamplingParams(**PLAIN | {"top_k": 5, "temperature": 1.5}),
        SamplingParams(**PLAIN | {"top_p": 0.8}),
        SamplingParams(**PLAIN | {"min_p": 0.2}),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    draws = 40_000
    logits = np.linspace(-1.5, 2, 12, dtype=np.float32)[[3, 0, 7, 11, 1, 5, 9, 2, 4, 10, 6, 8]]
    expected = reference(logits, NONE, params)
    sampler = Sampler(**_values(params), seed=7, suppress=[])
    counts = np.bincount([sampler.sample(logits, NONE) for _ in range(draws)], minlength=12)
    ids = list(expected)
    assert counts[ids].sum() == draws
    mean = np.array([expected[i] for i in ids]) * draws
    chi2 = float(((counts[ids] - mean) ** 2 / mean).sum())
    freedom = max(len(ids) - 1, 1)
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)  # fixed seed: deterministic


def _values(params: SamplingParams) -> dict:
    names = (
        "temperature top_k top_p min_p repetition_penalty presence_penalty "
        "frequency_penalty penalty_last_n"
    )
    return {name: getattr(params, name) for name in names.split()}


def test_seed_gives_these_tokens() -> None:
    """Stored, so that a change of the random stream or of its use is noticed."""
    logits = np.zeros(1000, np.float32)
    sampler = SamplingParams(**PLAIN, seed=42).sampler()
    assert [sampler.sample(logits, NONE) for _ in range(6)] == [741, 159, 278, 344, 38, 868]


def test_fork() -> None:
    logits = np.zeros(1000, np.float32)
    one = SamplingParams(**PLAIN, seed=1).sampler()
    one.sample(logits, NONE)
    two = one.fork()
    assert one.rng_state == two.rng_state
    assert [one.sample(logits, NONE) for _ in range(5)] == [
        two.sample(logits, NONE) for _ in range(5)
    ]


def test_arrays_are_not_converted() -> None:
    sampler = SamplingParams().sampler()
    with pytest.raises(TypeError):
        sampler.sample(np.zeros(4, np.float64), NONE)
    with pytest.raises(TypeError):
        sampler.sample(np.zeros(4, np.float32), np.zeros(1, np.int64))


def test_not_finite_is_an_error_with_a_code() -> None:
    logits = np.zeros(10, np.float32)
    logits[3] = np.nan
    with pytest.raises(ImpError, match="token 3 of 10 is nan") as error:
        SamplingParams().sampler().sample(logits, NONE)
    assert error.value.code == "numeric"


def test_log_probs() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 4, 5000).astype(np.float32)
    x = logits.astype(np.float64)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    own, top = log_probs(logits, 17, 20)
    assert own == pytest.approx(expected[17], abs=1e-9)
    order = np.argsort(-expected)[:20]
    assert [i for i, _ in top] == order.tolist()
    assert [v for _, v in top] == pytest.approx(expected[order].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature is -1, outside"),
        ({"top_k": -1}, "top_k is -1, outside"),
        ({"top_k": 1.5}, "top_k is 1.5, which is not a whole number"),
        ({"top_p": 1.5}, r"top_p is 1.5, outside \[0, 1\]"),
        ({"min_p": -0.5}, "min_p is -0.5, outside"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, outside"),
        ({"penalty_last_n": -2}, "penalty_last_n is -2, outside"),
        ({"seed": -1}, "seed is -1, outside"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616, outside"),
        ({"max_tokens": -1}, "max_tokens is -1, outside"),
        ({"logprobs": 101}, r"logprobs is 101, outside \[0, 100\]"),
        ({"stop": ["a", ""]}, "stop has an entry that is empty"),
        ({"temperature": "hot"}, "not a number"),
    ],
)
def test_parameters(values: dict, message: str) -> None:
    with pytest.raises(ImpError, match=message):
        SamplingParams(**values)


def test_parameters_at_their_limits() -> None:
    SamplingParams(seed=(1 << 64) - 1, max_tokens=0, logprobs=100, penalty_last_n=-1, top_p=0)
    assert SamplingParams(stop="end").stop == ("end",)


def test_defaults_of_a_file() -> None:
    keys = {
        "general.sampling.temp": float(np.float32(0.6)),
        "general.sampling.top_k": 20,
        "general.sampling.top_p": float(np.float32(0.95)),
        "general.sampling.penalty_repeat": float(np.float32(1.1)),
    }
    params = SamplingParams.from_keys(keys, top_k=3)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 3, 0.95)
    assert (params.repetition_penalty, params.min_p) == (1.1, 0.05)
    with pytest.raises(ImpError, match="top_p is 7"):
        SamplingParams.from_keys({"general.sampling.top_p": 7.0})
