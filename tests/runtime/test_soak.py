"""A thousand requests in random traffic on little memory: each ends in its text or in one error."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from imp_runtime.async_llm import AsyncLLM
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk
from imp_runtime.llm import LLM
from imp_runtime.model import Model
from imp_runtime.session import Session
from tests.runtime.traffic import Ask, Flaky, alone, asks, nothing_held

Load = Callable[[str], Model]
REQUESTS, CLIENTS, N_CTX, PAGES = 1000, 12, 240, 12
ERRORS = {
    "late": "the time was over after 0 tokens",
    "too long": "the prompt has 241 tokens, the context holds 240",
    "too large": "the prompt needs 13 cache pages, there are 12",
    "outgrows": "cache pages: 1 needed, 0 available",
    "bad token": "token id 99999 is outside the vocabulary of 311",
}
FATES = ["text"] * 8 + ["cancel", "leave", "drop", *ERRORS]
PROMPTS = {
    "too long": [1] * (N_CTX + 1),
    "too large": [1] * (16 * PAGES + 1),
    "outgrows": [1] * (16 * PAGES - 5),
    "bad token": [1, 99999],
}


def pool_of(n: int) -> list[Ask]:
    """Requests of all lengths; half of them begin alike."""
    pool = asks(n, seed=7, longest=40, most=60)
    for ask in pool[::2]:
        ask.prompt[:] = [*range(30), *ask.prompt][:60]
    return pool


async def one(
    model: AsyncLLM, ask: Ask, want: list[int], fate: str, rng: np.random.RandomState
) -> str:
    """Run a request to its fate; returns what came of it."""
    got: list[int] = []
    stream = model.stream(
        PROMPTS.get(fate, ask.prompt),
        replace(ask.params, max_tokens=40) if fate == "outgrows" else ask.params,
        timeout=0.0 if fate == "late" else None,
        use_cache=bool(rng.randint(4)),
    )
    keep = int(rng.randint(1, len(want) + 1))

    async def consume() -> None:
        async for chunk in stream:
            assert isinstance(chunk, Chunk)
            got.append(chunk.token_id)
            if fate in ("leave", "drop") and len(got) == keep:
                return

    task = asyncio.create_task(consume())
    if fate == "cancel":
        await asyncio.sleep(float(rng.rand()) * 0.02)
        task.cancel()
    try:
        await task
    except ImpError as error:
        if str(error) == Flaky.TEXT:  # there was nothing else to take room from
            return "shortage"
        assert ERRORS.get(fate) == str(error), (fate, str(error))
        assert len(got) == (6 if fate == "outgrows" else 0)  # one after each token that was read
        return fate
    except asyncio.CancelledError:
        assert fate == "cancel" and got == want[: len(got)]
        return "cancelled"
    if fate == "leave":
        await stream.aclose()  # type: ignore[attr-defined]
    if fate in ("leave", "drop"):  # a dropped stream is left to the garbage collector
        assert got == want[:keep]
        return fate
    assert fate in ("text", "cancel") and got == want, fate
    return "text"


async def traffic(llm: LLM, pool: list[Ask], wants: list[list[int]]) -> Counter[str]:
    came: Counter[str] = Counter()
    numbers = iter(range(REQUESTS))

    async def client() -> None:
        for number in numbers:
            rng = np.random.RandomState(number)
            which, fate = int(rng.randint(len(pool))), FATES[rng.randint(len(FATES))]
            came[await one(model, pool[which], wants[which], fate, rng)] += 1

    async with AsyncLLM(llm) as model:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        gc.collect()
        assert llm.engine is not None
        while llm.engine.active:
            await asyncio.sleep(0.005)
        # the same traffic's memory is free again: what is held are kept states alone
        kept = llm.session.core.pages_held_by(llm.engine.cache.seqs)  # type: ignore[union-attr]
        assert llm.session.core.free_pages + kept == llm.session.core.pages
    return came


def test_a_thousand_requests(model: Load, tmp_path: Path) -> None:
    pool = pool_of(100)
    wants = alone(model("experts512"), pool, N_CTX)
    session = Session(
        model("experts512"),
        n_ctx=N_CTX,
        max_seqs=14,
        n_ubatch=32,
        cache_tokens=16 * PAGES,
        n_threads=1,
        poison=True,
    )
    llm = LLM.from_session(
        model("experts512"),
        session,
        n_parallel=8,
        prefix_cache=8 * session.core.row_bytes,
        cache_dir=tmp_path,
    )
    assert llm.engine is not None and llm.engine.cache is not None
    preempted = []
    change = llm.engine._change

    def counted(action: str, request: object) -> None:
        preempted.append(action == "preempt")
        change(action, request)  # type: ignore[arg-type]

    llm.engine._change = counted  # type: ignore[method-assign]
    llm.engine._core = Flaky(session, "out_of_memory", 97)  # type: ignore[assignment]
    came = asyncio.run(asyncio.wait_for(traffic(llm, pool, wants), 300))
    assert sum(came.values()) == REQUESTS
    assert came["text"] > 400 and came["cancelled"] > 10, came
    assert all(came[fate] > 30 for fate in ("leave", "drop", *ERRORS)), came
    assert came["shortage"] < 20
    assert sum(preempted) > 20 and llm.engine.cache.hits > 50
    assert nothing_held(session)
    assert "imp" not in [t.name for t in threading.enumerate()]
    session.close()
