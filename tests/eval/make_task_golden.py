"""Writes data/llama_tasks.json: what llama-perplexity prints for tasks of the bigram model.

usage: make_task_golden.py PATH_OF_LLAMA_PERPLEXITY
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.eval import bigram, task_data

DATA = Path(__file__).parent / "data"
ATTEMPTS = 20  # llama.cpp loses its last lines at random
TIMES_AND_LEVELS = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} [IWE] ")
LOGGED = re.compile(r"(?:hellaswag|winogrande|multiple_choice)_score *:.*|(?:Final|Random).*")

# name: add_bos, tasks in the file, arguments ({file} is -bf: with -f llama.cpp drops the last line
# of a Winogrande file), rows
CASES = {
    "hellaswag": (True, 60, "--hellaswag", 60),
    "hellaswag-some": (False, 60, "--hellaswag --hellaswag-tasks 13", 13),
    "winogrande": (True, 104, "--winogrande", 104),
    "winogrande-some": (False, 104, "--winogrande --winogrande-tasks 21", 21),
    "multiple-choice": (False, 110, "--multiple-choice", 110),
    "multiple-choice-some": (True, 110, "--multiple-choice --multiple-choice-tasks 17", 17),
}


def write_tasks(path: Path, name: str, n_tasks: int) -> None:
    if name.startswith("multiple"):
        path.write_bytes(task_data.multiple_choice(n_tasks))
    else:
        make = task_data.hellaswag if name.startswith("hella") else task_data.winogrande
        path.write_text(make(n_tasks))


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        model, file = f"{folder}/model.gguf", Path(folder, "tasks")
        for name, (add_bos, n_tasks, arguments, rows) in CASES.items():
            bigram.write_gguf(model, bigram.table(33, 0), add_bos)
            write_tasks(file, name, n_tasks)
            for _ in range(ATTEMPTS):
                run = subprocess.run(
                    [sys.argv[1], "-m", model, "-t", "1", "-bf", str(file), *arguments.split()],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                complete = re.search(rf"^{rows}\t.*\n\n\n", run.stdout, re.M)
                log = [found[0].strip() for found in LOGGED.finditer(
                    TIMES_AND_LEVELS.sub("\n", run.stderr))]  # fmt: skip
                if complete and (name != "winogrande" or "Final" in log[-1]):
                    break
            else:
                raise SystemExit(f"{name}: never saw its end\n{run.stdout}{run.stderr}")
            golden[name] = {
                "add_bos": add_bos,
                "n_tasks": n_tasks,
                "arguments": arguments,
                "stdout": run.stdout,
                "log": log,
            }
    (DATA / "llama_tasks.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
