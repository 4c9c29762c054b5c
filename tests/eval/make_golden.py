"""Writes data/: what llama-perplexity prints and stores for the bigram models.

usage: make_golden.py PATH_OF_LLAMA_PERPLEXITY
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.eval import bigram

DATA = Path(__file__).parent / "data"
ATTEMPTS = 20  # llama.cpp loses its last lines at random

# A strided window is 256 tokens and its text two windows at least.
# name: vocabulary, variant, add_bos, how often the text is repeated, arguments,
# what a line near the end of a whole run matches
CASES = {
    "plain": (33, 0, False, 1, "-c 16 -b 64", r"Final estimate"),
    "table": (33, 0, False, 1, "-c 16 -b 64 --ppl-output-type 1", r"Final estimate"),
    "bos": (33, 1, True, 1, "-c 16 -b 48 --chunks 7", r"Final estimate"),
    "odd": (34, 0, False, 1, "-c 21 -b 5", r"Final estimate"),
    "smallest": (34, 0, True, 1, "-c 3 -b 1 --chunks 4", r"Final estimate"),
    "strided": (33, 0, True, 3, "-c 16 -b 16 --ppl-stride 64", r"\[9\][\d.]+,"),
    "strided-table": (
        33, 0, False, 3, "-c 16 -b 16 --ppl-stride 100 --ppl-output-type 1", r"\s500  [\d.]+\n",
    ),
    "base-33": (33, 0, False, 1, "-c 16 -b 64 --kl-divergence-base {base}", "Final"),
    "base-34": (
        34, 0, True, 1, "-c 13 -b 13 --chunks 3 --kl-divergence-base {base}", "Final",
    ),
    "kld-33": (
        33, 1, False, 0, "-c 16 -b 64 --kl-divergence --kl-divergence-base {base}", "Same top p:",
    ),
    "kld-34": (
        34, 1, True, 0, "-c 16 -b 64 --kl-divergence --kl-divergence-base {base}", "\n   3  ",
    ),
}  # fmt: skip


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (n_vocab, variant, add_bos, repeats, arguments, last) in CASES.items():
            model = f"{folder}/model.gguf"
            bigram.write_gguf(model, bigram.table(n_vocab, variant), add_bos)
            words = arguments.format(base=DATA / f"{n_vocab}.kld").split()
            if repeats:
                Path(folder, "text").write_text(bigram.WORDS * repeats)
                words += ["-f", f"{folder}/text"]
            for _ in range(ATTEMPTS):
                run = subprocess.run(
                    [sys.argv[1], "-m", model, "-t", "1", *words],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                if re.search(last, run.stdout + run.stderr):
                    break
            else:
                raise SystemExit(f"{name}: never saw {last}")
            final = re.search("Final estimate.*", run.stderr)
            golden[name] = {
                "n_vocab": n_vocab,
                "variant": variant,
                "add_bos": add_bos,
                "repeats": repeats,
                "arguments": arguments,
                "stdout": run.stdout.removeprefix("0.00 minutes\n"),
                "final": final[0] if final else None,
            }
    (DATA / "llama_perplexity.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
