"""Whole models on CUDA against the CPU, and CUDA against itself: replay, batches, pieces, forks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.placement import Limits, choose_device
from imp_runtime.session import Session

Pair = Callable[[str], tuple[Model, Model]]
RECIPES = ["base", "experts512", "options", "dense_attention", "prose"]
KL_TOLERANCE = 1e-4  # per token, against the CPU's fp32
BATCH_KL_TOLERANCE = 1e-6


def tokens_of(model: Model, n: int, seed: int = 1) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, min(model.vocab_size, 300), n).astype(np.int32)


def kl(base: np.ndarray, other: np.ndarray) -> np.ndarray:
    """float64 [rows]: KL divergence of softmax(other) from softmax(base)"""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        y = x.astype(np.float64)
        y -= y.max(axis=-1, keepdims=True)
        return y - np.log(np.exp(y).sum(axis=-1, keepdims=True))

    p, q = log_softmax(base), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def logits_of(model: Model, tokens: np.ndarray, piece: int = 512, **options: bool) -> np.ndarray:
    """float32 [tokens, vocab]"""
    with Session(model, n_ctx=2048, n_ubatch=512, **options) as session, session.open() as seq:
        parts = [
            seq.extend(tokens[i : i + piece], outputs="all").copy()
            for i in range(0, len(tokens), piece)
        ]
    return np.concatenate(parts)


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.tobytes() == want.tobytes(), np.abs(got - want).max()


@pytest.mark.parametrize("name", RECIPES)
def test_against_the_cpu(pair: Pair, name: str) -> None:
    """300 tokens: index blocks are left out, and unused memory is NaN."""
    cpu, cuda = pair(name)
    tokens = tokens_of(cpu, 300)
    got = logits_of(cuda, tokens, poison=True)
    assert np.isfinite(got).all()
    worst = kl(logits_of(cpu, tokens), got).max()
    assert worst <= KL_TOLERANCE, worst


def test_long_context_against_the_cpu(pair: Pair) -> None:
    cpu, cuda = pair("prose")
    tokens = tokens_of(cpu, 1500, 2)
    worst = kl(logits_of(cpu, tokens), logits_of(cuda, tokens, poison=True))
    assert worst.mean() <= KL_TOLERANCE, (worst.mean(), worst.max())


@pytest.mark.parametrize("name", ["base", "prose"])
def test_replay_is_the_eager_run(pair: Pair, name: str) -> None:
    """Pieces of 1 and 7: each shape runs eagerly, is captured, and is replayed many times."""
    _, cuda = pair(name)
    tokens = tokens_of(cuda, 84)
    for piece in (1, 7):
        eager = logits_of(cuda, tokens, piece, graphs=False, poison=True)
        same(logits_of(cuda, tokens, piece, graphs=True, poison=True), eager)


@pytest.mark.parametrize("name", ["base", "experts512", "prose"])
def test_runs_repeat_bit_for_bit(pair: Pair, name: str) -> None:
    _, cuda = pair(name)
    tokens = tokens_of(cuda, 200)
    same(logits_of(cuda, tokens), logits_of(cuda, tokens))


@pytest.mark.parametrize("piece", [1, 5, 57])
def test_pieces_are_the_whole(pair: Pair, piece: int) -> None:
    _, cuda = pair("base")
    tokens = tokens_of(cuda, 171)
    worst = kl(logits_of(cuda, tokens), logits_of(cuda, tokens, piece)).max()
    assert worst <= BATCH_KL_TOLERANCE, worst


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("count", [2, 3, 8, 33, 64])
def test_batch_is_its_singles(pair: Pair, count: int, invariant: bool) -> None:
    """Sequences of different lengths decode together; each gets what it gets alone: the same bits
    if that is asked for."""
    _, cuda = pair("base")
    options = {"n_ctx": 128, "batch_invariant": invariant}
    prompts = [tokens_of(cuda, 1 + 5 * i % 37, 10 + i) for i in range(count)]
    nexts = [tokens_of(cuda, 4, 100 + i) for i in range(count)]
    alone = []
    for prompt, more in zip(prompts, nexts, strict=True):
        with Session(cuda, **options) as session, session.open() as seq:
            seq.extend(prompt, outputs="none")
            alone.append(np.concatenate([seq.extend(more[i : i + 1]).copy() for i in range(4)]))
    with Session(cuda, max_seqs=count, poison=True, **options) as session:
        seqs = [session.open() for _ in range(count)]
        for seq, prompt in zip(seqs, prompts, strict=True):
            seq.extend(prompt, outputs="none")
        for i in range(4):
            requests = [(s.id, n[i : i + 1], 0) for s, n in zip(seqs, nexts, strict=True)]
            together = session.core.step(requests)
            for j in range(count):
                if invariant:
                    same(together[j], alone[j][i])
                else:
                    worst = kl(alone[j][i : i + 1], together[j : j + 1]).max()
                    assert worst <= BATCH_KL_TOLERANCE, worst


def test_fork_continues_like_a_replay(pair: Pair) -> None:
    _, cuda = pair("base")
    prompt, more = tokens_of(cuda, 70), tokens_of(cuda, 9, 3)
    with Session(cuda, n_ctx=128, max_seqs=2, poison=True) as session, session.open() as seq:
        seq.extend(prompt, outputs="none")
        with seq.fork() as other:
            a = [other.extend(more[i : i + 1]).copy() for i in range(9)]
            b = [seq.extend(more[i : i + 1]).copy() for i in range(9)]
    same(np.concatenate(a), np.concatenate(b))


def test_taps_follow_the_cpu(pair: Pair) -> None:
    """Every layer's residual, so that a wrong op shows where it is."""
    cpu, cuda = pair("base")
    tokens = tokens_of(cpu, 40)
    taps = []
    for model in (cpu, cuda):
        with Session(model, n_ctx=64, taps=["blk.*.residual"]) as session, session.open() as seq:
            seq.extend(tokens)
            taps.append({name: value.copy() for name, value in session.taps().items()})
    assert taps[0].keys() == taps[1].keys() and taps[0]
    for name, want in taps[0].items():
        assert np.abs(taps[1][name] - want).max() <= 1e-4 * np.abs(want).max(), name


