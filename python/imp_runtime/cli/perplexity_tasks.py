"""imp-perplexity's task scores: --hellaswag, --winogrande and --multiple-choice."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ..eval import hellaswag, multiple_choice, winogrande
from ..eval.contracts import ForkSession
from ..eval.tasks import (
    DEFAULT_PARALLEL,
    Encode,
    Task,
    TaskResult,
    longest,
    run_tasks,
    sequences_needed,
)
from . import task_lines as lines
from .llama_flags import Flag, FlagError, Parsed, flag
from .perplexity_input import read_binary, read_text

Log = Callable[[str], None]
ALL = " (0: all)"

FLAGS: list[Flag] = [
    flag("--hellaswag", "score the HellaSwag tasks of -f, in random order"),
    flag(
        "--hellaswag-tasks N",
        "tasks at most" + ALL,
        type=int,
        default=hellaswag.DEFAULT_TASKS,
    ),
    flag("--winogrande", "score the Winogrande tasks of -f"),
    flag("--winogrande-tasks N", "random tasks at most" + ALL, type=int, default=0),
    flag("--multiple-choice", "score the multiple choice tasks of -bf"),
    flag("--multiple-choice-tasks N", "random tasks at most" + ALL, type=int, default=0),
]
# Flags of perplexity and KL divergence, and their values that ask for nothing.
OF_TEXTS = {
    "kl_divergence": False,
    "kl_divergence_base": None,
    "ppl_stride": 0,
    "ppl_output_type": "0",
    "chunks": -1,
    "score_from": None,
    "dump": None,
}


@dataclass(frozen=True)
class Kind:
    """One of the three scores.

    Attributes:
        name: what llama-perplexity's log calls it.
        load: reads, chooses and tokenises the tasks, logging on the way.
        header: line above the rows, empty for none.
        row: the line after a task.
        final: the closing lines.

    """

    name: str
    load: Callable[[Parsed, Encode, Log], list[Task]]
    header: str
    row: Callable[[TaskResult, Task], str]
    final: Callable[[TaskResult], Iterable[str]]


def _load_hellaswag(parsed: Parsed, encode: Encode, log: Log) -> list[Task]:
    tasks = hellaswag.parse_hellaswag(read_text(parsed))
    log(f"hellaswag_score : loaded {len(tasks)} tasks from prompt.")
    tasks = hellaswag.select_hellaswag(tasks, parsed["hellaswag_tasks"])
    log(f"hellaswag_score : selecting {len(tasks)} randomized tasks.")
    prepared = [hellaswag.prepare_hellaswag(task, encode) for task in tasks]
    log("hellaswag_score : calculating hellaswag score over selected tasks.")
    return prepared


def _load_winogrande(parsed: Parsed, encode: Encode, log: Log) -> list[Task]:
    tasks = winogrande.parse_winogrande(read_text(parsed))
    log(f"winogrande_score : loaded {len(tasks)} tasks from prompt.")
    chosen = winogrande.select_winogrande(tasks, parsed["winogrande_tasks"])
    if len(chosen) < len(tasks):
        log(f"winogrande_score : selecting {len(chosen)} random tasks")
    log("winogrande_score : tokenizing selected tasks")
    prepared = [winogrande.prepare_winogrande(task, encode) for task in chosen]
    log("winogrande_score : calculating winogrande score over selected tasks.")
    return prepared


def _load_multiple_choice(parsed: Parsed, encode: Encode, log: Log) -> list[Task]:
    name = "multiple_choice_score"
    file = multiple_choice.MultipleChoiceFile(read_binary(parsed))
    log(f"{name}: there are {len(file)} tasks in prompt")
    tasks = multiple_choice.select_multiple_choice(file, parsed["multiple_choice_tasks"])
    if len(tasks) < len(file):
        log(f"{name}: selecting {len(tasks)} random tasks from {len(file)} tasks available")
    else:
        log(f"{name}: reading tasks")
        print(lines.reading_dots(tasks), flush=True)
    log(f"{name}: preparing task data")
    prepared = [multiple_choice.prepare_multiple_choice(task, encode) for task in tasks]
    print(lines.preparing_dots(tasks), flush=True)
    log(f"{name} : calculating TruthfulQA score over {len(tasks)} tasks.")
    return prepared


KINDS = {
    "hellaswag": Kind(
        "hellaswag_score",
        _load_hellaswag,
        lines.HELLASWAG_HEADER,
        lambda result, _: lines.hellaswag_row(result),
        lambda _: (),
    ),
    "winogrande": Kind(
        "winogrande_score", _load_winogrande, "", lines.winogrande_row, lines.winogrande_final
    ),
    "multiple_choice": Kind(
        "multiple_choice_score",
        _load_multiple_choice,
        lines.MULTIPLE_CHOICE_HEADER,
        lambda result, _: lines.multiple_choice_row(result),
        lines.multiple_choice_final,
    ),
}


def wanted_kind(parsed: Parsed) -> Kind | None:
    """The score that the command line asks for, None for a text's.

    Raises:
        FlagError: if flags contradict each other or a number is out of range.
    """
    wanted = [key for key in KINDS if parsed[key]]
    for key in KINDS:
        tasks = f"{key}_tasks"
        if tasks in parsed.given and key not in wanted:
            raise FlagError(f"{_spell(tasks)} needs {_spell(key)}")
        if parsed[tasks] < 0:
            raise FlagError(f"{_spell(tasks)} is {parsed[tasks]}, it must be 0 or more")
    if not wanted:
        return None
    others = [*wanted[1:], *(key for key, none in OF_TEXTS.items() if parsed[key] != none)]
    if others:
        raise FlagError(f"{_spell(wanted[0])} and {_spell(others[0])} cannot be combined")
    return KINDS[wanted[0]]


def _spell(key: str) -> str:
    return "--" + key.replace("_", "-")


def run(
    kind: Kind,
    parsed: Parsed,
    encode: Encode,
    open_session: Callable[[int, int], AbstractContextManager[ForkSession]],
    n_threads: int,
    log: Log,
) -> None:
    """Print the scores; ``open_session(n_ctx, max_seqs)`` is called when the tasks are read.

    Raises:
        FlagError, EvalError: if the tasks cannot be read or run.
        OSError: if their file cannot be read.
    """
    tasks = kind.load(parsed, encode, log)
    n_ctx = longest(tasks, parsed["ctx_size"])
    n_parallel = DEFAULT_PARALLEL if parsed["parallel"] is None else parsed["parallel"]
    with open_session(n_ctx, sequences_needed(n_parallel)) as session:
        if kind.header:
            print(kind.header, flush=True)
        for result in run_tasks(session, tasks, parsed["batch_size"], n_threads, n_parallel):
            print(kind.row(result, tasks[result.index]), flush=True)
    print(flush=True)
    for line in kind.final(result):
        log(line)
    print(flush=True)
    rate = result.n_tokens / result.seconds
    log(
        f"{kind.name}: {result.n_tokens} tokens in {result.seconds:.2f} s, {rate:.2f} tokens/s, "
        f"{len(tasks)} tasks"
    )
