"""Winogrande in llama-perplexity's format: which of two words belongs into the gap?

Lines ``index,sentence,choice 1,choice 2,answer``, the answer 1 or 2, a ``_`` for the gap; commas
inside double quotes do not separate, quotes around the sentence are dropped, all others are kept.

Scores follow llama.cpp: the mean log-probability of what comes after the choice, without the last
token. Where one of the sentences has no more than three tokens from their first difference on, the
choices count too. Where the second sentence's score begins at the first difference, its first token
is predicted from the end of the first sentence, as in llama.cpp, where a comment calls that wrong.
Equal scores answer 2.

Three things differ, where llama.cpp loses data or reads outside its arrays: the last line of a file
counts even if no newline follows it (llama-perplexity drops a file's last task with -f, not with
-bf), a line that is no task is an error, and scores begin between the first difference and the end.
"""

import re
from dataclasses import dataclass

from .draws import draw_scaled
from .errors import EvalError
from .tasks import Encode, Query, Task, first_difference

GAP = "_"
FIELDS = 5
# With more tokens than these after the first difference, only what follows the choice counts.
MIN_TRAILING = 3
ANSWERS = ("1", "2")


@dataclass(frozen=True)
class WinograndeTask:
    """One task of a file.

    Attributes:
        name: where it is, for errors.
        before, after: the sentence around the gap.
        choices: two texts.
        answer: index of the right one, 0 or 1.

    """

    name: str
    before: str
    after: str
    choices: tuple[str, str]
    answer: int


def parse_winogrande(text: str) -> list[WinograndeTask]:
    """The tasks of a file's text, in order; empty lines are skipped.

    Raises:
        EvalError: if there is none, a field is missing, the sentence has no gap, a choice is empty,
            both are equal, or the answer is neither 1 nor 2.

    """
    tasks: list[WinograndeTask] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            tasks.append(_parse(f"task {len(tasks) + 1} (line {number})", line))
    if not tasks:
        raise EvalError("the file has no Winogrande tasks")
    return tasks


def _parse(name: str, line: str) -> WinograndeTask:
    fields = re.findall(r'(?:^|,)((?:"[^"]*(?:"|$)|[^",])*)', line)
    if len(fields) < FIELDS:
        raise EvalError(f"{name} has {len(fields)} fields, Winogrande needs {FIELDS}")
    sentence, one, two, answer = fields[1:FIELDS]
    if len(sentence) > 1 and sentence[0] == sentence[-1] == '"':
        sentence = sentence[1:-1]
    before, gap, after = sentence.partition(GAP)
    if not gap:
        raise EvalError(f"{name}: the sentence has no {GAP}")
    if not one or not two:
        raise EvalError(f"{name}: choice {1 if not one else 2} is empty")
    if one == two:
        raise EvalError(f"{name}: both choices are {one!r}")
    if answer.strip() not in ANSWERS:
        raise EvalError(f"{name}: the answer is {answer.strip()!r}, it must be 1 or 2")
    return WinograndeTask(name, before, after, (one, two), ANSWERS.index(answer.strip()))


def select_winogrande(tasks: list[WinograndeTask], n_wanted: int) -> list[WinograndeTask]:
    """``n_wanted`` random tasks, llama-perplexity's; all in order if 0 or if there are no more."""
    if not 0 < n_wanted < len(tasks):
        return tasks
    return [tasks[i] for i in draw_scaled(len(tasks), n_wanted)]


def prepare_winogrande(task: WinograndeTask, encode: Encode) -> Task:
    """Tokenise a task.

    Raises:
        EvalError: if its sentences are too short.

    """
    sequences = [encode(task.before + choice + task.after) for choice in task.choices]
    parted = first_difference(task.name, sequences)
    skip_choice = min(map(len, sequences)) - parted > MIN_TRAILING
    queries: list[Query] = []
    for which, (sequence, choice) in enumerate(zip(sequences, task.choices, strict=True)):
        first = parted
        if skip_choice:
            behind = len(encode(task.before + choice))
            first = behind if parted < behind < len(sequence) else parted
        stop = len(sequence) - (len(sequence) - first > 1)
        queries += [Query(which, at - 1, sequence[at], which) for at in range(first, stop)]
        if which == 1 and first == parted:
            at_end = Query(0, len(sequences[0]) - 1, sequence[first], 1)
            queries[-(stop - first)] = at_end
    return Task(task.name, sequences, queries, frozenset([task.answer]), last_wins=True)
