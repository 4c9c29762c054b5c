"""Tasks with several endings: which does the model find likelier?

The tokens that all endings of a task begin with are evaluated once; the endings go on from forks.
Several tasks and endings share a step, which changes no result.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..bench.steps import pieces
from ..errors import ImpError
from .contracts import Float64, ForkSequence, ForkSession, Int32
from .errors import EvalError
from .numerics import token_nll

# Endings evaluated at once; each is a sequence that holds a whole recurrent state.
DEFAULT_PARALLEL = 16
MAX_PARALLEL = 1024
# Endings for each task whose beginning is kept meanwhile.
ENDINGS_PER_TASK = 4
# llama.cpp gives the tasks this many contexts of -c tokens together.
CONTEXTS = 4
MIN_TOKENS = 2

Encode = Callable[[str], list[int]]
"""Text to ids, with the model's begin and end tokens."""


@dataclass(frozen=True)
class Query:
    """One log-probability: of ``target`` after token ``position`` of sequence ``sequence``.

    Attributes:
        sequence, position: where the logits are read.
        target: token id.
        ending: whose score it counts for.

    """

    sequence: int
    position: int
    target: int
    ending: int


@dataclass(frozen=True)
class Task:
    """One question.

    Attributes:
        name: what errors call it.
        sequences: ids of the question with each of its endings.
        queries: an ending's score is the mean of its queries; each has one at least.
        right: endings that are right.
        last_wins: whether the last of equal scores is chosen, instead of the first.

    """

    name: str
    sequences: list[list[int]]
    queries: list[Query]
    right: frozenset[int]
    last_wins: bool = False

    @property
    def n_shared(self) -> int:
        """Leading tokens that all sequences share, up to the first whose logits are read."""
        first_read = min(query.position for query in self.queries)
        return min(common_prefix(self.sequences), first_read + 1)


