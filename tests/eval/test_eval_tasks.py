"""Scores of tasks against sums over each whole text, one after another."""

import math
import random

import numpy as np
import pytest

from imp_runtime.eval import EvalError
from imp_runtime.eval.hellaswag import (
    HellaSwagTask,
    parse_hellaswag,
    prepare_hellaswag,
    select_hellaswag,
    wilson_interval,
)
from imp_runtime.eval.multiple_choice import (
    MAX_ANSWERS,
    MultipleChoiceFile,
    prepare_multiple_choice,
    select_multiple_choice,
)
from imp_runtime.eval.tasks import (
    CONTEXTS,
    DEFAULT_PARALLEL,
    Query,
    Task,
    ending_task,
    longest,
    run_tasks,
    sequences_needed,
)
from imp_runtime.eval.winogrande import parse_winogrande, prepare_winogrande, select_winogrande
from tests.eval import forking, task_data

N_VOCAB = 40


def logits(history: list[int]) -> np.ndarray:
    """Different for every history."""
    seed = np.random.SeedSequence(history).generate_state(1)[0]
    return 4 * np.random.RandomState(seed).randn(N_VOCAB)


def log_p(tokens: list[int], at: int, token: int | None = None) -> float:
    """Of tokens[at], or of another token in its place."""
    row = np.float64(logits(tokens[:at]).astype(np.float32))
    return float(row[tokens[at] if token is None else token] - np.log(np.exp(row).sum()))


def encode(text: str) -> list[int]:
    return [ord(letter) % N_VOCAB for letter in text]


def some_tasks(n: int) -> list[Task]:
    rng = random.Random(n)
    tasks = []
    for i in range(n):
        shared = [rng.randrange(N_VOCAB) for _ in range(rng.randint(0, 30))]
        n_endings = rng.choice([1, 2, 4, 4, 23])
        sequences = [
            shared + [rng.randrange(N_VOCAB) for _ in range(rng.randint(2, 9))]
            for _ in range(n_endings)
        ]
        right = frozenset([rng.randrange(n_endings)])
        tasks.append(ending_task(f"task {i + 1}", sequences, right))
    return tasks


@pytest.mark.parametrize(
    ("n_ubatch", "n_batch", "n_parallel"),
    [(512, 2048, 16), (512, 7, 16), (3, 2048, 5), (1, 1, 1), (4096, 4096, 1024)],
)
def test_scores_are_those_of_whole_texts(n_ubatch: int, n_batch: int, n_parallel: int) -> None:
    session = forking.Session(logits, n_ubatch)
    tasks = some_tasks(23)
    n_right = n_endings = 0
    results = run_tasks(session, tasks, n_batch, n_parallel=n_parallel)
    for task, result in zip(tasks, results, strict=True):
        first = max(1, next(query.position + 1 for query in task.queries))
        expected = [
            np.mean([log_p(tokens, at) for at in range(first, len(tokens))])
            for tokens in task.sequences
        ]
        np.testing.assert_allclose(result.scores, expected, rtol=1e-6)
        n_right += int(np.argmax(expected)) in task.right
        n_endings += len(expected)
        assert (result.n_right, result.n_endings) == (n_right, n_endings)
    assert 0 < n_right < len(tasks)
    assert not session.open_sequences and session.most_open <= sequences_needed(n_parallel)
    assert max(session.steps) <= min(n_ubatch, n_batch)


def test_a_shared_beginning_is_evaluated_once() -> None:
    session = forking.Session(logits)
    beginning = list(range(30))
    task = ending_task("t", [[*beginning, 1, 2], [*beginning, 3, 4], [*beginning, 5]], frozenset())
    (result,) = run_tasks(session, [task])
    assert session.steps == [30, 2]  # the last token of an ending predicts nothing
    assert result.n_tokens == 32
    list(run_tasks(session, [task] * 4))
    assert session.steps[2:] == [120, 8]


