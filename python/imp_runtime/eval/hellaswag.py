"""HellaSwag in llama-perplexity's format: four endings of a context, one of them sensible.

Six lines a task: context, index of the right ending (0 to 3), four endings. Context and ending are
joined by a space. Tasks run in random order, always the same one. As in llama.cpp an ending's score
is the mean log-probability of its tokens from the first on in which the four texts differ; unlike
there, that token never lies behind the end of the shortest text.
"""

import math
from dataclasses import dataclass

from .draws import draw_uniform
from .errors import EvalError
from .tasks import Encode, Task, ending_task

LINES = 6
ENDINGS = 4
DEFAULT_TASKS = 400
Z_95 = 1.95996398454  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class HellaSwagTask:
    """One task of a file.

    Attributes:
        name: where it is, for errors.
        context: what the endings continue.
        gold: index of the right one.
        endings: four texts.

    """

    name: str
    context: str
    gold: int
    endings: list[str]


def parse_hellaswag(text: str) -> list[HellaSwagTask]:
    """The tasks of a file's text, in order.

    Raises:
        EvalError: if a task is incomplete, an index is no number from 0 to 3 or an ending is empty.

    """
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines or len(lines) % LINES:
        raise EvalError(f"the file has {len(lines)} lines, HellaSwag needs {LINES} for each task")
    tasks = []
    for start in range(0, len(lines), LINES):
        context, gold, *endings = lines[start : start + LINES]
        name = f"task {start // LINES + 1} (line {start + 1})"
        index = gold.strip()
        if index not in map(str, range(ENDINGS)):
            raise EvalError(f"{name}: the right ending is {gold!r}, it must be 0 to {ENDINGS - 1}")
        if "" in endings:
            raise EvalError(f"{name}: ending {endings.index('')} is empty")
        tasks.append(HellaSwagTask(name, context, int(index), endings))
    return tasks


def select_hellaswag(tasks: list[HellaSwagTask], n_wanted: int) -> list[HellaSwagTask]:
    """Up to ``n_wanted`` tasks (0 for all) in llama-perplexity's random order."""
    n = min(n_wanted or len(tasks), len(tasks))
    return [tasks[i] for i in draw_uniform(len(tasks), n)]


def prepare_hellaswag(task: HellaSwagTask, encode: Encode) -> Task:
    """Tokenise a task.

    Raises:
        EvalError: if its texts are too short.

    """
    sequences = [encode(f"{task.context} {ending}") for ending in task.endings]
    return ending_task(task.name, sequences, frozenset([task.gold]))


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a share of ``n`` trials (E. B. Wilson, JASA 22, 1927)."""
    z = Z_95**2 / n
    half = math.sqrt(z * (4 * share * (1 - share) + z)) / 2
    middle = share + z / 2
    return (middle - half) / (1 + z), (middle + half) / (1 + z)
