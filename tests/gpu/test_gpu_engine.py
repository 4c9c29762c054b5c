"""Requests that run together on CUDA: batches, kept states, preemption, snapshots, windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.engine import Engine
from imp_runtime.eval import PerplexityOptions, perplexity
from imp_runtime.llm import LLM
from imp_runtime.model import Model
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from imp_runtime.snapshot import Snapshot
from imp_runtime.tokenizer import Tokenizer
from tests.models.golden import Golden
from tests.runtime.traffic import Ask, asks, nothing_held, run, submit

File = Callable[[str], Path]
Pair = Callable[[str], tuple[Model, Model]]
PROMPTS = ["The old house", "It was a dark night, and", "x", "At noon the ship " * 5]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)


def test_a_batch_equals_singles(cuda: None, gguf_file: File) -> None:
    path = gguf_file("prose")
    with LLM(path, device="cuda", n_ctx=512, n_parallel=1, batch_invariant=True) as llm:
        alone = [llm.generate(p, PARAMS)[0].token_ids for p in PROMPTS]
    with LLM(path, device="cuda", n_ctx=512, n_parallel=4, batch_invariant=True) as llm:
        assert llm.session.backend.startswith("cuda")
        assert [c.token_ids for c in llm.generate(PROMPTS, PARAMS)] == alone
        assert nothing_held(llm.session)


def test_a_prefix_hit_equals_a_cold_start(cuda: None, gguf_file: File, tmp_path: Path) -> None:
    """From memory, and from the folder in a second session."""
    prompt = "The old house stood on the hill. " * 8
    for again in (False, True):
        with LLM(
            gguf_file("prose"),
            device="cuda",
            n_ctx=512,
            prefix_cache=64 << 20,
            cache_dir=tmp_path / "states",
        ) as llm:
            cold = llm.generate(prompt, PARAMS, use_cache=False)[0]
            first, second = (llm.generate(prompt, PARAMS)[0] for _ in range(2))
            assert (first.timings.cached_tokens > 0) == again
            assert second.timings.cached_tokens >= 64
            assert first.token_ids == second.token_ids == cold.token_ids


@pytest.mark.parametrize("name", ["base", "experts512"])
def test_preempted_is_undisturbed(pair: Pair, name: str) -> None:
    _, model = pair(name)
    batch = asks(8, seed=3, longest=30, most=50)
    tokenizer = Tokenizer(model.keys)
    with Session(model, n_ctx=96, poison=True, batch_invariant=True) as session:
        engine = Engine(session, tokenizer)
        want = [run(engine, [a.again()])[0] for a in batch]
    options = {"max_seqs": 6, "cache_tokens": 80}
    with Session(model, n_ctx=96, poison=True, batch_invariant=True, **options) as session:
        engine = Engine(session, tokenizer)
        again = [Ask(a.prompt, a.params) for a in batch]
        requests = [submit(engine, a) for a in again]
        engine.wait(lambda: all(a.ended for a in again))
        assert [a.tokens for a in again] == want
        assert sum(r.preemptions for r in requests) >= 3
        assert nothing_held(session)


@pytest.mark.parametrize("name", ["experts512", "prose"])
def test_a_snapshot_goes_on(pair: Pair, name: str, tmp_path: Path) -> None:
    """In another session; and the CPU's model has the same hash."""
    cpu, model = pair(name)
    tokens = Golden(name).tokens("long")
    with Session(model, n_ctx=192, poison=True) as session:
        seq = session.open()
        seq.extend(tokens[:70])
        seq.save().write(tmp_path / "s")
        want = [seq.extend([t]).copy() for t in tokens[70:90]]
        mine = session.core.model_hash
    with Session(model, n_ctx=192, poison=True) as session:
        back = session.restore(Snapshot.read(tmp_path / "s"))
        got = [back.extend([t]).copy() for t in tokens[70:90]]
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))
    with Session(cpu, n_ctx=192) as session:
        assert session.core.model_hash == mine


def test_windows_share_steps(pair: Pair) -> None:
    _, model = pair("prose")
    tokens = [int(t) for t in Golden("prose")["tokens"][:1024]]
    with Session(model, n_ctx=128, max_seqs=4) as session:
        together = perplexity(session, tokens, PerplexityOptions(128))
        alone = perplexity(session, tokens, PerplexityOptions(128, n_parallel=1))
        np.testing.assert_allclose(together.nll, alone.nll, atol=1e-3)
        assert together.ppl == pytest.approx(alone.ppl, rel=1e-4)
        assert nothing_held(session)