def test_scores_start_within_every_text() -> None:
    session = forking.Session(logits)
    cases = [
        ([[1, 2, 3], [1, 2, 3, 4]], 2),  # one text begins with the other
        ([[1, 2, 3], [1, 2, 3]], 2),  # equal
        ([[1, 2], [3, 4]], 1),  # nothing predicts the first token
    ]
    for sequences, first in cases:
        (result,) = run_tasks(session, [ending_task("t", sequences, frozenset([0]))])
        expected = [
            np.mean([log_p(tokens, at) for at in range(first, len(tokens))]) for tokens in sequences
        ]
        np.testing.assert_allclose(result.scores, expected, rtol=1e-6)
    with pytest.raises(EvalError, match="task 3 has 1 tokens with one of its endings, it needs 2"):
        ending_task("task 3", [[1, 2], [1]], frozenset([0]))


@pytest.mark.parametrize(("last_wins", "chosen"), [(False, 0), (True, 1)])
def test_equal_scores(last_wins: bool, chosen: int) -> None:
    queries = [Query(which, 0, 5, which) for which in range(2)]
    task = Task("t", [[1, 5], [1, 5]], queries, frozenset([0]), last_wins)
    (result,) = run_tasks(forking.Session(logits), [task])
    assert (result.chosen, result.n_right) == (chosen, 1 - chosen)


def test_queries_come_in_any_order() -> None:
    tokens = [3, 1, 4, 1, 5]
    queries = [Query(0, at, tokens[at + 1], 0) for at in (3, 1, 2)]
    (result,) = run_tasks(forking.Session(logits), [Task("t", [tokens, [3]], queries, frozenset())])
    np.testing.assert_allclose(result.scores, mean_log_p(tokens, 2, 5), rtol=1e-6)


def test_errors_name_the_tasks_and_close_all() -> None:
    session = forking.Session(lambda history: logits(history) * (math.nan if 7 in history else 1))
    fine, bad = [[1, 2, 3], [1, 2, 4]], [[1, 7, 3], [1, 7, 4]]
    tasks = [ending_task(f"task {i}", bad if i == 6 else fine, frozenset()) for i in range(1, 8)]
    with pytest.raises(EvalError, match="task 5 to task 7: .*not finite"):
        list(run_tasks(session, tasks))
    assert not session.open_sequences


def test_longest_text() -> None:
    tasks = [ending_task(f"task {n}", [[1] * n, [2] * 3], frozenset()) for n in (5, 9, 8)]
    assert longest(tasks, 3) == 9 <= 3 * CONTEXTS
    with pytest.raises(EvalError, match="task 9 has 9 tokens, a context of 2 allows 8: raise it"):
        longest(tasks, 2)
    with pytest.raises(EvalError, match="--ctx-size is 0, it must be at least 1"):
        longest(tasks, 0)


# ---------------------------------------------------------------------------- HellaSwag


def test_hellaswag_files() -> None:
    text = "a b\n2\none\ntwo\nthree\nfour\nc\n0 \r\n1\n2\n3\n4\n"
    first, second = parse_hellaswag(text)
    assert first == HellaSwagTask("task 1 (line 1)", "a b", 2, ["one", "two", "three", "four"])
    assert (second.gold, second.name) == (0, "task 2 (line 7)")
    assert parse_hellaswag(text[:-1]) == [first, second]
    task = prepare_hellaswag(first, encode)
    assert task.sequences[2] == encode("a b three") and task.right == {2}
    assert [task.sequences[q.sequence][q.position + 1] for q in task.queries] == [
        q.target for q in task.queries
    ]
    assert len(task.queries) == len("onetwothreefour")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has 0 lines, HellaSwag needs 6 for each task"),
        ("a\n1\nb\nc\nd\n", "the file has 5 lines"),
        ("a\n1\nb\nc\nd\ne\n\n", "the file has 7 lines"),
        ("a\n4\nb\nc\nd\ne\n", r"task 1 \(line 1\): the right ending is '4', it must be 0 to 3"),
        ("a\n-1\nb\nc\nd\ne\n", "the right ending is '-1'"),
        ("a\n\nb\nc\nd\ne\n", "the right ending is ''"),
        ("a\n²\nb\nc\nd\ne\n", "the right ending is '²'"),
        ("a\n1\nb\n\nd\ne\n", "ending 1 is empty"),
    ],
)
def test_damaged_hellaswag_files(text: str, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        parse_hellaswag(text)


def test_hellaswag_order() -> None:
    tasks = parse_hellaswag(task_data.hellaswag(10))
    order = [4, 9, 6, 8, 0, 1, 3, 7, 2, 5]
    assert select_hellaswag(tasks, 400) == select_hellaswag(tasks, 0) == [tasks[i] for i in order]
    assert select_hellaswag(tasks, 3) == [tasks[i] for i in order[:3]]


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (9, 20), (3000, 10042)])
def test_wilson_interval(right: int, n: int) -> None:
    """Its ends are the shares x whose own 95 % interval reaches to the observed one."""
    low, high = wilson_interval(right / n, n)
    assert 0 <= round(low, 9) < high <= 1 + 1e-9
    for x in (low, high):
        assert (right / n - x) ** 2 == pytest.approx(1.95996398454**2 * x * (1 - x) / n, abs=1e-12)


