"""imp-perplexity's task scores; golden lines come from llama-perplexity itself."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.cli import perplexity as cli
from imp_runtime.eval.tasks import DEFAULT_PARALLEL, MAX_PARALLEL, sequences_needed
from tests.cli.test_perplexity import Tokenizer, assert_same_lines
from tests.eval import bigram, forking, task_data

DATA = Path(__file__).parents[1] / "eval" / "data"
GOLDEN = json.loads((DATA / "llama_tasks.json").read_text())
MAKE = {
    "--hellaswag": lambda n: task_data.hellaswag(n).encode(),
    "--winogrande": lambda n: task_data.winogrande(n).encode(),
    "--multiple-choice": task_data.multiple_choice,
}


@pytest.fixture
def use_model(monkeypatch: pytest.MonkeyPatch):
    """Make the command line find a bigram model; returns the sizes of the sessions it opens."""

    def use(add_bos: bool = False) -> list[tuple[int, int]]:
        table = bigram.table(33, 0)
        opened: list[tuple[int, int]] = []

        @contextmanager
        def open_session(_: object, n_ctx: int, max_seqs: int) -> Iterator[forking.Session]:
            opened.append((n_ctx, max_seqs))
            yield forking.Session(lambda history: table[history[-1]])

        monkeypatch.setattr(cli, "open_session", open_session)
        monkeypatch.setattr(cli, "load_tokenizer", lambda _: Tokenizer(add_bos))
        return opened

    return use


@pytest.mark.parametrize("name", GOLDEN)
def test_prints_what_llama_perplexity_prints(name: str, use_model, tmp_path: Path, capfd) -> None:
    case = GOLDEN[name]
    opened = use_model(case["add_bos"])
    words = case["arguments"].split()
    path = tmp_path / "tasks"
    path.write_bytes(MAKE[words[0]](case["n_tasks"]))
    assert cli.main(["-m", "model.gguf", "-bf", str(path), *words]) == 0
    out, err = capfd.readouterr()
    assert_same_lines(out, case["stdout"])
    *log, speed = err.splitlines()
    assert len(log) == len(case["log"])
    for mine, golden in zip(log, case["log"], strict=True):
        assert_same_lines(mine, golden)
    n_rows = case["stdout"].rstrip().splitlines()[-1].split("\t")[0]
    assert re.fullmatch(
        rf"\w+_score: \d+ tokens in [\d.]+ s, [\d.]+ tokens/s, {n_rows} tasks", speed
    )
    ((n_ctx, max_seqs),) = opened
    assert 20 < n_ctx < 120 and max_seqs == sequences_needed(DEFAULT_PARALLEL)


def test_the_last_winogrande_task_is_not_lost(use_model, tmp_path: Path, capfd) -> None:
    use_model()
    path = tmp_path / "tasks"
    for ending in ("\n", ""):
        path.write_text("0,the _ ran,fox,dog,1\n1,the _ fell,dog,fox,2" + ending)
        assert cli.main(["-m", "m", "-f", str(path), "--winogrande"]) == 0
        assert len(capfd.readouterr().out.split()) == 2 * 6


@pytest.mark.parametrize("n_parallel", [1, 3, MAX_PARALLEL])
def test_any_number_of_endings_at_once(n_parallel, use_model, tmp_path: Path, capfd) -> None:
    opened = use_model()
    path = tmp_path / "tasks"
    path.write_text(task_data.hellaswag(9))
    outs = []
    for flags in ([], ["-np", str(n_parallel)]):
        assert cli.main(["-m", "m", "-f", str(path), "--hellaswag", *flags]) == 0
        outs.append(capfd.readouterr().out)
    assert outs[0] == outs[1] and opened[1][1] == sequences_needed(n_parallel)


def test_one_task_has_no_error_bars(use_model, tmp_path: Path, capfd) -> None:
    use_model()
    path = tmp_path / "tasks"
    path.write_bytes(task_data.multiple_choice(1))
    assert cli.main(["-m", "m", "-f", str(path), "--multiple-choice"]) == 0
    assert re.search(r"Final result: [\d.]+ \+/- nan\nRandom chance: ", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hellaswag --winogrande", "--hellaswag and --winogrande cannot be combined"),
        ("--hellaswag --kl-divergence --kl-divergence-base x", "--hellaswag and --kl-divergence "),
        ("--winogrande --save-all-logits x", "--winogrande and --kl-divergence-base cannot be"),
        ("--winogrande --ppl-stride 4", "--winogrande and --ppl-stride cannot be combined"),
        ("--winogrande --ppl-output-type 1", "--winogrande and --ppl-output-type cannot be"),
        ("--winogrande --chunks 2", "--winogrande and --chunks cannot be combined"),
        ("--winogrande --score-from 0", "--winogrande and --score-from cannot be combined"),
        ("--multiple-choice --dump x", "--multiple-choice and --dump cannot be combined"),
        ("--hellaswag-tasks 3", "--hellaswag-tasks needs --hellaswag"),
        ("--hellaswag --hellaswag-tasks -1", "--hellaswag-tasks is -1, it must be 0 or more"),
        ("--winogrande", "one text is needed (-f, -bf or -p), nothing is given"),
        ("--winogrande -p a", "task 1 (line 1) has 1 fields, Winogrande needs 5"),
        ("--multiple-choice -p a", "--multiple-choice reads a binary file, --prompt is for texts"),
        ("--multiple-choice -f {no_utf8} -e", "a binary file, --escape is for texts"),
        ("--hellaswag -f {no_utf8}", "is not UTF-8 at byte 1 of 2"),
        ("--hellaswag -f {empty}", "the file has 0 lines, HellaSwag needs 6 for each task"),
        ("--winogrande -f {empty}", "the file has no Winogrande tasks"),
        ("--multiple-choice -f {empty}", "the file of 0 bytes has no multiple choice tasks"),
        ("--multiple-choice -f {no_utf8}", "the file of 3 bytes has no multiple choice tasks"),
        ("--hellaswag -f absent", "absent: No such file or directory"),
        ("--hellaswag -f {tasks} -c 4", "tokens, a context of 4 allows 16: raise it with -c"),
        ("--hellaswag -f {tasks} -c 0", "--ctx-size is 0, it must be at least 1"),
        ("--hellaswag -f {tasks} -np 0", "--parallel is 0, it must be 1 to 1024"),
        (f"--hellaswag -f {{tasks}} -np {MAX_PARALLEL + 1}", "--parallel is 1025, it must be 1 to"),
        ("--hellaswag -f {tasks} -b 0", "--batch-size is 0, it must be at least 1"),
    ],
)
def test_errors_exit_1_with_one_line(
    flags: str, message: str, use_model, tmp_path: Path, capfd
) -> None:
    use_model()
    contents = {"no_utf8": b"a\xff\n", "empty": b"", "tasks": task_data.hellaswag(3).encode()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = {name: tmp_path / name for name in contents}
    assert cli.main(["-m", "m", *flags.format(**paths).split()]) == 1
    out, err = capfd.readouterr()
    assert not re.search(r"\d\t", out)
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and message in last


def test_a_failure_names_the_tasks(use_model, tmp_path: Path, capfd, monkeypatch) -> None:
    use_model()
    table = bigram.table(33, 0)
    table[bigram.encode("z")[0]] = np.nan  # "lazy"

    @contextmanager
    def open_session(*_: object) -> Iterator[forking.Session]:
        yield forking.Session(lambda history: table[history[-1]])

    monkeypatch.setattr(cli, "open_session", open_session)
    path = tmp_path / "tasks"
    path.write_text("0,the _ fox ran,quick,brown,1\n" * 4 + "1,the _ lazy dog,fat,old,2\n")
    assert cli.main(["-m", "m", "-f", str(path), "--winogrande"]) == 1
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 4
    assert "error: task 5 (line 5): logits of row 4 are not finite" in err
