"""Multiple choice in llama-perplexity's binary format: one right answer of several.

Little endian: uint32 n, uint32 [n] where each task begins in the file, then the tasks: question,
answers with one right one ("mc1"), answers with several ("mc2", not used). A text is its uint32
length and UTF-8; answers are their uint32 number, the texts, and an int32 label each, 1 for right.
Question and answer are joined by a space and scored as in HellaSwag.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .draws import draw_scaled
from .errors import EvalError
from .tasks import Encode, Task, ending_task

MAX_ANSWERS = 100
NUMBER_BYTES = 4
RIGHT = 1


@dataclass(frozen=True)
class MultipleChoiceTask:
    """One task of a file.

    Attributes:
        name: which, for errors.
        question: what the answers continue.
        answers: one text at least.
        right: indices of the right ones.

    """

    name: str
    question: str
    answers: list[str]
    right: frozenset[int]


class MultipleChoiceFile:
    """The bytes of a file; tasks are read when they are asked for."""

    def __init__(self, data: bytes) -> None:
        """Read the list of positions.

        Raises:
            EvalError: if there are no tasks or their positions are incomplete.

        """
        self._data = data
        n = int.from_bytes(data[:NUMBER_BYTES], "little") if len(data) >= NUMBER_BYTES else 0
        if n == 0:
            raise EvalError(f"the file of {len(data)} bytes has no multiple choice tasks")
        needed = NUMBER_BYTES * (1 + n)
        if len(data) < needed:
            raise EvalError(
                f"the file has {len(data)} bytes, the positions of its {n} tasks need {needed}"
            )
        self._positions = np.frombuffer(data, "<u4", n, NUMBER_BYTES)

    def __len__(self) -> int:
        """Tasks in the file."""
        return len(self._positions)

    def task(self, index: int) -> MultipleChoiceTask:
        """One task.

        Raises:
            EvalError: if it reaches beyond the file, is no UTF-8, has more answers than
                ``MAX_ANSWERS``, an empty text or no right answer.

        """
        name = f"task {index + 1}"
        reader = _Reader(self._data, int(self._positions[index]), name)
        question = reader.text()
        answers, right = reader.answers()
        reader.answers()
        if not question or not answers or "" in answers:
            raise EvalError(f"{name} has an empty question, no answers or an empty answer")
        if not right:
            raise EvalError(f"{name}: none of its {len(answers)} answers is labelled {RIGHT}")
        return MultipleChoiceTask(name, question, answers, right)


class _Reader:
    """Numbers and texts from a place on."""

    def __init__(self, data: bytes, at: int, name: str) -> None:
        self._data, self._at, self._name = data, at, name

    def take(self, n_bytes: int) -> bytes:
        end = self._at + n_bytes
        if end > len(self._data):
            raise EvalError(
                f"{self._name} reaches to byte {end}, the file has {len(self._data)} bytes"
            )
        part = self._data[self._at : end]
        self._at = end
        return part

    def number(self) -> int:
        return int.from_bytes(self.take(NUMBER_BYTES), "little")

    def text(self) -> str:
        data = self.take(self.number())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            at = self._at - len(data) + error.start
            raise EvalError(f"{self._name} is not UTF-8 at byte {at} of the file") from None

    def answers(self) -> tuple[list[str], frozenset[int]]:
        """The texts, and the indices of the right ones."""
        n = self.number()
        if n > MAX_ANSWERS:
            raise EvalError(f"{self._name} has {n} answers, at most {MAX_ANSWERS} are supported")
        texts = [self.text() for _ in range(n)]
        labels = struct.unpack(f"<{n}i", self.take(NUMBER_BYTES * n))
        return texts, frozenset(i for i, label in enumerate(labels) if label == RIGHT)


def select_multiple_choice(file: MultipleChoiceFile, n_wanted: int) -> list[MultipleChoiceTask]:
    """``n_wanted`` random tasks, llama-perplexity's; all in order if 0 or if there are no more.

    Raises:
        EvalError: as `MultipleChoiceFile.task`.

    """
    some = 0 < n_wanted < len(file)
    chosen: Sequence[int] = draw_scaled(len(file), n_wanted) if some else range(len(file))
    return [file.task(i) for i in chosen]


def prepare_multiple_choice(task: MultipleChoiceTask, encode: Encode) -> Task:
    """Tokenise a task.

    Raises:
        EvalError: if its texts are too short.

    """
    sequences = [encode(f"{task.question} {answer}") for answer in task.answers]
    return ending_task(task.name, sequences, task.right)


def share_and_error(n_right: int, n_trials: int, n_tasks: int) -> tuple[float, float]:
    """A share and its standard error over ``n_tasks``; NaN for one task."""
    share = n_right / n_trials
    variance = share * (1 - share)
    return share, math.sqrt(variance / (n_tasks - 1)) if n_tasks > 1 else math.nan