# ---------------------------------------------------------------------------- Winogrande


def test_winogrande_files() -> None:
    text = (
        "0,Ann met Bea and _ smiled.,Ann,Bea,2\n\n"
        '1,"So, _ ""x"" left, too.",he,"she, then",1\r\n'
        "2,_ ran,he,she,1,more"
    )
    one, two, three = parse_winogrande(text)
    assert (one.before, one.after, one.choices, one.answer) == (
        "Ann met Bea and ", " smiled.", ("Ann", "Bea"), 1
    )  # fmt: skip
    assert (two.before, two.after) == ("So, ", ' ""x"" left, too.')
    assert two.choices == ("he", '"she, then"') and two.answer == 0
    assert three.name == "task 3 (line 4)" and three.before == "" and three.answer == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has no Winogrande tasks"),
        ("\n \n", "the file has no Winogrande tasks"),
        ("0,a _ b,c,1", r"task 1 \(line 1\) has 4 fields, Winogrande needs 5"),
        ("0,a _ b,c,d,1\n\nsentence", r"task 2 \(line 3\) has 1 fields"),
        ('0,"a _ b,c,d,1', "has 2 fields"),
        ("0,a b,c,d,1", "the sentence has no _"),
        ("0,a _ b,,d,1", "choice 1 is empty"),
        ("0,a _ b,c,,1", "choice 2 is empty"),
        ("0,a _ b,c,c,1", "both choices are 'c'"),
        ("0,a _ b,c,d,3", "the answer is '3', it must be 1 or 2"),
        ("0,a _ b,c,d,", "the answer is ''"),
    ],
)
def test_damaged_winogrande_files(text: str, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        parse_winogrande(text)


def test_winogrande_choice_of_tasks() -> None:
    tasks = parse_winogrande(task_data.winogrande(10))
    assert select_winogrande(tasks, 0) == select_winogrande(tasks, 10) == tasks
    assert select_winogrande(tasks, 3) == [tasks[i] for i in (4, 8, 5)]


def winogrande_scores(line: str) -> tuple[list[list[int]], np.ndarray]:
    task = prepare_winogrande(parse_winogrande(line)[0], encode)
    (result,) = run_tasks(forking.Session(logits), [task])
    return task.sequences, result.scores


def mean_log_p(tokens: list[int], first: int, stop: int) -> float:
    return float(np.mean([log_p(tokens, at) for at in range(first, stop)]))


def test_winogrande_scores_what_follows_the_choice() -> None:
    (one, two), scores = winogrande_scores("0,so _ ran on.,Ann,Peter,1")
    expected = [mean_log_p(one, 6, len(one) - 1), mean_log_p(two, 8, len(two) - 1)]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_winogrande_scores_the_choice_where_three_tokens_part() -> None:
    """And then reads the second choice's first token where llama.cpp does."""
    (one, two), scores = winogrande_scores("0,so _,Ann,Bobby,1")
    assert len(one) - 3 == 3
    sum_two = log_p([*one, 0], len(one), two[3]) + log_p(two, 4) + log_p(two, 5) + log_p(two, 6)
    np.testing.assert_allclose(scores, [mean_log_p(one, 3, 5), sum_two / 4], rtol=1e-6)


def test_winogrande_skips_the_choice_where_four_tokens_part() -> None:
    (one, two), scores = winogrande_scores("0,so _a,Ann,Bob,1")
    assert len(one) - 3 == 4
    np.testing.assert_allclose(scores, [log_p(one, 6), log_p(two, 6)], rtol=1e-6)


@pytest.mark.parametrize(
    ("line", "parted", "first_of_one"),
    [("0,so _,Anna,Bobby,1", 3, 3), ("0,so _er on,tough,to,1", 5, 8)],
)
def test_winogrande_scores_from_the_first_difference(
    line: str, parted: int, first_of_one: int
) -> None:
    """Nothing follows the choices; or the first choice begins with the second."""
    (one, two), scores = winogrande_scores(line)
    rest = [log_p(two, at) for at in range(parted + 1, len(two) - 1)]
    of_two = np.mean([log_p([*one, 0], len(one), two[parted]), *rest])
    expected = [mean_log_p(one, first_of_one, len(one) - 1), of_two]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_winogrande_gap_at_the_beginning() -> None:
    (one, two), scores = winogrande_scores("0,_ ran away,Ann,Peter,1")
    expected = [mean_log_p(one, 3, len(one) - 1), mean_log_p(two, 5, len(two) - 1)]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


# ---------------------------------------------------------------------------- multiple choice

QUESTION = ("why", ["yes", "no", "maybe"], [0, 1, 0])


def test_multiple_choice_files() -> None:
    file = MultipleChoiceFile(task_data.multiple_choice_file([QUESTION, ("ü", ["x", "y"], [1, 1])]))
    first, second = select_multiple_choice(file, 0)
    assert (first.question, first.answers, first.right) == ("why", ["yes", "no", "maybe"], {1})
    assert (second.question, second.right) == ("ü", {0, 1})
    task = prepare_multiple_choice(first, encode)
    assert task.sequences[2] == encode("why maybe") and task.right == {1}
    many = MultipleChoiceFile(task_data.multiple_choice(10))
    assert select_multiple_choice(many, 3) == [many.task(i) for i in (4, 8, 5)]
    assert select_multiple_choice(many, 11) == [many.task(i) for i in range(10)]


def test_multiple_choice_files_are_never_read_beyond_their_end() -> None:
    data = task_data.multiple_choice_file([QUESTION])
    for size in range(len(data)):
        with pytest.raises(EvalError, match=rf"the file (of|has) {size} bytes|file has {size}"):
            select_multiple_choice(MultipleChoiceFile(data[:size]), 0)
    select_multiple_choice(MultipleChoiceFile(data), 0)


def little(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file of 0 bytes has no multiple choice tasks"),
        (little(0), "the file of 4 bytes has no multiple choice tasks"),
        (little(2**32 - 1), "the file has 4 bytes, the positions of its 4294967295 tasks need 17"),
        (little(1, 2**32 - 1), "task 1 reaches to byte 4294967299, the file has 8 bytes"),
        (little(1, 8, 2**32 - 1), "task 1 reaches to byte 4294967307, the file has 12 bytes"),
        (little(1, 8, 2) + b"\xc3\x28", "task 1 is not UTF-8 at byte 12 of the file"),
        (little(1, 8, 0, 0, 0), "task 1 has an empty question, no answers or an empty answer"),
        (
            task_data.multiple_choice_file([("q", ["a", ""], [1, 0])]),
            "task 1 has an empty question, no answers or an empty answer",
        ),
        (
            task_data.multiple_choice_file([QUESTION, ("q", ["a", "b"], [0, 2])]),
            "task 2: none of its 2 answers is labelled 1",
        ),
        (
            task_data.multiple_choice_file([("q", ["a"] * (MAX_ANSWERS + 1), [1] * 101)]),
            "task 1 has 101 answers, at most 100 are supported",
        ),
    ],
)
def test_damaged_multiple_choice_files(data: bytes, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        select_multiple_choice(MultipleChoiceFile(data), 0)


def test_as_many_answers_as_allowed() -> None:
    texts = [f"answer {i}" for i in range(MAX_ANSWERS)]
    data = task_data.multiple_choice_file(
        [("q", texts, [int(i == 99) for i in range(MAX_ANSWERS)])]
    )
    (task,) = select_multiple_choice(MultipleChoiceFile(data), 0)
    session = forking.Session(logits)
    (result,) = run_tasks(session, [prepare_multiple_choice(task, encode)])
    assert len(result.scores) == MAX_ANSWERS and session.most_open <= sequences_needed(
        DEFAULT_PARALLEL
    )
