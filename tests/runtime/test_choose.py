"""Steps that choose tokens: what the sampler chooses from the logits of the same step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from imp_runtime import ImpError
from imp_runtime.model import Model
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=2),
    SamplingParams(top_k=3, top_p=1, min_p=0, seed=3),
    SamplingParams(top_k=0, top_p=0.7, min_p=0.1, seed=4),
]
NONE = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def base(model: Callable[[str], Model]) -> Model:
    return model("base")


def test_a_step_chooses_what_the_sampler_would(base: Model) -> None:
    with Session(base, n_ctx=64, max_seqs=2, n_threads=2) as session:
        for params in PARAMS:
            here, there = params.sampler([7]), params.sampler([7])
            with session.open() as a, session.open() as b:
                token = other = 5
                for _ in range(12):
                    draw = here.next()
                    assert draw is not None
                    choice = a.choose([token], draw)
                    assert isinstance(choice, int)
                    token = choice
                    here.chosen()
                    other = there.sample(b.extend([other])[0], NONE)
                    assert token == other and token != 7
                    assert here.rng_state == there.rng_state


def test_outputs_with_and_without_draws(base: Model) -> None:
    """Several outputs of several sequences; those without a draw give their logits."""
    draw = PARAMS[0].sampler().next()
    with Session(base, n_ctx=64, max_seqs=3) as session, session.open() as a, session.open() as b:
        with session.open() as c:
            tokens = np.arange(9, dtype=np.int32)
            requests = [(a.id, tokens[:3], 1), (b.id, tokens[3:5], 2), (c.id, tokens[5:], 3)]
            got = session.core.choose(requests, [draw, None, draw])
            assert isinstance(got[1], np.ndarray) and not got[1].flags.writeable
            got[1] = got[1].copy()
        with session.open() as d:
            want = d.extend(tokens[:3], outputs="all")
        assert got[0] == want[1].argmax()
        with session.open() as d:
            np.testing.assert_array_equal(got[1], d.extend(tokens[:3])[0])
        with session.open() as d:
            assert got[2] == d.extend(tokens[5:])[0].argmax()
        assert session.core.choose([(a.id, tokens[:1], 1)], []) == []


def test_long_prompts_go_in_steps(base: Model) -> None:
    draw = PARAMS[0].sampler().next()
    prompt = np.arange(40, dtype=np.int32)
    with Session(base, n_ctx=64, n_ubatch=16) as session:
        for n in (1, 16, 17, 32, 40):
            with session.open() as seq:
                want = int(seq.extend(prompt[:n])[0].argmax())
            with session.open() as seq:
                assert seq.choose(prompt[:n], draw) == want and seq.length == n


def test_what_takes_more_than_logits() -> None:
    assert SamplingParams(repetition_penalty=1.1).sampler().next() is None
    assert SamplingParams(presence_penalty=0.1).sampler().next() is None
    assert SamplingParams(frequency_penalty=-0.1).sampler().next() is None
    assert SamplingParams(repetition_penalty=1.1, penalty_last_n=0).sampler().next() is not None
    assert SamplingParams().sampler([1, 2, 3, 4]).next() is not None
    assert SamplingParams().sampler([1, 2, 3, 4, 5]).next() is None


def test_refusals(base: Model) -> None:
    draw = PARAMS[0].sampler().next()
    with Session(base, n_ctx=64) as session, session.open() as seq:
        with pytest.raises(ImpError, match="2 draws for 1 outputs"):
            session.core.choose([(seq.id, np.arange(3, dtype=np.int32), 2)], [draw, None])
        vocab = base.vocab_size
        outside = SamplingParams().sampler([vocab]).next()
        with pytest.raises(ImpError, match=f"suppressed token {vocab}, the vocabulary has {vocab}"):
            seq.choose([1], outside)
        with pytest.raises(ImpError, match="a step without tokens"):
            seq.choose([], draw)
        assert seq.length == 0