@dataclass(frozen=True)
class TaskResult:
    """State of the run after one task.

    Attributes:
        index: which task, from 0.
        scores: float64 [endings], mean log-probability per token in nats.
        chosen: the ending with the best score.
        n_right: tasks answered rightly so far.
        n_endings: endings of all tasks so far.
        n_tokens: tokens evaluated so far.
        seconds: time since the start.

    """

    index: int
    scores: Float64
    chosen: int
    n_right: int
    n_endings: int
    n_tokens: int
    seconds: float


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Leading tokens that all sequences share."""
    n = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        n += 1
    return n


def first_difference(name: str, sequences: Sequence[Sequence[int]]) -> int:
    """The first token that is scored: where the sequences part, but one that each of them has.

    Not the very first token either, which nothing predicts.

    Raises:
        EvalError: if a sequence is too short.

    """
    shortest = min(map(len, sequences))
    if shortest < MIN_TOKENS:
        raise EvalError(
            f"{name} has {shortest} tokens with one of its endings, it needs {MIN_TOKENS}"
        )
    return max(1, min(common_prefix(sequences), shortest - 1))


def ending_task(name: str, sequences: list[list[int]], right: frozenset[int]) -> Task:
    """A task that scores every token from the first difference on.

    Raises:
        EvalError: if a sequence is too short.

    """
    first = first_difference(name, sequences)
    queries = [
        Query(i, at - 1, sequence[at], i)
        for i, sequence in enumerate(sequences)
        for at in range(first, len(sequence))
    ]
    return Task(name, sequences, queries, right)


def longest(tasks: Sequence[Task], n_ctx: int) -> int:
    """Tokens of the longest sequence.

    Raises:
        EvalError: if it does not fit the contexts of ``n_ctx`` tokens.

    """
    if n_ctx < 1:
        raise EvalError(f"--ctx-size is {n_ctx}, it must be at least 1")
    length, at = max((max(map(len, task.sequences)), i) for i, task in enumerate(tasks))
    if length > CONTEXTS * n_ctx:
        raise EvalError(
            f"{tasks[at].name} has {length} tokens, a context of {n_ctx} allows "
            f"{CONTEXTS * n_ctx}: raise it with -c"
        )
    return length


def sequences_needed(n_parallel: int) -> int:
    """Sequences that `run_tasks` opens at the same time.

    Raises:
        EvalError: if ``n_parallel`` is out of range.

    """
    if not 1 <= n_parallel <= MAX_PARALLEL:
        raise EvalError(f"--parallel is {n_parallel}, it must be 1 to {MAX_PARALLEL}")
    return n_parallel + -(-n_parallel // ENDINGS_PER_TASK)


def run_tasks(
    session: ForkSession,
    tasks: Sequence[Task],
    n_batch: int = 2048,
    n_threads: int = 1,
    n_parallel: int = DEFAULT_PARALLEL,
) -> Iterator[TaskResult]:
    """Score tasks in order, ``n_parallel`` endings at once.

    The session needs room for ``sequences_needed(n_parallel)`` sequences.

    Raises:
        EvalError: if a number is out of range, the evaluation fails or a logit is not finite,
            naming the tasks.

    """
    if n_batch < 1:
        raise EvalError(f"--batch-size is {n_batch}, it must be at least 1")
    n_group = sequences_needed(n_parallel) - n_parallel
    began = time.perf_counter()
    step_tokens = min(n_batch, session.n_ubatch)
    n_right = n_endings = n_tokens = 0
    for start in range(0, len(tasks), n_group):
        group = tasks[start : start + n_group]
        nll, evaluated = _run_group(session, group, step_tokens, n_threads, n_parallel)
        n_tokens += evaluated
        for index, (task, values) in enumerate(zip(group, nll, strict=True), start):
            endings = [query.ending for query in task.queries]
            scores = -np.bincount(endings, values) / np.bincount(endings)
            chosen = int(scores.argmax())
            if task.last_wins:
                chosen = len(scores) - 1 - int(scores[::-1].argmax())
            n_right += chosen in task.right
            n_endings += len(scores)
            seconds = time.perf_counter() - began
            yield TaskResult(index, scores, chosen, n_right, n_endings, n_tokens, seconds)


@dataclass(frozen=True)
class _Work:
    """Tokens to append to a sequence, and which queries their logits answer."""

    sequence: ForkSequence
    tokens: Int32
    rows: Int32  # [queries] ascending, in tokens
    targets: Int32  # [queries]
    nll: Float64  # of the task
    places: Int32  # [queries] in nll


def _run_group(
    session: ForkSession,
    group: Sequence[Task],
    step_tokens: int,
    n_threads: int,
    n_parallel: int,
) -> tuple[list[Float64], int]:
    """-log p of every query, float64 [queries] per task, and the number of tokens evaluated."""
    nll = [np.empty(len(task.queries)) for task in group]
    opened: list[ForkSequence] = []
    n_tokens = 0

    def run(works: list[_Work]) -> None:
        nonlocal n_tokens
        n_tokens += sum(len(work.tokens) for work in works)
        try:
            _run(session, works, step_tokens, n_threads)
        except (ImpError, RuntimeError, MemoryError) as error:
            names = group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"
            raise EvalError(f"{names}: {error}") from error

    try:
        for _ in group:
            opened.append(session.open())
        trunks = list(opened)
        run([_trunk(*each) for each in zip(trunks, group, nll, strict=True)])
        todo = [(i, which) for i, task in enumerate(group) for which in range(len(task.sequences))]
        for start in range(0, len(todo), n_parallel):
            works = []
            for i, which in todo[start : start + n_parallel]:
                opened.append(trunks[i].fork())
                works.append(_branch(opened[-1], group[i], which, nll[i]))
            run(works)
            while len(opened) > len(trunks):
                opened.pop().close()
    finally:
        for sequence in opened:
            sequence.close()
    return nll, n_tokens


def _trunk(sequence: ForkSequence, task: Task, nll: Float64) -> _Work:
    """What the sequences of a task share; answers queries at its last token."""
    n = task.n_shared
    places = [i for i, query in enumerate(task.queries) if query.position == n - 1]
    return _work(sequence, task, task.sequences[0][:n], 0, places, nll)


def _branch(sequence: ForkSequence, task: Task, which: int, nll: Float64) -> _Work:
    """The rest of one sequence, up to the last token whose logits are read."""
    n = task.n_shared
    places = [
        i for i, query in enumerate(task.queries) if query.sequence == which and query.position >= n
    ]
    places.sort(key=lambda i: task.queries[i].position)
    end = task.queries[places[-1]].position + 1 if places else n
    return _work(sequence, task, task.sequences[which][n:end], n, places, nll)


def _work(
    sequence: ForkSequence,
    task: Task,
    tokens: list[int],
    offset: int,
    places: list[int],
    nll: Float64,
) -> _Work:
    queries = [task.queries[i] for i in places]
    rows = np.array([query.position - offset for query in queries], np.int32)
    targets = np.array([query.target for query in queries], np.int32)
    ids = np.array(tokens, np.int32)
    return _Work(sequence, ids, rows, targets, nll, np.array(places, np.int32))


def _run(session: ForkSession, works: list[_Work], step_tokens: int, n_threads: int) -> None:
    lengths = [len(work.tokens) for work in works]
    for step in pieces(lengths, step_tokens, step_tokens):
        requests, reads = [], []
        for index, begin, end in step:
            work = works[index]
            mine = np.flatnonzero((work.rows >= begin) & (work.rows < end))
            first = int(work.rows[mine[0]]) if mine.size else end
            requests.append((work.sequence.id, work.tokens[begin:end], first - begin))
            reads.append((work, mine, first, end))
        logits = session.core.step(requests)
        row = 0
        for work, mine, first, end in reads:
            if mine.size:
                wanted = row + work.rows[mine] - first
                work.nll[work.places[mine]] = token_nll(
                    logits[wanted], work.targets[mine], n_threads
                )
            row += end - first
