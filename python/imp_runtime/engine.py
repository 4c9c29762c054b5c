"""Many generations at once over one session: continuous batching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from imp_runtime._core import Scheduler
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk, Generation
from imp_runtime.prefix_cache import PrefixCache, boundaries
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from imp_runtime.stats import Stats
from imp_runtime.timings import Timings
from imp_runtime.tokenizer import Tokenizer

Event = Chunk | ImpError | None
"""A chunk (the last one has a finish_reason), what ended it early, or None: nothing to generate."""
Deliver = Callable[[Event], None]


def is_last(event: Event) -> bool:
    """Whether no other event of its request follows."""
    return not isinstance(event, Chunk) or event.finish_reason is not None


@dataclass(eq=False)
class Request:
    """One generation, from submit() to its last event.

    Attributes:
        prompt: token ids.
        params: with a seed.
        deliver: called with each event, by the thread that runs the step; must not block.
        deadline: time.monotonic() at which it ends with an error.
        use_cache: whether the prefix cache is read and fed.
        keep: lengths of the prompt whose state is worth keeping, such as ends of turns.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    deliver: Deliver
    deadline: float | None = None
    use_cache: bool = True
    keep: Sequence[int] = ()
    timings: Timings = field(default_factory=Timings)
    # Of the engine:
    submitted: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    stops: frozenset[int] = frozenset()
    generation: Generation | None = None
    seq: int | None = None
    saved: bytes | None = None
    preemptions: int = 0


