"""Requests to many at once, and what they have to give."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from imp_runtime.engine import Engine, Event, Request, is_last
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk
from imp_runtime.model import Model
from imp_runtime.prefix_cache import PrefixCache
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from imp_runtime.tokenizer import Tokenizer


@dataclass
class Ask:
    """A prompt with its parameters, and the events it got."""

    prompt: list[int]
    params: SamplingParams
    events: list[Event] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.events) and is_last(self.events[-1])

    @property
    def tokens(self) -> list[int]:
        assert all(isinstance(e, Chunk) for e in self.events), self.events[-1:]
        return [e.token_id for e in self.events if isinstance(e, Chunk)]

    def again(self) -> Ask:
        return Ask(self.prompt, self.params)


def asks(n: int, seed: int, longest: int = 40, most: int = 12) -> list[Ask]:
    """Prompts of 1 to `longest` tokens, with 1 to `most` tokens to draw after them."""
    rng = np.random.RandomState(seed)
    out = []
    for i in range(n):
        prompt = [int(t) for t in rng.randint(0, 300, rng.randint(1, longest + 1))]
        params = SamplingParams(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=1000 * seed + i,
            max_tokens=int(rng.randint(1, most + 1)),
            ignore_eos=True,
        )
        out.append(Ask(prompt, params))
    return out


def submit(engine: Engine, ask: Ask, **options: object) -> Request:
    return engine.submit(ask.prompt, ask.params, ask.events.append, **options)  # type: ignore[arg-type]


def run(engine: Engine, batch: list[Ask], **options: object) -> list[list[int]]:
    """The tokens of all, submitted together."""
    for ask in batch:
        submit(engine, ask, **options)
    engine.wait(lambda: all(a.ended for a in batch))
    return [a.tokens for a in batch]


def alone(model: Model, batch: list[Ask], n_ctx: int = 96, **options: object) -> list[list[int]]:
    """The tokens of each, run by itself in a session with room for one."""
    with Session(model, n_ctx=n_ctx, n_threads=1, poison=True, **options) as session:  # type: ignore[arg-type]
        engine = Engine(session, Tokenizer(model.keys))
        return [run(engine, [a.again()])[0] for a in batch]


def engine_of(
    session: Session, *, cache: PrefixCache | None = None, n: int | None = None
) -> Engine:
    return Engine(session, Tokenizer(session.model.keys), n_parallel=n, cache=cache)


def nothing_held(session: Session) -> bool:
    core = session.core
    return core.free_pages == core.pages and core.free_rows == core.rows


class Flaky:
    """A core whose steps fail now and then, before they change anything."""

    TEXT = "no memory today"

    def __init__(self, session: Session, code: str, every: int) -> None:
        self._core, self._code, self._every, self._calls = session.core, code, every, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)

    def choose(self, batch: object, draws: object) -> object:
        self._calls += 1
        if self._calls % self._every == 0:
            error = ImpError(self.TEXT)
            error.code = self._code
            raise error
        return self._core.choose(batch, draws)  # type: ignore[arg-type]
