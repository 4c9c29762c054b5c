"""Experts on the host behind a cache: the same bits for every size of the cache and policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime import ImpError, expert_sim, trace
from imp_runtime.cli.main import main
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts

LAYERS, EXPERTS, K = 3, 40, 10
SPEC = f"flash-next:layers={LAYERS},experts={EXPERTS},vocab=1000,table=512"
POLICIES = ["lru", "pool", "lrfu:16", "pool-lrfu:16"]


@pytest.fixture(scope="module")
def model(cuda: None) -> Model:
    return Model.synthetic(SPEC, device="cuda")


def run(model: Model, batch: int, **options: object) -> tuple[list[np.ndarray], dict]:
    """Logits of a prompt in one chunk, then of decode steps; the cache's counts."""
    rng = np.random.RandomState(3)
    out = []
    with Session(model, n_ctx=512, max_seqs=batch, **options) as session:  # type: ignore[arg-type]
        seqs = [session.open() for _ in range(batch)]
        for seq in seqs:
            out.append(seq.extend(rng.randint(0, 1000, 150).astype(np.int32)).copy())
        for _ in range(12):
            tokens = rng.randint(0, 1000, (batch, 1)).astype(np.int32)
            requests = [(s.id, t, 0) for s, t in zip(seqs, tokens, strict=True)]
            out.append(np.array(session.core.step(requests)))
        return out, session.expert_stats()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_cache_gives_the_same_logits(model: Model, batch: int) -> None:
    want, none = run(model, batch)
    assert none["slots"] == 0
    pairs = LAYERS * EXPERTS
    for policy in POLICIES:
        for slots in (LAYERS * K, pairs // 2, pairs):
            for graphs in (True, False):
                got, stats = run(
                    model, batch, expert_slots=slots, expert_policy=policy, graphs=graphs
                )
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_array_equal(a, b)
                assert stats["slots"] == slots
                assert 0 < sum(stats["hits"]) < sum(stats["wanted"])
                if slots == pairs:  # every expert is read once
                    assert sum(stats["wanted"]) - sum(stats["hits"]) <= pairs


def greedy(model: Model, batch: int, **options: object) -> tuple[list[np.ndarray], list[list[int]]]:
    """Logits of every step, and the text of each sequence: prompts of 17 tokens and more, then 16
    that are the likeliest."""
    rng = np.random.RandomState(8)
    with Session(model, n_ctx=64, max_seqs=batch, **options) as session:  # type: ignore[arg-type]
        seqs = [session.open() for _ in range(batch)]
        prompts = [rng.randint(0, model.vocab_size, 17 + i).astype(np.int32) for i in range(batch)]
        rows = [seq.extend(p)[-1].copy() for seq, p in zip(seqs, prompts, strict=True)]
        steps = [np.stack(rows)]
        for _ in range(16):
            tokens = np.argmax(rows, axis=1).astype(np.int32)
            requests = [(q.id, tokens[i : i + 1], 0) for i, q in enumerate(seqs)]
            rows = list(np.array(session.core.step(requests)))
            steps.append(np.stack(rows))
        return steps, np.stack([step.argmax(1) for step in steps], axis=1).tolist()


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["prose", "experts512"])
def test_real_models(pair: Callable[[str], tuple[Model, Model]], name: str, batch: int) -> None:
    """The shipped model and 512 experts: logits and text from the least cache to the whole."""
    cuda = pair(name)[1]
    want, text = greedy(cuda, batch, expert_slots=-1)
    sizes = cuda.sizes()
    pairs, least = sizes.expert_layers * sizes.experts, sizes.expert_layers * sizes.experts_used
    for policy in POLICIES:
        for slots in (least, pairs // 4, pairs // 2, pairs):
            for graphs in (True, False):
                cache = {"expert_slots": slots, "expert_policy": policy}
                got, same = greedy(cuda, batch, **cache, graphs=graphs, poison=True)
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_array_equal(a, b)
                assert same == text


def test_experts_beside_their_gather_or_after_it(model: Model) -> None:
    slots = LAYERS * K
    want, beside = run(model, 1, expert_slots=slots)
    got, after = run(model, 1, expert_slots=slots, overlap_gathers=False)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert after["hits"] == beside["hits"]


def test_the_last_of_512_experts(cuda: None) -> None:
    """All of a layer's experts are chosen, the last ones too, with a third of them cached."""
    wide = Model.synthetic("flash-next:layers=2,experts=512,vocab=1000,table=512", device="cuda")
    want, _ = run(wide, 8)
    with Session(wide, n_ctx=512, taps=["blk.*.expert_ids"]) as session, session.open() as seq:
        seq.extend(np.random.RandomState(3).randint(0, 1000, 150).astype(np.int32))
        ids = np.concatenate([session.taps()[f"blk.{i}.expert_ids"].ravel() for i in range(2)])
        assert {0, 255, 256, 511} <= set(ids.tolist())
    for policy in ("lru", "pool-lrfu"):
        got, stats = run(wide, 8, expert_slots=2 * 171, expert_policy=policy)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        assert 0 < sum(stats["hits"]) < sum(stats["wanted"])


def test_counts_equal_the_simulation(model: Model) -> None:
    """The cache of a run, and the reference on the ids that the run chose."""
    from imp_runtime import _core

    rng = np.random.RandomState(5)
    tokens = rng.randint(0, 1000, 60)
    with Session(model, n_ctx=128, taps=["blk.*.expert_ids"]) as session, session.open() as seq:
        ids = []
        for t in tokens:
            seq.extend([t])
            taps = session.taps()
            ids.append(np.stack([taps[f"blk.{i}.expert_ids"][0] for i in range(LAYERS)]))
    trace = np.stack(ids).astype(np.uint16)
    for policy in POLICIES:
        slots = LAYERS * 17
        with Session(model, n_ctx=128, expert_slots=slots, expert_policy=policy) as session:
            with session.open() as seq:
                for t in tokens:
                    seq.extend([t])
            stats = session.expert_stats()
        want = _core.simulate_experts(
            trace, [1] * len(tokens), experts=EXPERTS, slots=slots, policy=policy, first_counted=0
        )
        assert stats["wanted"] == want["layer_wanted"]
        assert stats["hits"] == want["layer_hits"]
        assert sum(stats["kept"]) == want["kept"]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_trace_hits_as_imp_sim_says(
    model: Model, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decode steps whose experts come from a file, and `imp sim` on that file."""
    made = expert_sim.planted("prose", tokens=60, layers=LAYERS, experts=EXPERTS, used=K)
    file = tmp_path / "t.npz"
    trace.save(made, file)
    for policy in POLICIES:
        with Session(
            model,
            n_ctx=128,
            max_seqs=batch,
            expert_slots=LAYERS * 32,
            expert_policy=policy,
            routing=f"trace:{file}",
        ) as session:
            seqs = [session.open() for _ in range(batch)]
            for step in range(60 // batch):
                session.core.step([(s.id, np.array([step], np.int32), 0) for s in seqs])
            counts = ExpertCounts.of(session.expert_stats())
        sizes = ("--experts-per-layer", "32", "--policy", policy, "--batch", str(batch), "--json")
        assert main(["sim", "--trace", str(file), *sizes]) == 0
        (point,) = json.loads(capsys.readouterr().out)[0]["points"]
        assert counts is not None and counts.wanted == point["wanted"]
        assert abs(counts.hit_rate - point["hit_rate"]) < 0.001


def test_refusals(model: Model) -> None:
    with pytest.raises(ImpError, match="2 slots for 3 layers of 40 experts"):
        run(model, 1, expert_slots=2)
    with pytest.raises(ImpError, match=r"need \d+ bytes of pinned memory, the limit is 1000000"):
        run(model, 1, expert_slots=30, ram_limit=1_000_000)
