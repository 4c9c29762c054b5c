"""A few threads that work ahead of one consumer, in order, with bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
AHEAD = 4  # steps in flight

T = TypeVar("T")
R = TypeVar("R")


def in_order(function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """(item, function(item)) for every item in order, at most AHEAD of them under way or waiting.

    An exception of `function` is raised at its turn; leaving the loop cancels what has not begun.
    """
    pending: deque[tuple[T, Future[R]]] = deque()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="convert")
    try:
        for item in items:
            pending.append((item, pool.submit(function, item)))
            if len(pending) >= AHEAD:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
