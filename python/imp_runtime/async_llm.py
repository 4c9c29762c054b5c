"""The same model for asyncio: requests from an event loop, steps in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from imp_runtime.chat import Message
from imp_runtime.engine import Engine, Event, is_last
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk
from imp_runtime.llm import LLM, Completion, Prompt, completion
from imp_runtime.sampling import SamplingParams
from imp_runtime.timings import Timings


class AsyncLLM:
    """Runs the requests of an event loop over an LLM.

    The session belongs to it until close(): a Conversation or a sequence of one's own at the same
    time is refused while a step runs.
    """

    def __init__(self, llm: LLM) -> None:
        """Start the thread.

        Args:
            llm: stays open when this is closed, but loses its engine.

        Raises:
            ImpError: it runs one generation at a time (n_parallel=1 without a prefix cache).
        """
        if llm.engine is None:
            raise ImpError("AsyncLLM needs an LLM with n_parallel of at least 2 or a prefix cache")
        self.llm = llm
        self._engine: Engine = llm.engine
        self._thread = threading.Thread(target=self._engine.serve, name="imp", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        use_cache: bool = True,
        keep: Sequence[int] = (),
        timings: Timings | None = None,
    ) -> AsyncIterator[Chunk]:
        """Each piece of text as it comes. Leaving the loop early ends the generation.

        Args:
            prompt: text or token ids.
            params: None = the defaults of the file.
            timeout: seconds until it ends with an error.
            use_cache: whether the prefix cache is read and fed.
            keep: lengths of the prompt whose state is worth keeping.
            timings: filled in while it runs.

        Raises:
            ImpError: as LLM.generate(), or the time was over.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        ids = await asyncio.to_thread(self.llm.prompt_ids, prompt)
        request = self._engine.submit(
            ids,
            params or self.llm.defaults,
            deliver,
            timeout=timeout,
            use_cache=use_cache,
            keep=keep,
            timings=timings,
        )
        event: Event = None
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = is_last(event)
                if isinstance(event, ImpError):
                    raise event
                if event is not None:
                    yield event
        finally:
            if not ended:
                self._engine.cancel(request)

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """One prompt; `options` as stream()."""
        params = (params or self.llm.defaults).with_seed()
        timings = Timings()
        ids = await asyncio.to_thread(self.llm.prompt_ids, prompt)
        chunks = [c async for c in self.stream(ids, params, timings=timings, **options)]
        return completion(chunks, ids, params, timings)

    async def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]:
        """All prompts at once, results in order; `options` as stream()."""
        return await asyncio.gather(*(self.complete(p, params, **options) for p in prompts))

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The assistant's answer; `options` as stream()."""
        ids = await asyncio.to_thread(self.llm.chat_ids, messages)
        keep = await asyncio.to_thread(self.llm.turn_ends, messages, ids)
        return await self.complete(ids, params, keep=keep, **options)

    async def close(self) -> None:
        """End what still runs with an error, and the thread."""
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