def test_two_sessions_share_a_process(pair: Pair) -> None:
    _, cuda = pair("base")
    tokens = tokens_of(cuda, 20)
    with Session(cuda, n_ctx=64) as a, Session(cuda, n_ctx=64) as b:
        with a.open() as x, b.open() as y:
            for i in range(20):
                one, two = tokens[i : i + 1], tokens[19 - i : 20 - i]
                x.extend(one)
                last = y.extend(two).copy()
    same(last[0], logits_of(cuda, tokens[::-1].copy(), 1)[-1])


@pytest.mark.parametrize("options", [{}, {"expert_slots": 60}])
def test_sessions_share_weights(cuda: None, options: dict[str, int]) -> None:
    """On the device and pinned, uploaded once, and gone with the last session."""
    model = Model.synthetic("flash-next:layers=3,experts=40,vocab=1000,table=512", device="cuda")
    tokens, held = tokens_of(model, 30), model.weights

    def run() -> tuple[Session, np.ndarray]:
        session = Session(model, n_ctx=64, **options)  # type: ignore[arg-type]
        return session, session.open().extend(tokens, outputs="all").copy()

    assert held.device_bytes == held.pinned_bytes == 0
    one, want = run()
    size = held.device_bytes, held.pinned_bytes
    assert size[0] > 0 and (size[1] > 0) == bool(options)
    two, got = run()
    assert (held.device_bytes, held.pinned_bytes) == size
    same(got, want)
    one.close()
    with Session(model, n_ctx=64) as three, three.open() as seq:  # all experts on the device
        same(seq.extend(tokens, outputs="all"), want)
        assert (held.device_bytes > size[0]) == bool(options)
    two.close()
    assert held.device_bytes == held.pinned_bytes == 0


@pytest.mark.parametrize("dense", ["bf16", "q8_0"])
def test_synthetic_weights_are_the_cpus(cuda: None, dense: str) -> None:
    """The device makes the same bytes by itself."""
    spec = f"flash-next:layers=4,experts=12,vocab=300,table=1600,dense={dense}"
    tokens = np.arange(70, dtype=np.int32)
    cpu, device = (logits_of(Model.synthetic(spec, device=d), tokens) for d in ("cpu", "cuda"))
    worst = kl(cpu, device).max()
    assert worst <= KL_TOLERANCE, worst


def test_sessions_say_who_takes_large_maps(pair: Pair) -> None:
    _, cuda = pair("base")
    found, detail = _core.cublas_lt()
    for invariant in (False, True):
        with Session(cuda, n_ctx=16, batch_invariant=invariant) as session:
            uses = found and not invariant
            assert session.backend.endswith(
                f", cuBLASLt {detail}" if uses else ", without cuBLASLt"
            )


def test_auto_is_cuda_where_the_weights_fit(cuda: None) -> None:
    sizes = Model.synthetic("flash-next:layers=4,experts=12,vocab=300,table=1600").sizes
    assert choose_device("auto", sizes, Limits()) == ("cuda", "")
    device, why = choose_device("auto", sizes, Limits(vram_bytes=1 << 20))
    assert device == "cpu" and why.startswith("on the CPU: ")


@pytest.mark.parametrize("name", ["base", "prose"])
@pytest.mark.parametrize("types", [("f16", "f16"), ("bf16", "bf16"), ("f16", "f32")])
def test_cache_types_follow_the_cpu(pair: Pair, name: str, types: tuple[str, str]) -> None:
    """In pieces of 100 and then one by one."""
    cpu, cuda = pair(name)
    tokens = tokens_of(cpu, 130)
    options = {"cache_type_k": types[0], "cache_type_v": types[1]}
    found = []
    for model in (cpu, cuda):
        with Session(model, n_ctx=130, poison=True, **options) as session:  # type: ignore[arg-type]
            with session.open() as seq:
                first = seq.extend(tokens[:100], outputs="all").copy()
                rest = [seq.extend(tokens[i : i + 1]).copy() for i in range(100, 130)]
                found.append(np.concatenate([first, *rest]))
    worst = kl(*found).max()
    assert worst <= KL_TOLERANCE, worst


def test_cache_types_that_cuda_lacks(pair: Pair) -> None:
    cuda = pair("base")[1]
    for option in ("cache_type_k", "cache_type_v"):
        with pytest.raises(
            ImpError, match="^cuda: cache type q8_0 is not supported, only f32, f16, bf16$"
        ):
            Session(cuda, n_ctx=16, **{option: "q8_0"})  # type: ignore[arg-type]
