"""The lines of llama-perplexity's task scores."""

from collections.abc import Iterator, Sequence

from ..eval.hellaswag import wilson_interval
from ..eval.multiple_choice import share_and_error
from ..eval.tasks import Task, TaskResult

HELLASWAG_HEADER = "\ntask\tacc_norm\t95% confidence interval"
MULTIPLE_CHOICE_HEADER = "\ntask\tacc_norm"
# Winogrande's final line needs this many tasks.
MIN_COUNT_FOR_FINAL = 100
# Progress of multiple choice: a dot for each hundredth of the tasks, none above the limit.
DOTS = 100
MAX_COUNT_FOR_DOTS = 500


def hellaswag_row(result: TaskResult) -> str:
    """Tasks so far, accuracy and its 95 % interval."""
    n = result.index + 1
    share = result.n_right / n
    low, high = wilson_interval(share, n)
    return f"{n}\t{100 * share:3.8f}%\t[{100 * low:3.4f}%, {100 * high:3.4f}%]"


def winogrande_row(result: TaskResult, task: Task) -> str:
    """Tasks so far, accuracy, both scores, the choice and the answer."""
    n = result.index + 1
    one, two = result.scores
    (answer,) = task.right
    accuracy = 100 * result.n_right / n
    return f"{n}\t{accuracy:.4f}\t{one:10.6f}  {two:10.6f}  {result.chosen + 1}  {answer + 1}"


def multiple_choice_row(result: TaskResult) -> str:
    """Tasks so far and accuracy."""
    n = result.index + 1
    return f"{n}\t{100 * result.n_right / n:.8f}"


def winogrande_final(result: TaskResult) -> Iterator[str]:
    """The closing line; nothing below `MIN_COUNT_FOR_FINAL` tasks."""
    n = result.index + 1
    if n >= MIN_COUNT_FOR_FINAL:
        share, error = share_and_error(result.n_right, n, n)
        yield f"Final Winogrande score({n} tasks): {100 * share:.4f} +/- {100 * error:.4f}"


def multiple_choice_final(result: TaskResult) -> Iterator[str]:
    """The closing lines: accuracy, and that of a guess."""
    n = result.index + 1
    share, error = share_and_error(result.n_right, n, n)
    yield f"Final result: {100 * share:.4f} +/- {100 * error:.4f}"
    share, error = share_and_error(n, result.n_endings, n)
    yield f"Random chance: {100 * share:.4f} +/- {100 * error:.4f}"


def reading_dots(tasks: Sequence[object]) -> str:
    """Shown when all tasks of a file are read."""
    return "." * (len(tasks) // max(len(tasks) // DOTS, 1)) + "done"


def preparing_dots(tasks: Sequence[object]) -> str:
    """Shown when tasks are tokenised."""
    return "...done" if len(tasks) > MAX_COUNT_FOR_DOTS else reading_dots(tasks)
