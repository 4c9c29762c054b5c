"""The shipped model on the CPU and on CUDA: perplexity of a text, log-probabilities, speeds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from imp_runtime.convert import ConvertOptions, convert
from imp_runtime.model import Model
from imp_runtime.session import Session
from imp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
WINDOW, WINDOWS = 512, 8


def nlls(model: Model, tokens: np.ndarray) -> np.ndarray:
    with Session(model, n_ctx=WINDOW) as session:
        out = []
        for window in tokens.reshape(-1, WINDOW):
            with session.open() as seq:
                out.append(seq.score(window))
    return np.concatenate(out)


def decode_speed(model: Model, tokens: np.ndarray, n: int, graphs: bool) -> float:
    """Tokens per second, one sequence."""
    with Session(model, n_ctx=WINDOW, graphs=graphs) as session, session.open() as seq:
        seq.extend(tokens[:64])
        for t in tokens[64:72]:
            seq.extend([t])
        begin = time.perf_counter()
        for t in tokens[72 : 72 + n]:
            seq.extend([t])
        return n / (time.perf_counter() - begin)


def estimate(model: Path, text: Path, device: str) -> str:
    """imp-perplexity's result."""
    code = "import sys; from imp_runtime.cli.perplexity import main; sys.exit(main())"
    args = ["-m", str(model), "-f", str(text), "-c", str(WINDOW), "--chunks", str(WINDOWS)]
    done = subprocess.run(
        [sys.executable, "-c", code, *args, "-dev", device],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (done.stdout + done.stderr).splitlines()
    return next(line for line in lines if line.startswith("Final estimate"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prose.gguf"
        convert(ROOT / "models" / "prose-nvfp4", path, ConvertOptions())
        models = {d: Model.load(path, device=d) for d in ("cpu", "cuda")}
        tokenizer = Tokenizer(models["cpu"].keys)
        text = ROOT / "models" / "heldout_austen.txt"
        for device in models:
            print(f"imp-perplexity -dev {device}: {estimate(path, text, device)}", flush=True)
        ids = tokenizer.encode(text.read_text())
        tokens = np.array(ids[: WINDOW * WINDOWS], np.int32)
        scores = {d: nlls(m, tokens) for d, m in models.items()}
        worst = float(np.abs(scores["cpu"] - scores["cuda"]).max())
        print(f"log-probabilities differ by at most: {worst:.2e}")
        for graphs in (False, True):
            speed = decode_speed(models["cuda"], tokens, 200, graphs)
            print(f"decode, {'replayed' if graphs else 'eager'}: {speed:.0f} tokens/s")
        print(f"decode, cpu: {decode_speed(models['cpu'], tokens, 50, False):.0f} tokens/s")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
