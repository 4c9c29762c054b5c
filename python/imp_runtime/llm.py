"""Text in, text out: a model file with its tokenizer, template and session."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from imp_runtime import _core
from imp_runtime._core import USUAL_STEP_TIMEOUT
from imp_runtime.chat import ChatTemplate, Message
from imp_runtime.completion_dicts import CompletionDicts
from imp_runtime.engine import Engine, Event, Request, deadline_of, is_last, too_late
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk, FinishReason, Generation, TokenLogProb
from imp_runtime.model import Model
from imp_runtime.placement import Limits
from imp_runtime.planner import ONE_CONTEXT
from imp_runtime.prefix_cache import PrefixCache
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Sequence as TokenSequence
from imp_runtime.session import Session
from imp_runtime.stats import Stats
from imp_runtime.timings import Timings
from imp_runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: what was generated, without the token or text that ended it.
        token_ids: all tokens chosen, the one that ended it included.
        finish_reason: see Chunk.
        prompt_token_ids: the prompt.
        logprobs: one entry per token, if asked for.
        timings: tokens and seconds.
        seed: that gives the same text again.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogProb] | None
    timings: Timings
    seed: int


@dataclass
class Stream:
    """A generation in progress: iterate for chunks. Closing it frees its sequence."""

    chunks: Iterator[Chunk]
    prompt_token_ids: list[int]
    params: SamplingParams
    timings: Timings = field(default_factory=Timings)

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks

    def __next__(self) -> Chunk:
        return next(self.chunks)

    def close(self) -> None:
        """End the generation early."""
        close = getattr(self.chunks, "close", None)
        if close is not None:
            close()


MAX_CACHE_ENTRIES = 256
SCORED_TOKENS = 64
"""Of a step of score(): logits of more would take memory that experts can use."""


class LLM(CompletionDicts):
    """A model ready to generate; prompts that are given together run together."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        device: str = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        n_parallel: int = 4,
        prefix_cache: int = 0,
        cache_dir: str | PathLike[str] | None = None,
        cache_type_k: str = "f32",
        cache_type_v: str = "f32",
        batch_invariant: bool = False,
        progress: Callable[[int, int], None] | None = None,
        ngram_scale: float | None = None,
        limits: Limits | None = None,
        verify_experts: bool = False,
        step_timeout: float = USUAL_STEP_TIMEOUT,
    ) -> None:
        """Load a model file.

        Args:
            path: a GGUF file, or the first shard of a split one.
            device: see Model.load.
            n_ctx: tokens of the longest prompt with its answer; None = see Session.
            n_threads: None = all processors.
            n_parallel: generations that run at the same time at most; they share the cache of
                one full context, and wait for each other when it is short.
            prefix_cache: bytes of states that are kept, so that what prompts have in common is
                read once; 0 = none.
            cache_dir: folder where they go when the memory is needed or close() is called.
            cache_type_k: of the keys in the cache, see Session.
            cache_type_v: of the values.
            batch_invariant: see Session.
            progress: called with (bytes read, bytes in all).
            ngram_scale: see Model.load.
            limits: see Model.load.
            verify_experts: see Session.
            step_timeout: see Session.

        Raises:
            ImpError: the file cannot be run, or memory is too small.
        """
        if n_parallel < 1:
            raise ImpError(f"n_parallel is {n_parallel}, at least 1 needed")
        if cache_dir is not None and not prefix_cache:
            raise ImpError("cache_dir without prefix_cache: 0 bytes are kept")
        model = Model.load(
            path, device=device, progress=progress, ngram_scale=ngram_scale, limits=limits
        )
        types = (cache_type_k, cache_type_v)
        kept = _cache_entries(model, prefix_cache, types) if prefix_cache else 0
        session = Session(
            model,
            n_ctx=n_ctx,
            n_threads=n_threads,
            max_seqs=n_parallel + kept,
            kept_seqs=kept,
            max_outputs=max(n_parallel, SCORED_TOKENS),
            cache_tokens=ONE_CONTEXT,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            batch_invariant=batch_invariant,
            verify_experts=verify_experts,
            step_timeout=step_timeout,
        )
        self._setup(model, session, n_parallel, prefix_cache, cache_dir)
        if n_ctx is None and session.n_ctx < model.context_length:
            self.notes.append(
                f"the context is {session.n_ctx} tokens, the model was trained for "
                f"{model.context_length}: memory is short"
            )

    @classmethod
    def from_session(
        cls,
        model: Model,
        session: Session,
        *,
        n_parallel: int = 1,
        prefix_cache: int = 0,
        cache_dir: str | PathLike[str] | None = None,
    ) -> "LLM":
        """An LLM over a session that the caller made; close() closes both.

        The sequences of the session beyond n_parallel are for the prefix cache.
        """
        llm = cls.__new__(cls)
        llm._setup(model, session, n_parallel, prefix_cache, cache_dir)
        return llm

    def _setup(
        self,
        model: Model,
        session: Session,
        n_parallel: int,
        prefix_cache: int,
        cache_dir: str | PathLike[str] | None,
    ) -> None:
        self.model = model
        self.session = session
        self.engine: Engine | None = None
        """Runs the generations, if several may run or states are kept."""
        self.timings = Timings()
        """Of all generations that no engine runs."""
        try:
            self.tokenizer = Tokenizer(model.keys)
            if self.tokenizer.vocab_size > model.vocab_size:
                raise ImpError(
                    f"the tokenizer has {self.tokenizer.vocab_size} tokens, "
                    f"the model only {model.vocab_size}"
                )
            self.defaults = SamplingParams.from_keys(model.keys)
            if n_parallel > 1 or prefix_cache:
                folder = None if cache_dir is None else Path(cache_dir)
                cache = PrefixCache(session, prefix_cache, folder=folder) if prefix_cache else None
                self.engine = Engine(session, self.tokenizer, n_parallel=n_parallel, cache=cache)
        except BaseException:
            self.close()
            raise
        self._template: ChatTemplate | None = None
        self.notes = list(model.notes)
        """What was decided while loading: one sentence each."""
        cache = self.engine.cache if self.engine is not None else None
        if cache is not None and cache.foreign:
            self.notes.append(
                f"{cache_dir} also holds {cache.foreign} states of other models or cache types, "
                "which are left alone"
            )

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.session.n_ctx

    def stats(self) -> Stats:
        """Of all generations so far, also while one runs; see Timings for shared steps.

        Any thread may ask, if there is an engine.
        """
        if self.engine is not None:
            return self.engine.stats()
        return Stats.of(self.timings, self.session.expert_stats())

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's template.

        Raises:
            ImpError: the file has none, or it is broken.
        """
        if self._template is None:
            source = self.model.keys.get("tokenizer.chat_template")
            if not source:
                raise ImpError("the file has no tokenizer.chat_template, so it cannot chat")
            bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
            self._template = ChatTemplate(
                source,
                bos_token="" if bos is None else self.tokenizer.piece(bos),
                eos_token="" if eos is None else self.tokenizer.piece(eos),
            )
        return self._template

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        use_cache: bool = True,
        on_done: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """Complete each prompt; up to n_parallel of them run at the same time.

        Args:
            prompts: text or token ids; a single text counts as a list of one. Control tokens
                written in a text are recognised.
            params: None = the defaults of the file.
            timeout: seconds for all of it; None = as long as it takes.
            use_cache: whether the prefix cache is read and fed.
            on_done: called with (index of the prompt, its completion) as each ends.
            on_step: called between steps.

        Returns:
            A Completion per prompt, in order. A prompt's result does not depend on the others.

        Raises:
            ImpError: an empty prompt, one that the context cannot hold (names both numbers), or
                the time was over.
        """
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        streams = [Stream(iter(()), self._ids(p), self._seeded(params)) for p in batch]
        deadline = deadline_of(timeout)
        done: dict[int, Completion] = {}

        def end(index: int) -> None:
            done[index] = _complete(streams[index])
            if on_done is not None:
                on_done(index, done[index])

        if self.engine is None:
            for i, stream in enumerate(streams):
                stream.chunks = _watched(self._run(stream, deadline), on_step)
                end(i)
        else:
            self._run_all(self.engine, streams, deadline, use_cache, end, on_step)
        return [done[i] for i in range(len(streams))]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        use_cache: bool = True,
    ) -> Stream:
        """As generate() with one prompt, giving each piece of text as it comes.

        Raises:
            ImpError: as generate().
        """
        return self._start(self._ids(prompt), params, deadline_of(timeout), use_cache)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        timeout: float | None = None,
        use_cache: bool = True,
        **variables: Any,
    ) -> Completion:
        """The assistant's answer to `messages`; see generate() and ChatTemplate.render.

        Raises:
            ImpError: as generate(), or the template refuses the messages.
        """
        return _complete(
            self.stream_chat(
                messages, params, tools=tools, timeout=timeout, use_cache=use_cache, **variables
            )
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        timeout: float | None = None,
        use_cache: bool = True,
        **variables: Any,
    ) -> Stream:
        """As chat(), giving each piece of text as it comes."""
        deadline = deadline_of(timeout)
        ids = self.chat_ids(messages, tools=tools, **variables)
        keep = self.turn_ends(messages, ids, tools=tools, **variables) if use_cache else []
        return self._start(ids, params, deadline, use_cache, keep)

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of the prompt that chat() gives the model."""
        text = self.chat_template.render(messages, tools=tools, **variables)
        # The template writes BOS itself if the model wants one.
        return self._checked(self.tokenizer.encode(text, add_special=False, parse_special=True))

    def turn_ends(
        self,
        messages: Sequence[Message],
        ids: Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Lengths of the prompt `ids` of chat_ids() that other prompts are likely to begin with.

        After the system message and after the last message; none without a prefix cache, or where
        the template does not write messages one after the other.
        """
        if self.engine is None or self.engine.cache is None:
            return []
        system = 1 if messages and messages[0]["role"] == "system" else 0
        ends = []
        for count in {system, len(messages)} - {0}:
            try:
                text = self.chat_template.render(
                    messages[:count], add_generation_prompt=False, tools=tools, **variables
                )
            except ImpError:
                continue  # a template may refuse a system message alone
            part = self.tokenizer.encode(text, add_special=False, parse_special=True)
            if list(ids[: len(part)]) == part:
                ends.append(len(part))
        return sorted(ends)

    def score(self, texts: Sequence[Prompt]) -> list[npt.NDArray[np.float64]]:
        """-log p of each token but the first of each text, in nats: float64 [tokens - 1] each.

        Raises:
            ImpError: as generate().
        """
        out = []
        for ids in [self._ids(t) for t in texts]:
            with self.session.open() as sequence:
                out.append(sequence.score(ids))
        return out

    def close(self) -> None:
        """Free the session and the model."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
        self.session.close()
        self.model.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._checked(self.tokenizer.encode(prompt, parse_special=True))
        return self._checked([int(i) for i in prompt])

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ImpError("the prompt has no tokens")
        check_room(len(ids), self.n_ctx)
        bad = next((i for i in ids if not 0 <= i < self.model.vocab_size), None)
        if bad is not None:
            raise ImpError(f"token id {bad} is outside the vocabulary of {self.model.vocab_size}")
        return ids

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ImpError as generate()."""
        return self._ids(prompt)

    def _seeded(self, params: SamplingParams | None) -> SamplingParams:
        return (params or self.defaults).with_seed()

    def _start(
        self,
        ids: list[int],
        params: SamplingParams | None,
        deadline: float | None,
        use_cache: bool,
        keep: Sequence[int] = (),
    ) -> Stream:
        stream = Stream(iter(()), ids, self._seeded(params))
        if self.engine is not None:
            stream.chunks = self._run_engine(self.engine, stream, deadline, use_cache, keep)
        else:
            stream.chunks = self._run(stream, deadline)
        return stream

    def _run(self, stream: Stream, deadline: float | None) -> Iterator[Chunk]:
        with self.session.open() as sequence:
            yield from drive(
                sequence,
                self.tokenizer,
                stream.prompt_token_ids,
                stream.params,
                self.n_ctx,
                (stream.timings, self.timings),
                deadline,
            )

    def _run_all(
        self,
        engine: Engine,
        streams: Sequence[Stream],
        deadline: float | None,
        use_cache: bool,
        end: Callable[[int], None],
        on_step: Callable[[], None] | None,
    ) -> None:
        """Run streams together; `end` is called with the index of each when it has all chunks."""
        events: list[list[Event]] = [[] for _ in streams]
        requests = [
            self._submit(engine, s, e.append, deadline, use_cache)
            for s, e in zip(streams, events, strict=True)
        ]
        running = set(range(len(streams)))

        def ended() -> list[int]:
            if on_step is not None:
                on_step()
            return sorted(i for i in running if events[i] and is_last(events[i][-1]))

        try:
            while running:
                engine.wait(lambda: bool(ended()))
                for i in ended():
                    running.remove(i)
                    streams[i].chunks = _chunks(events[i])
                    end(i)
        finally:
            engine.abandon(requests)

    def _run_engine(
        self,
        engine: Engine,
        stream: Stream,
        deadline: float | None,
        use_cache: bool,
        keep: Sequence[int],
    ) -> Iterator[Chunk]:
        events: SimpleQueue[Event] = SimpleQueue()
        request = self._submit(engine, stream, events.put, deadline, use_cache, keep)
        try:
            while True:
                engine.wait(lambda: not events.empty())
                event = events.get()
                yield from _chunks([event])
                if is_last(event):
                    return
        finally:
            engine.abandon([request])

    def _submit(
        self,
        engine: Engine,
        stream: Stream,
        deliver: Callable[[Event], None],
        deadline: float | None,
        use_cache: bool,
        keep: Sequence[int] = (),
    ) -> Request:
        return engine.submit(
            stream.prompt_token_ids,
            stream.params,
            deliver,
            timeout=None if deadline is None else max(0.0, deadline - time.monotonic()),
            use_cache=use_cache,
            keep=keep,
            timings=stream.timings,
        )


def _cache_entries(model: Model, max_bytes: int, types: tuple[str, str]) -> int:
    cost = _core.memory_cost(model.arch, model.keys, *types)
    if max_bytes < cost["row_bytes"] + cost["page_bytes"]:
        raise ImpError(
            f"a prefix cache of {max_bytes} bytes; a state with one page takes "
            f"{cost['row_bytes'] + cost['page_bytes']}"
        )
    return min(MAX_CACHE_ENTRIES, max_bytes // cost["row_bytes"])


def _chunks(events: Sequence[Event]) -> Iterator[Chunk]:
    """The chunks among `events`. Raises the error that ends them."""
    for event in events:
        if isinstance(event, ImpError):
            raise event
        if event is not None:
            yield event


def _watched(chunks: Iterator[Chunk], on_step: Callable[[], None] | None) -> Iterator[Chunk]:
    for chunk in chunks:
        if on_step is not None:
            on_step()
        yield chunk


def check_room(tokens: int, n_ctx: int) -> None:
    """Raise ImpError if a prompt of `tokens` does not fit."""
    if tokens > n_ctx:
        raise ImpError(f"the prompt has {tokens} tokens, the context holds {n_ctx}")


def drive(
    sequence: TokenSequence,
    tokenizer: Tokenizer,
    new: Sequence[int],
    params: SamplingParams,
    n_ctx: int,
    timings: Sequence[Timings],
    deadline: float | None = None,
) -> Iterator[Chunk]:
    """Extend `sequence` by the `new` tokens and generate after them.

    The last token chosen is not yet part of the sequence when this ends. All `timings` count what
    the model and the sampler do, not what the consumer does between two chunks.

    Raises:
        ImpError: `new` does not fit, or time.monotonic() reached `deadline`.
    """

    def extend(tokens: Sequence[int]) -> int | npt.NDArray[np.float32]:
        while deadline is not None:  # step by step, so that a long prompt is left in time
            if time.monotonic() >= deadline:
                raise too_late(len(generation.token_ids))
            if len(tokens) <= sequence.n_ubatch:
                break
            sequence.extend(tokens[: sequence.n_ubatch], outputs="none")
            tokens = tokens[sequence.n_ubatch :]
        return sequence.choose(tokens, generation.draw())

    length = sequence.length + len(new)
    check_room(length, n_ctx)
    # The token chosen when the context is full still counts, it is just never read.
    generation = Generation(tokenizer, params, [*sequence.tokens, *new], n_ctx - length + 1)
    if generation.finish_reason is not None:
        return
    started = time.perf_counter()
    chunk = generation.push(extend(new))
    for t in timings:
        t.add(True, len(new), started)
        t.first_token_seconds = time.perf_counter() - started
    yield chunk
    while chunk.finish_reason is None:
        started = time.perf_counter()
        chunk = generation.push(extend([chunk.token_id]))
        for t in timings:
            t.add(False, 1, started)
        yield chunk


def completion(
    chunks: Sequence[Chunk], prompt: list[int], params: SamplingParams, timings: Timings
) -> Completion:
    """What the chunks of a whole generation make; `params` have a seed."""
    assert params.seed is not None
    wanted = params.logprobs is not None
    return Completion(
        text="".join(c.text for c in chunks),
        token_ids=[c.token_id for c in chunks],
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "length",
        prompt_token_ids=prompt,
        logprobs=[c.logprob for c in chunks if c.logprob is not None] if wanted else None,
        timings=timings,
        seed=params.seed,
    )


def _complete(stream: Stream) -> Completion:
    return completion(list(stream), stream.prompt_token_ids, stream.params, stream.timings)