class Engine:
    """Runs requests together, one step at a time.

    submit() and cancel() may be called from any thread. Whoever wants progress calls step(); one
    thread at a time gets in, and a step serves all requests. No request's fate or text depends on
    the others, but for shortage of memory.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        n_parallel: int | None = None,
        prefill_tokens: int | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        """Without requests.

        Args:
            session: sequences of others in it just leave less room.
            tokenizer: of the model.
            n_parallel: requests that hold a sequence at a time; None = as the session has.
            prefill_tokens: of a step for prompts while others decode; None = n_ubatch.
            cache: of the same session.

        Raises:
            ImpError: more parallel requests than tokens in a step.
        """
        core = session.core
        self._session, self._core, self._tokenizer, self._cache = session, core, tokenizer, cache
        self._scheduler = Scheduler(
            step_tokens=session.n_ubatch,
            prefill_tokens=prefill_tokens or session.n_ubatch,
            n_ctx=session.n_ctx,
            page_tokens=core.page_tokens,
            pages=core.pages,
            running=n_parallel or min(core.rows, session.n_ubatch),
        )
        self._requests: dict[int, Request] = {}
        self._step_lock = threading.RLock()
        self._inbox = threading.Condition()
        self._new: list[Request] = []
        self._cancelled: list[Request] = []
        self._next_id = 0
        self._closed = False
        self._timings = Timings()  # of all steps

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        deliver: Deliver,
        *,
        timeout: float | None = None,
        use_cache: bool = True,
        keep: Sequence[int] = (),
        timings: Timings | None = None,
    ) -> Request:
        """Queue a generation; see Request. `timeout`: seconds from now.

        Raises:
            ImpError: the engine is closed, or `timeout` is none. All else is an event.
        """
        deadline = deadline_of(timeout)
        with self._inbox:
            if self._closed:
                raise ImpError("the engine is closed")
            request = Request(
                self._next_id, list(prompt), params.with_seed(), deliver, deadline, use_cache, keep
            )
            request.timings = timings or request.timings
            self._next_id += 1
            self._new.append(request)
            self._inbox.notify_all()
        return request

    def cancel(self, request: Request) -> None:
        """End a request with an error at the next step; no effect on one that has ended."""
        with self._inbox:
            self._cancelled.append(request)
            self._inbox.notify_all()

    @property
    def cache(self) -> PrefixCache | None:
        """Kept states, if it has them."""
        return self._cache

    def stats(self) -> Stats:
        """Of all requests so far; waits for a step that is running."""
        with self._step_lock:
            return Stats.of(self._timings, self._session.expert_stats())

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        with self._inbox:
            return len(self._new) + len(self._requests)

    def step(self) -> bool:
        """Run one step. False if there was nothing to do."""
        with self._step_lock:
            try:
                self._intake()
                self._admit()
                return self._run()
            except BaseException as error:  # Ctrl-C: nobody knows how far the step came
                for request in list(self._requests.values()):
                    what = f"{type(error).__name__}: {error}".rstrip(": ")
                    self._end(request, ImpError(f"interrupted by {what}"))
                raise

    def serve(self) -> None:
        """Step until close(), waiting for requests in between."""
        while True:
            with self._inbox:
                while not (self._closed or self._new or self._cancelled or self._requests):
                    self._inbox.wait()
                if self._closed:
                    return
            try:
                self.step()
            except Exception:  # its requests have ended with it
                continue

    def wait(self, done: Callable[[], bool]) -> None:
        """Step until `done`, which events bring about."""
        while not done():
            if not self.step() and not done():
                time.sleep(0.001)  # another thread is between a step and its events

    def abandon(self, requests: Iterable[Request]) -> None:
        """Cancel requests and give back what they hold before this returns."""
        for request in requests:
            self.cancel(request)
        with self._step_lock:
            self._intake()

    def close(self) -> None:
        """End all requests with an error; the session stays open."""
        with self._inbox:
            self._closed = True
            self._inbox.notify_all()
        with self._step_lock:
            self._intake()
            for request in list(self._requests.values()):
                self._end(request, ImpError("the engine was closed"))
            if self._cache is not None:
                self._cache.clear()

    # ------------------------------------------------------------------ who runs

    def _intake(self) -> None:
        with self._inbox:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
        for request in new:
            self._accept(request)
        for request in cancelled:
            self._end(request, ImpError("cancelled"))
        now = time.monotonic()
        for request in list(self._requests.values()):
            if request.deadline is not None and now >= request.deadline:
                done = len(request.generation.token_ids) if request.generation else 0
                self._end(request, too_late(done))

    def _accept(self, request: Request) -> None:
        prompt, n_ctx = request.prompt, self._session.n_ctx
        self._requests[request.id] = request
        try:
            vocab = self._session.vocab_size
            bad = next((i for i in prompt if not 0 <= i < vocab), None)
            if bad is not None:
                raise ImpError(f"token id {bad} is outside the vocabulary of {vocab}")
            stops: list[int] = []
            if self._cache is not None and request.use_cache and prompt:
                page, stride = self._core.page_tokens, self._cache.stride
                stops = boundaries(len(prompt), page, stride, request.keep)
            self._scheduler.submit(request.id, len(prompt), stops)
            request.tokens, request.stops = list(prompt), frozenset(stops)
            # The token chosen when the context is full still counts, it is just never read.
            request.generation = Generation(
                self._tokenizer, request.params, prompt, n_ctx - len(prompt) + 1
            )
            if request.generation.finish_reason is not None:
                self._end(request, None)
        except ImpError as error:
            self._end(request, error)

    def _end(self, request: Request, event: Event) -> None:
        """Give back what the request holds, then deliver its last event."""
        if self._requests.pop(request.id, None) is None:
            return
        self._scheduler.finish(request.id)
        if request.seq is not None:
            self._core.close_sequence(request.seq)
        request.seq = request.saved = None
        self._deliver(request, event)

    def _deliver(self, request: Request, event: Event) -> None:
        try:
            request.deliver(event)
        except Exception:  # a consumer that is gone ends its own request only
            self.cancel(request)

    def _admit(self) -> None:
        while True:
            rows, pages = self._core.free_rows, self._core.free_pages
            if self._cache is not None:
                rows += len(self._cache)
                pages += self._core.pages_held_by(self._cache.seqs)
            action, which = self._scheduler.change(rows, pages)
            if action:
                self._change(action, self._requests[which])
            elif self._scheduler.running or not self._requests:
                return
            else:  # nobody runs, and still there is no room: others hold the memory
                waiting = self._requests.values()
                first = next((r for r in waiting if r.saved is not None), next(iter(waiting)))
                need = -(-len(first.tokens) // self._core.page_tokens)
                text = f"the request needs 1 sequence and {need} cache pages, {rows} and {pages}"
                self._end(first, _shortage(f"{text} are free"))

    def _change(self, action: str, request: Request) -> None:
        try:
            if action == "preempt":
                assert request.seq is not None
                request.saved = self._core.save(request.seq)
                self._core.close_sequence(request.seq)
                request.seq = None
                request.preemptions += 1
            elif action == "resume":
                assert request.saved is not None
                self._make_room(1, -(-len(request.tokens) // self._core.page_tokens))
                request.seq = self._core.restore(request.saved, f"request {request.id}")
                request.saved = None
            else:
                self._start(request)
        except ImpError as error:
            self._end(request, error)

    def _start(self, request: Request) -> None:
        if self._cache is not None and request.use_cache:
            self._cache.touch(request.prompt)  # making room shall not drop what is needed now
            self._make_room(1, 0)
            hit = self._cache.take(request.prompt)
            if hit is not None:
                request.seq, request.timings.cached_tokens = hit.seq, hit.length
                self._timings.cached_tokens += hit.length
                self._scheduler.cached(request.id, hit.length)
                return
        self._make_room(1, 0)
        request.seq = self._core.open()

    def _make_room(self, rows: int, pages: int) -> None:
        """Drop kept states until that much is free, as far as they go."""
        while self._core.free_rows < rows or self._core.free_pages < pages:
            if self._cache is None or not self._cache.evict():
                return

    # ------------------------------------------------------------------ the step

    def _run(self) -> bool:
        pieces = self._scheduler.step()
        if not pieces:
            return False
        self._make_room(0, self._scheduler.needed)
        batch, draws = [], []
        for which, first, count, output in pieces:
            request = self._requests[which]
            assert request.seq is not None and request.generation is not None
            ids = np.array(request.tokens[first : first + count], np.int32)
            batch.append((request.seq, ids, count - 1 if output else count))
            if output:
                draws.append(request.generation.draw())
        started = time.perf_counter()
        try:
            choices = iter(self._core.choose(batch, draws))
        except ImpError as error:
            self._failed([self._requests[p[0]] for p in pieces], error)
            return True
        self._scheduler.commit(pieces)
        self._count(pieces, started)
        for which, first, count, output in pieces:
            request = self._requests[which]
            request.timings.add(first + count <= len(request.prompt), count, started)
            if first + count in request.stops:
                self._keep(request, first + count)
            if output:
                self._choose(request, next(choices))
        return True

    def _count(self, pieces: Sequence[tuple[int, int, int, bool]], started: float) -> None:
        """Add a step of (request, first token, tokens, output) to the timings of all."""
        read = sum(
            count
            for which, first, count, _ in pieces
            if first + count <= len(self._requests[which].prompt)
        )
        self._timings.add(read > 0, read or sum(p[2] for p in pieces), started)

    def _choose(self, request: Request, choice: int | npt.NDArray[np.float32]) -> None:
        assert request.generation is not None
        try:
            chunk = request.generation.push(choice)
        except ImpError as error:
            self._end(request, error)
            return
        if not request.timings.first_token_seconds:
            request.timings.first_token_seconds = time.perf_counter() - request.submitted
        if chunk.finish_reason is None:
            request.tokens.append(chunk.token_id)
            self._scheduler.token(request.id)
            self._deliver(request, chunk)
            return
        if self._cache is not None and request.use_cache and request.seq is not None:
            self._cache.put(request.seq, request.tokens)  # the end of a turn
            request.seq = None
        self._end(request, chunk)

    def _keep(self, request: Request, length: int) -> None:
        """Put a fork of the request, which has just read so many tokens, into the cache."""
        assert self._cache is not None and request.seq is not None
        if self._cache.has(request.tokens[:length]):
            return
        if self._core.free_rows == 0:
            self._cache.evict()
        if self._core.free_rows > 0:
            self._cache.put(self._core.fork(request.seq), request.tokens[:length])
            self._scheduler.shared(request.id)

    def _failed(self, batch: list[Request], error: ImpError) -> None:
        """A step did not run: find room for the next try, or end those that were in it."""
        if error.code == "out_of_memory":
            if self._cache is not None and len(self._cache):
                self._cache.clear()
                return
            action, which = self._scheduler.preempt()
            if action:
                self._change(action, self._requests[which])
                return
        for request in batch:
            self._end(request, error)


def deadline_of(timeout: float | None) -> float | None:
    """time.monotonic() in `timeout` seconds. Raises ImpError for what is no number of seconds."""
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ImpError(f"timeout is {timeout} seconds, at least 0 needed")
    return time.monotonic() + timeout


def too_late(tokens: int) -> ImpError:
    """What ends a generation that has chosen so many tokens."""
    return ImpError(f"the time was over after {tokens} tokens")


def _shortage(text: str) -> ImpError:
    error = ImpError(text)
    error.code = "out_of_memory"
    return error
