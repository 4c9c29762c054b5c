"""LLM and AsyncLLM over the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.async_llm import AsyncLLM
from imp_runtime.conversation import Conversation
from imp_runtime.errors import ImpError
from imp_runtime.llm import LLM
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from imp_runtime.timings import Timings
from tests.runtime.traffic import nothing_held

File = Callable[[str], Path]
PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=3, max_tokens=12, logprobs=2)
PROMPTS = ["one", "and two of them", "three, or so it is said, " * 3, "one", "x"]
CHAT = [
    {"role": "system", "content": "You are a ship. " * 3},
    {"role": "user", "content": "Sail!"},
]


@pytest.fixture(scope="module")
def single(prose_gguf: Path) -> Iterator[LLM]:
    with LLM(prose_gguf, n_ctx=256, n_threads=1, n_parallel=1) as llm:
        assert llm.engine is None
        yield llm


@pytest.fixture
def several(prose_gguf: Path) -> Iterator[LLM]:
    with LLM(prose_gguf, n_ctx=256, n_threads=1, n_parallel=3) as llm:
        yield llm
        assert nothing_held(llm.session)


def values(llm: LLM, prompts: list[str]) -> list[tuple[object, ...]]:
    done = llm.generate(prompts, PARAMS)
    return [(c.text, c.token_ids, c.finish_reason, c.logprobs, c.prompt_token_ids) for c in done]


def test_a_batch_equals_singles(single: LLM, several: LLM) -> None:
    want = values(single, PROMPTS)
    assert values(several, PROMPTS) == want
    assert values(several, PROMPTS[::-1]) == want[::-1]
    assert values(several, PROMPTS[2:3]) == want[2:3]
    assert several.generate([]) == []


def test_a_bad_prompt_stops_the_call_before_anything_runs(several: LLM) -> None:
    for bad, text in (("", "no tokens"), ([1] * 257, "257 tokens.* 256"), ([99999999], "outside")):
        with pytest.raises(ImpError, match=text):
            several.generate(["good", bad])
    assert nothing_held(several.session)


def test_a_stream_left_early(several: LLM, single: LLM) -> None:
    stream = several.stream("one", PARAMS)
    first = next(stream)
    other = several.stream("and two of them", PARAMS)  # at the same time
    second = next(other)
    stream.close()
    rest = list(other)
    want = values(single, ["one", "and two of them"])
    assert first.token_id == want[0][1][0]  # type: ignore[index]
    assert [c.token_id for c in (second, *rest)] == want[1][1]
    assert other.timings.decode_tokens == 11 and stream.timings.decode_tokens < 11


def test_timeout(several: LLM, single: LLM) -> None:
    """One clear error, whatever runs the generations; nothing stays behind."""
    endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
    for llm in (several, single):
        for call in (
            lambda llm=llm: llm.generate(PROMPTS, endless, timeout=0.02),
            lambda llm=llm: list(llm.stream("one", endless, timeout=0.02)),
            lambda llm=llm: llm.chat(CHAT, endless, timeout=0.02),
        ):
            with pytest.raises(ImpError, match=r"^the time was over after \d+ tokens$"):
                call()
            assert nothing_held(llm.session)
        with pytest.raises(ImpError, match="timeout is -1 seconds"):
            llm.generate("x", endless, timeout=-1)
    want = values(single, PROMPTS)
    done = several.generate(PROMPTS, PARAMS, timeout=1000)
    assert [c.token_ids for c in done] == [w[1] for w in want]


def test_interrupted_between_steps(several: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert several.engine is not None
    step, calls = several.engine.step, []

    def interrupted() -> bool:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(several.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        several.generate(PROMPTS, PARAMS)
    assert nothing_held(several.session) and several.engine.active == 0


def test_conversation_beside_the_engine(several: LLM, single: LLM) -> None:
    answers = []
    for llm in (several, single):
        talk = Conversation(llm)
        turns = [[c.token_id for c in talk.ask("Hello", PARAMS)]]
        if llm is several:
            llm.generate(PROMPTS[:3], PARAMS)
        turns.append([c.token_id for c in talk.ask("And what else?", PARAMS)])
        talk.close()
        answers.append(turns)
    assert answers[0] == answers[1]


def test_prefix_reuse_in_chats(prose_gguf: Path, single: LLM, tmp_path: Path) -> None:
    want = single.chat(CHAT, PARAMS).token_ids
    options = {"prefix_cache": 64 << 20, "cache_dir": tmp_path / "states"}
    for hit in (False, True):  # the second finds the files of the first
        with LLM(prose_gguf, n_ctx=256, n_threads=1, n_parallel=1, **options) as llm:  # type: ignore[arg-type]
            for again in (hit, True):
                done = llm.chat(CHAT, PARAMS)
                assert done.token_ids == want
                assert (done.timings.cached_tokens > 0) == again
            assert llm.chat(CHAT, PARAMS, use_cache=False).timings.cached_tokens == 0
            turn = [
                *CHAT,
                {"role": "assistant", "content": done.text},
                {"role": "user", "content": "Stop."},
            ]
            assert llm.chat(turn, PARAMS).token_ids == single.chat(turn, PARAMS).token_ids


def test_system_messages_are_shared(prose_gguf: Path, single: LLM) -> None:
    """Other conversations that begin alike do not read the system message again."""
    with LLM(prose_gguf, n_ctx=256, n_threads=1, prefix_cache=64 << 20) as llm:
        llm.chat(CHAT, PARAMS)
        ids = llm.chat_ids(CHAT)
        system, last = llm.turn_ends(CHAT, ids)
        assert 0 < system < last < len(ids)
        other = [CHAT[0], {"role": "user", "content": "Drop anchor!"}]
        done = llm.chat(other, PARAMS)
        assert done.timings.cached_tokens >= system
        assert done.token_ids == single.chat(other, PARAMS).token_ids
    assert single.turn_ends(CHAT, single.chat_ids(CHAT)) == []


def test_score(several: LLM, single: LLM) -> None:
    texts = ["It was a dark night", [5, 6, 7]]
    for got, text in zip(several.score(texts), texts, strict=True):
        with single.session.open() as seq:
            np.testing.assert_array_equal(got, seq.score(single.prompt_ids(text)))
    with pytest.raises(ImpError, match="no tokens"):
        several.score(["x", ""])


def test_options_are_checked(prose_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ImpError, match="n_parallel is 0"):
        LLM(prose_gguf, n_ctx=64, n_parallel=0)
    with pytest.raises(ImpError, match="cache_dir without prefix_cache"):
        LLM(prose_gguf, n_ctx=64, cache_dir=tmp_path)
    with pytest.raises(ImpError, match="prefix cache of 1 bytes; a state with one page takes"):
        LLM(prose_gguf, n_ctx=64, prefix_cache=1)


def test_nothing_is_decided_silently(
    prose_gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"n_threads": 1, "prefix_cache": 64 << 20, "cache_dir": tmp_path}
    with LLM(prose_gguf, **options) as llm:  # type: ignore[arg-type]
        trained = llm.model.context_length
        assert llm.n_ctx == trained and llm.notes == llm.model.notes
        llm.generate("one two three", PARAMS)
    monkeypatch.setattr(Session, "n_ctx", property(lambda self: 512))  # as where memory is short
    with LLM(prose_gguf, cache_type_k="f16", **options) as llm:  # type: ignore[arg-type]
        foreign, short = llm.notes[-2:]
        assert short == (
            f"the context is 512 tokens, the model was trained for {trained}: memory is short"
        )
        states = len(list(tmp_path.iterdir()))
        assert foreign.startswith(f"{tmp_path} also holds {states} states of other models or cache")


def test_asyncio(several: LLM, single: LLM) -> None:
    want = values(single, PROMPTS)

    async def main() -> None:
        async with AsyncLLM(several) as model:
            done = await model.generate(PROMPTS, PARAMS)
            assert [c.token_ids for c in done] == [w[1] for w in want]
            assert [c.text for c in done] == [w[0] for w in want]
            assert done[2].timings.prompt_tokens == len(done[2].prompt_token_ids)

            got = []
            async for chunk in model.stream(PROMPTS[2], PARAMS):
                got.append(chunk.token_id)
            assert got == want[2][1]

            timings = Timings()
            stream = model.stream(
                "a", SamplingParams(max_tokens=200, ignore_eos=True, seed=1), timings=timings
            )
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
            task = asyncio.create_task(model.complete("b", endless))
            await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ImpError, match="the time was over after 0 tokens"):
                await model.complete("c", PARAMS, timeout=0.0)
            with pytest.raises(ImpError, match="no tokens"):
                await model.complete("")
            chat = await model.chat(CHAT, PARAMS)
            assert chat.token_ids == single.chat(CHAT, PARAMS).token_ids
            while several.engine is not None and several.engine.active:
                await asyncio.sleep(0.01)
            assert timings.decode_tokens < 199
            left = asyncio.create_task(model.complete("d", endless))
            await asyncio.sleep(0.005)
        with pytest.raises(ImpError, match="closed"):
            await left
        assert "imp" not in [t.name for t in threading.enumerate()]

    asyncio.run(asyncio.wait_for(main(), 120))


def test_asyncio_needs_an_engine(single: LLM) -> None:
    with pytest.raises(ImpError, match="n_parallel of at least 2"):
        AsyncLLM(single)
