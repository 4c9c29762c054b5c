"""Text in, text out: a model file with its tokenizer, template and session."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from types import TracebackType
from typing import Any, overload

from imp_runtime.chat import ChatTemplate, Message
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk, FinishReason, Generation, TokenLogProb
from imp_runtime.model import Model
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Sequence as TokenSequence
from imp_runtime.session import Session
from imp_runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass
class Timings:
    """How long a generation took; sampling and decoding of text included."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0  # steps of one token each, so one less than the tokens generated
    decode_seconds: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        """Tokens per second while reading the prompt."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """Tokens per second while generating; 0 before the second token."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


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


class LLM:
    """A model ready to generate. One generation at a time."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        device: str = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        ngram_scale: float | None = None,
    ) -> None:
        """Load a model file.

        Args:
            path: a GGUF file, or the first shard of a split one.
            device: "auto" or "cpu".
            n_ctx: tokens of the longest prompt with its answer; None = see Session.
            n_threads: None = all processors.
            progress: called with (bytes read, bytes in all).
            ngram_scale: see Model.load.

        Raises:
            ImpError: the file cannot be run, or memory is too small.
        """
        model = Model.load(path, device=device, progress=progress, ngram_scale=ngram_scale)
        self._setup(model, Session(model, n_ctx=n_ctx, n_threads=n_threads))

    @classmethod
    def from_session(cls, model: Model, session: Session) -> "LLM":
        """An LLM over a session that the caller made; close() closes both."""
        llm = cls.__new__(cls)
        llm._setup(model, session)
        return llm

    def _setup(self, model: Model, session: Session) -> None:
        self.model = model
        self.session = session
        try:
            self.tokenizer = Tokenizer(model.keys)
            if self.tokenizer.vocab_size > model.vocab_size:
                raise ImpError(
                    f"the tokenizer has {self.tokenizer.vocab_size} tokens, "
                    f"the model only {model.vocab_size}"
                )
            self.defaults = SamplingParams.from_keys(model.keys)
        except BaseException:
            self.close()
            raise
        self._template: ChatTemplate | None = None

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.session.n_ctx

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

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]: ...

    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete each prompt, one after the other.

        Args:
            prompts: text or token ids; a single text counts as a list of one. Control tokens
                written in a text are recognised.
            params: None = the defaults of the file.

        Returns:
            A Completion per prompt, in order. A prompt's result does not depend on the others.

        Raises:
            ImpError: an empty prompt, or one that the context cannot hold (names both numbers).
        """
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._ids(p) for p in batch]  # all are checked before the first one runs
        return [_complete(self._start(i, params)) for i in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """As generate() with one prompt, giving each piece of text as it comes.

        Raises:
            ImpError: as generate().
        """
        return self._start(self._ids(prompt), params)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Completion:
        """The assistant's answer to `messages`; see ChatTemplate.render for the rest.

        Raises:
            ImpError: as generate(), or the template refuses the messages.
        """
        return _complete(self.stream_chat(messages, params, tools=tools, **variables))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Stream:
        """As chat(), giving each piece of text as it comes."""
        text = self.chat_template.render(messages, tools=tools, **variables)
        # The template writes BOS itself if the model wants one.
        ids = self.tokenizer.encode(text, add_special=False, parse_special=True)
        return self._start(self._checked(ids), params)

    def close(self) -> None:
        """Free the session and the model."""
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

    def _start(self, ids: list[int], params: SamplingParams | None) -> Stream:
        stream = Stream(iter(()), ids, (params or self.defaults).with_seed())
        stream.chunks = self._run(stream)
        return stream

    def _run(self, stream: Stream) -> Iterator[Chunk]:
        with self.session.open() as sequence:
            yield from drive(
                sequence,
                self.tokenizer,
                stream.prompt_token_ids,
                stream.params,
                self.n_ctx,
                stream.timings,
            )


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
    timings: Timings,
) -> Iterator[Chunk]:
    """Extend `sequence` by the `new` tokens and generate after them.

    The last token chosen is not yet part of the sequence when this ends. `timings` counts what the
    model does, not what the consumer does between two chunks.
    """
    length = sequence.length + len(new)
    check_room(length, n_ctx)
    # The token chosen when the context is full still counts, it is just never read.
    generation = Generation(tokenizer, params, [*sequence.tokens, *new], n_ctx - length + 1)
    if generation.finish_reason is not None:
        return
    started = time.perf_counter()
    chunk = generation.push(sequence.extend(new, outputs="last")[-1])
    timings.prompt_seconds += time.perf_counter() - started
    timings.prompt_tokens += len(new)
    yield chunk
    while chunk.finish_reason is None:
        started = time.perf_counter()
        chunk = generation.push(sequence.extend([chunk.token_id], outputs="last")[-1])
        timings.decode_seconds += time.perf_counter() - started
        timings.decode_tokens += 1
        yield chunk


def _complete(stream: Stream) -> Completion:
    chunks = list(stream)
    seed = stream.params.seed
    assert seed is not None
    wanted = stream.params.logprobs is not None
    return Completion(
        text="".join(c.text for c in chunks),
        token_ids=[c.token_id for c in chunks],
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "length",
        prompt_token_ids=stream.prompt_token_ids,
        logprobs=[c.logprob for c in chunks if c.logprob is not None] if wanted else None,
        timings=stream.timings,
        seed=seed,
    )
