"""Tokens chosen on the device, and decode steps padded to few sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.llm import LLM
from imp_runtime.model import Model
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from tests.gpu.test_gpu_model import same, tokens_of

Pair = Callable[[str], tuple[Model, Model]]
NONE = np.empty(0, np.int32)
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def params_of(i: int) -> SamplingParams:
    rng = np.random.RandomState(i)
    return SamplingParams(
        temperature=float(rng.choice([0, 0.5, 1.0, 2.0])),
        top_k=int(rng.choice([0, 20, 40])),
        top_p=float(rng.choice([0.8, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.05])),
        seed=i,
    )


def test_the_device_chooses_as_the_sampler(pair: Pair) -> None:
    """64 sequences with different parameters; one step gives their tokens, another their logits."""
    _, cuda = pair("prose")
    tokens = [t[None] for t in tokens_of(cuda, 64)]
    here, there = ([params_of(i).sampler([3]) for i in range(64)] for _ in range(2))
    with Session(cuda, n_ctx=64, max_seqs=128, poison=True) as session:
        a, b = ([session.open() for _ in range(64)] for _ in range(2))
        by_host = 0
        for _ in range(8):
            requests = [(s.id, t, 0) for s, t in zip(a, tokens, strict=True)]
            got = session.core.choose(requests, [s.next() for s in here])
            left = [i for i, g in enumerate(got) if not isinstance(g, int)]
            by_host += len(left)
            for i, choice in enumerate(got):
                if isinstance(choice, int):
                    here[i].chosen()
                else:
                    got[i] = here[i].sample(choice, NONE)
            logits = session.core.step([(s.id, t, 0) for s, t in zip(b, tokens, strict=True)])
            want = [s.sample(x, NONE) for s, x in zip(there, logits, strict=True)]
            assert got == want
            tokens = [np.array([t], np.int32) for t in want]
        print(f"gate choose: {by_host} of {8 * 64} left to the host")
        assert by_host < 8 * 64 / 4


def test_text_is_the_same_by_device_and_host(cuda: None, gguf_file: Callable[[str], Path]) -> None:
    """Asking for log-probabilities brings the logits to the host."""
    prompts = ["The old house", "It was a dark night, and", "x"]
    for n_parallel in (1, 3):
        with LLM(gguf_file("prose"), device="cuda", n_ctx=256, n_parallel=n_parallel) as llm:
            for options in ({"temperature": 0.0}, {"seed": 3}, {"seed": 3, "ignore_eos": True}):
                texts = [
                    [c.token_ids for c in llm.generate(prompts, SamplingParams(max_tokens=40, **o))]  # type: ignore[arg-type]
                    for o in (options, options | {"logprobs": 0})
                ]
                assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["base", "experts512"])
def test_padding_changes_no_bit(pair: Pair, name: str) -> None:
    """Batches of 1 to 64 in few shapes, and the same with other sequences in place of padding."""
    _, cuda = pair(name)
    rng = np.random.RandomState(2)
    sizes = [*range(1, 65), *(int(n) for n in rng.randint(1, 65, 20))]
    tokens = rng.randint(0, 300, (len(sizes), 128, 1)).astype(np.int32)
    prompts = [tokens_of(cuda, 1 + i % 5, i) for i in range(64)]
    logits = []
    for filled in (False, True):
        with Session(cuda, n_ctx=160, max_seqs=80, poison=True) as session:
            seqs = [session.open() for _ in range(80)]
            for seq, prompt in zip(seqs, prompts, strict=False):
                seq.extend(prompt, outputs="none")
            before = session.core.compiled
            out = []
            for n, step in zip(sizes, tokens, strict=True):
                batch = [seqs[i] for i in np.roll(np.arange(64), 7 * n)[:n]]
                if filled:
                    batch += seqs[64 : 64 + min(b for b in BUCKETS if b >= n) - n]
                requests = [(s.id, t, 0) for s, t in zip(batch, step, strict=False)]
                out.append(session.core.step(requests)[:n].copy())
            logits.append(out)
            assert session.core.compiled - before == len(BUCKETS)
    for padded, full in zip(*logits, strict=True):
        same(padded, full)


@pytest.mark.parametrize("slots", [60, 120])
def test_padding_asks_for_no_expert(cuda: None, slots: int) -> None:
    """The cache counts the same experts, with planted routing too."""
    model = Model.synthetic("flash-next:layers=3,experts=40,vocab=1000,table=512", device="cuda")
    for routing in ("model", "prose"):
        counts = []
        for graphs in (True, False):
            rng = np.random.RandomState(4)
            with Session(
                model,
                n_ctx=64,
                max_seqs=7,
                expert_slots=slots,
                graphs=graphs,
                routing=routing,
                batch_invariant=True,
            ) as session:
                seqs = [session.open() for _ in range(7)]
                for n in (7, 5, 3, 6, 7, 1, 5) * 3:
                    step = rng.randint(0, 1000, (7, 1)).astype(np.int32)
                    session.core.step([(seqs[i].id, step[i], 0) for i in range(n)])
                stats = session.expert_stats()
                counts.append((stats["wanted"], stats["hits"], stats["kept"]))
        assert counts[0] == counts[1]
