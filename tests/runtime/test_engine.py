"""Requests that run together: the same tokens as alone, whatever happens around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from imp_runtime.engine import Engine
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk
from imp_runtime.model import Model
from imp_runtime.prefix_cache import PrefixCache
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from imp_runtime.tokenizer import Tokenizer
from tests.models.golden import MODELS
from tests.runtime.traffic import Ask, Flaky, alone, asks, engine_of, nothing_held, run, submit

Load = Callable[[str], Model]


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_equals_singles(name: str, model: Load) -> None:
    batch = asks(10, seed=1)
    want = alone(model(name), batch)
    for n_ubatch, n in ((8, 4), (64, 10)):
        with Session(
            model(name), n_ctx=96, max_seqs=n, n_threads=1, n_ubatch=n_ubatch, poison=True
        ) as session:
            assert run(engine_of(session), [a.again() for a in batch]) == want
            assert nothing_held(session)


@pytest.mark.parametrize(("name", "longest", "most"), [("experts512", 40, 12), ("prose", 20, 6)])
def test_interleavings(name: str, longest: int, most: int, model: Load) -> None:
    """Any order of arrival, at any time, with any sizes: the same 12 texts."""
    batch = asks(12, seed=2, longest=longest, most=most)
    want = alone(model(name), batch)
    rng = np.random.RandomState(0)
    with Session(
        model(name), n_ctx=96, max_seqs=5, n_threads=1, n_ubatch=32, cache_tokens=256, poison=True
    ) as session:
        tokenizer = Tokenizer(session.model.keys)
        for _ in range(200):
            engine = Engine(
                session,
                tokenizer,
                n_parallel=int(rng.randint(2, 6)),
                prefill_tokens=int(rng.randint(1, 33)),
            )
            again = [a.again() for a in batch]
            for i in rng.permutation(len(again)):
                submit(engine, again[i])
                for _ in range(rng.randint(0, 4)):
                    engine.step()
            engine.wait(lambda again=again: all(a.ended for a in again))  # type: ignore[misc]
            assert [a.tokens for a in again] == want
            assert nothing_held(session)


@pytest.mark.parametrize("name", MODELS)
def test_preempted_is_undisturbed(name: str, model: Load) -> None:
    batch = asks(8, seed=3, longest=30, most=50)
    want = alone(model(name), batch)
    with Session(
        model(name), n_ctx=96, max_seqs=6, n_threads=1, cache_tokens=80, poison=True
    ) as session:
        engine = engine_of(session)
        again = [a.again() for a in batch]
        requests = [submit(engine, a) for a in again]
        engine.wait(lambda: all(a.ended for a in again))
        assert [a.tokens for a in again] == want
        assert sum(r.preemptions for r in requests) >= 3
        assert nothing_held(session)


def error_of(ask: Ask) -> str:
    assert ask.ended and isinstance(ask.events[-1], ImpError)
    return str(ask.events[-1])


def test_errors_end_their_request_only(model: Load) -> None:
    good = asks(3, seed=4)
    want = alone(model("base"), good)
    params = SamplingParams(max_tokens=4, seed=1)
    vocab = model("base").vocab_size
    with Session(
        model("base"), n_ctx=96, max_seqs=2, cache_tokens=64, n_threads=1, poison=True
    ) as session:
        engine = engine_of(session)
        bad = {
            "the prompt has no tokens": [],
            "the prompt has 97 tokens, the context holds 96": [1] * 97,
            "the prompt needs 5 cache pages, there are 4": [1] * 65,
            f"token id {vocab} is outside the vocabulary of {vocab}": [1, vocab],
            "token id -1 is outside": [-1],
        }
        wrong = [Ask(p, params) for p in bad.values()]
        mixed = [wrong[0], good[0], wrong[1], wrong[2], good[1], wrong[3], good[2], wrong[4]]
        for ask in mixed:
            submit(engine, ask)
        engine.wait(lambda: all(a.ended for a in mixed))
        assert [a.tokens for a in good] == want
        for ask, text in zip(wrong, bad, strict=True):
            assert text in error_of(ask)
        assert nothing_held(session)
        limit = Ask([1] * 64, SamplingParams(max_tokens=1, seed=1))
        assert len(run(engine, [limit])[0]) == 1


def test_a_request_that_outgrows_the_cache(model: Load) -> None:
    with Session(
        model("base"), n_ctx=96, max_seqs=2, cache_tokens=48, n_threads=1, poison=True
    ) as session:
        engine = engine_of(session)
        params = SamplingParams(max_tokens=80, seed=1, ignore_eos=True)
        long, short = Ask([5] * 20, params), Ask([6] * 8, SamplingParams(max_tokens=3, seed=2))
        for ask in (long, short):
            submit(engine, ask)
        engine.wait(lambda: long.ended and short.ended)
        assert "cache pages: 1 needed, 0 available" in error_of(long)
        assert len(short.tokens) >= 1
        assert len(long.events) == 48 - 20 + 1 + 1  # a token after each that was read, the error
        assert nothing_held(session)


def test_the_last_token_of_the_context(model: Load) -> None:
    with Session(model("base"), n_ctx=32, max_seqs=2, n_threads=1) as session:
        ask = Ask([5] * 30, SamplingParams(max_tokens=None, seed=1, ignore_eos=True))
        assert len(run(engine_of(session), [ask])[0]) == 3
        assert isinstance(ask.events[-1], Chunk) and ask.events[-1].finish_reason == "length"
        empty = Ask([5], SamplingParams(max_tokens=0))
        engine = engine_of(session)
        submit(engine, empty)
        engine.wait(lambda: empty.ended)
        assert empty.events == [None]


def test_memory_held_by_others(model: Load) -> None:
    with Session(model("base"), n_ctx=64, max_seqs=2, cache_tokens=64, n_threads=1) as session:
        engine = engine_of(session)
        mine = session.open()
        mine.extend([1] * 40)
        ask = Ask([2] * 20, SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
        submit(engine, ask)
        engine.step()
        assert "needs 1 sequence and 2 cache pages, 1 and 1 are free" in error_of(ask)
        other, late = session.open(), ask.again()
        submit(engine, late)
        engine.step()
        assert "needs 1 sequence and 2 cache pages, 0 and 1 are free" in error_of(late)
        for seq in (mine, other):
            seq.close()
        assert len(run(engine, [ask.again()])[0]) == 2


def test_cancel_anywhere(model: Load) -> None:
    batch = asks(6, seed=5, longest=40, most=20)
    want = alone(model("base"), batch)
    rng = np.random.RandomState(1)
    with Session(
        model("base"), n_ctx=96, max_seqs=3, n_ubatch=8, cache_tokens=112, n_threads=1, poison=True
    ) as session:
        engine = engine_of(session)
        for _ in range(15):
            again = [a.again() for a in batch]
            requests = [submit(engine, a) for a in again]
            gone = {int(i) for i in rng.permutation(6)[:3]}
            for i in gone:
                for _ in range(rng.randint(0, 8)):
                    engine.step()
                engine.cancel(requests[i])
            engine.wait(lambda again=again: all(a.ended for a in again))  # type: ignore[misc]
            for i, ask in enumerate(again):
                if i in gone and isinstance(ask.events[-1], ImpError):
                    assert error_of(ask) == "cancelled"
                    got = [e.token_id for e in ask.events if isinstance(e, Chunk)]
                    assert got == want[i][: len(got)]
                else:
                    assert ask.tokens == want[i]
            assert nothing_held(session)


def test_deadline(model: Load) -> None:
    with Session(model("base"), n_ctx=96, max_seqs=2, n_threads=1) as session:
        engine = engine_of(session)
        params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
        late, calm = Ask([1, 2, 3], params), Ask([1, 2, 3], params)
        submit(engine, late, timeout=0.05)
        submit(engine, calm, timeout=1000.0)
        engine.step()
        engine.step()
        time.sleep(0.06)
        engine.wait(lambda: calm.ended)
        assert error_of(late) == "the time was over after 2 tokens"
        assert len(calm.tokens) == 50
        assert nothing_held(session)


def test_a_consumer_that_fails(model: Load) -> None:
    with Session(model("base"), n_ctx=96, max_seqs=2, n_threads=1) as session:
        engine = engine_of(session)
        seen = []

        def deliver(event: object) -> None:
            seen.append(event)
            raise RuntimeError("gone")

        params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
        engine.submit([1, 2], params, deliver)
        other = Ask([1, 2], params)
        assert len(run(engine, [other])[0]) == 50
        assert len(seen) == 2  # the first chunk, and that it was cancelled
        assert nothing_held(session)


def test_interrupted_inside_a_step(model: Load) -> None:
    with Session(model("base"), n_ctx=96, max_seqs=2, n_threads=1) as session:
        engine = engine_of(session)
        params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
        first, second = Ask([1, 2], params), Ask([3, 4], params)

        def interrupt(event: object) -> None:
            raise KeyboardInterrupt

        submit(engine, first)
        engine.submit([5], params, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert "interrupted by KeyboardInterrupt" in error_of(first)
        assert nothing_held(session)
        assert len(run(engine, [second])[0]) == 50


def test_threads_submit_while_another_serves(model: Load) -> None:
    batch = asks(12, seed=6)
    want = alone(model("base"), batch)
    with Session(model("base"), n_ctx=96, max_seqs=4, n_threads=1, poison=True) as session:
        engine = engine_of(session)
        server = threading.Thread(target=engine.serve)
        server.start()

        def client(part: list[Ask]) -> None:
            for ask in part:
                submit(engine, ask)
                while not ask.ended:
                    time.sleep(0.001)

        clients = [threading.Thread(target=client, args=(batch[i::3],)) for i in range(3)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(60)
        assert [a.tokens for a in batch] == want
        last = Ask([1], SamplingParams(max_tokens=90, seed=1, ignore_eos=True))
        submit(engine, last)
        engine.close()
        server.join(60)
        assert not server.is_alive()
        assert error_of(last) == "the engine was closed"
        with pytest.raises(ImpError, match="closed"):
            submit(engine, last)
        assert nothing_held(session)


def test_limits(model: Load) -> None:
    with Session(model("base"), n_ctx=32, max_seqs=8, n_ubatch=4, n_threads=1) as session:
        engine_of(session, n=4)
        with pytest.raises(ImpError, match="5 requests at once, a step has 4 tokens"):
            engine_of(session, n=5)


@pytest.mark.parametrize("with_cache", [False, True])
def test_steps_without_memory_are_tried_again_with_less(with_cache: bool, model: Load) -> None:
    batch = asks(6, seed=9)
    want = alone(model("base"), batch)
    with Session(model("base"), n_ctx=96, max_seqs=8, n_threads=1, poison=True) as session:
        cache = PrefixCache(session, 1 << 30) if with_cache else None
        engine = engine_of(session, cache=cache, n=4)
        engine._core = Flaky(session, "out_of_memory", 3)  # type: ignore[assignment]
        again = [a.again() for a in batch]
        requests = [submit(engine, a) for a in again[:-1]]
        engine.wait(lambda: all(a.ended for a in again[:-1]))
        if not with_cache:
            assert sum(r.preemptions for r in requests) > 0
        fine = [(a.tokens, w) for a, w in zip(again, want, strict=True) if error_free(a)]
        assert len(fine) >= (4 if with_cache else 2)  # kept states go before requests do
        assert all(got == w for got, w in fine)
        engine._core = session.core
        assert run(engine, [again[-1]]) == want[-1:]
        engine.close()
        assert nothing_held(session)


def test_kept_states_go_before_requests_do(model: Load) -> None:
    with Session(model("base"), n_ctx=96, max_seqs=8, n_threads=1) as session:
        cache = PrefixCache(session, 1 << 30)
        engine = engine_of(session, cache=cache, n=2)
        requests = [submit(engine, Ask([t] * 10, asks(1, 1)[0].params)) for t in (1, 2)]
        engine.step()
        assert len(cache) > 0
        engine._core = Flaky(session, "out_of_memory", 1)  # type: ignore[assignment]
        engine.step()
        assert len(cache) == 0 and [r.preemptions for r in requests] == [0, 0]
        engine.step()
        assert [r.preemptions for r in requests] == [0, 1]


def error_free(ask: Ask) -> bool:
    return ask.ended and not isinstance(ask.events[-1], ImpError)


def test_a_step_that_breaks_ends_those_in_it(model: Load) -> None:
    batch = asks(3, seed=10)
    want = alone(model("base"), batch)
    with Session(model("base"), n_ctx=96, max_seqs=2, n_threads=1, poison=True) as session:
        engine = engine_of(session)
        engine._core = Flaky(session, "numeric", 1)  # type: ignore[assignment]
        again = [a.again() for a in batch]
        for ask in again:
            submit(engine, ask)
        engine.step()
        assert [a.ended for a in again] == [True, True, False]
        assert error_of(again[0]) == "no memory today"
        engine._core = session.core
        engine.wait(lambda: again[2].ended)
        assert again[2].tokens == want[2]
        assert nothing_held(session)
