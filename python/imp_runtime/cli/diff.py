"""`imp diff A B`: run the same tokens through two models and find the first layer that differs."""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ..errors import ImpError
from ..eval import EvalError, TapRun, diff, load_run, record, save_run
from ..eval.contracts import Int32
from ..eval.diff import DEFAULT_TAPS, DEFAULT_TOLERANCE, DiffReport

EQUAL, DIFFERENT, FAILED = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the command to ``imp``."""

    @app.command("diff")
    def command(
        a: Annotated[Path, typer.Argument(help="GGUF model or stored run (.npz)")],
        b: Annotated[
            Path | None, typer.Argument(help="the one to compare; may be left out with --save")
        ] = None,
        prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="text to run")] = None,
        file: Annotated[Path | None, typer.Option("-f", "--file", help="text file to run")] = None,
        tokens: Annotated[str | None, typer.Option(help="token ids to run: 1,2,3")] = None,
        taps: Annotated[
            list[str] | None, typer.Option(help="intermediates: a name with * and ?; repeatable")
        ] = None,
        tolerance: Annotated[
            float, typer.Option(help="largest |difference| over largest |value|", min=0)
        ] = DEFAULT_TOLERANCE,
        save: Annotated[Path | None, typer.Option(help="store A's run here (.npz)")] = None,
        device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
        threads: Annotated[int, typer.Option("-t", "--threads", help="0: all cores", min=0)] = 0,
    ) -> None:
        """Compare named intermediates of two runs; tells the first one that differs.

        Exit status: 0 equal within the tolerance, 1 different, 2 something failed.
        """
        try:
            runs = _Runs(prompt, file, tokens, tuple(taps or DEFAULT_TAPS), device, threads)
            raise typer.Exit(_compare(runs, a, b, save, tolerance))
        except (ImpError, OSError, MemoryError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(FAILED) from None


def _compare(runs: "_Runs", a: Path, b: Path | None, save: Path | None, tolerance: float) -> int:
    if b is None and save is None:
        raise EvalError("a second model or stored run is needed, or --save")
    paths = [a] if b is None else [a, b]
    stored = {path: load_run(path) for path in paths if path.suffix == ".npz"}
    ids = runs.tokens([path for path in paths if path not in stored], list(stored.values()))
    first = stored[a] if a in stored else runs.run(a, ids)
    if save is not None:
        save_run(first, save)
        print(f"{len(first.taps)} intermediates of {len(ids)} tokens stored in {save}")
    if b is None:
        return EQUAL
    report = diff(first, stored[b] if b in stored else runs.run(b, ids), tolerance)
    print_report(report, str(a), str(b), tolerance)
    return EQUAL if report.equal else DIFFERENT


class _Runs:
    """The text and the way to run it, as the command line has them."""

    def __init__(
        self,
        prompt: str | None,
        file: Path | None,
        ids: str | None,
        taps: tuple[str, ...],
        device: str,
        threads: int,
    ) -> None:
        self.prompt, self.file, self.ids = prompt, file, ids
        self.taps, self.device, self.threads = taps, device, threads

    def tokens(self, models: list[Path], stored: list[TapRun]) -> Int32:
        """Token ids int32 [n]: of the command line, or of a stored run if it has none."""
        given = sum(value is not None for value in (self.prompt, self.file, self.ids))
        if given > 1 or (given == 0 and not stored):
            raise EvalError(f"one text is needed (-p, -f or --tokens), {given} are given")
        if given == 0:
            return stored[0].tokens
        if self.ids is not None:
            try:
                ids = [int(word) for word in self.ids.split(",")]
                return np.array(ids, np.int32)
            except (ValueError, OverflowError):
                raise EvalError(f"--tokens is {self.ids!r}, it must be ids like 1,2,3") from None
        if self.prompt is not None:
            text = self.prompt
        else:
            assert self.file is not None
            try:
                text = self.file.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise EvalError(f"{self.file} is not UTF-8 at byte {error.start}") from None
        if not models:
            raise EvalError("a text needs a model's tokenizer, both runs are stored")
        return tokenize(models[0], text)

    def run(self, path: Path, ids: Int32) -> TapRun:
        """Load a model and run the tokens in one step."""
        if not len(ids):
            raise EvalError("the text has 0 tokens, at least 1 is needed")
        return run_model(path, ids, self.taps, self.device, self.threads)


def tokenize(path: Path, text: str) -> Int32:
    """Ids int32 [n] of a text, by the tokenizer of a GGUF."""
    from ..tokenizer import Tokenizer

    return np.asarray(Tokenizer.from_gguf(path).encode(text), np.int32)


def run_model(path: Path, ids: Int32, taps: tuple[str, ...], device: str, threads: int) -> TapRun:
    """Load a GGUF, run the tokens in one step, unload it."""
    from ..model import Model
    from ..session import Session

    with (
        Model.load(path, device=device) as model,
        Session(
            model, n_ctx=len(ids), n_threads=threads or None, n_ubatch=len(ids), taps=taps
        ) as session,
    ):
        print(f"{path}: {session.backend}", file=sys.stderr)
        return record(session, ids, str(path))


def print_report(report: DiffReport, a: str, b: str, tolerance: float) -> None:
    """The table of all intermediates and the verdict, on stdout."""
    width = max(len(tap.name) for tap in report.taps)
    print(f"{'tap':{width}}  {'max |diff|':>11}  {'max |value|':>11}  {'relative':>9}  cosine")
    for tap in report.taps:
        mark = "" if tap.relative <= tolerance else "  <- differs"
        numbers = tap.note or (
            f"{tap.max_diff:11.4g}  {tap.max_value:11.4g}  {tap.relative:9.2e}  {tap.cosine:.8f}"
        )
        print(f"{tap.name:{width}}  {numbers}{mark}")
    for label, names in ((a, report.only_a), (b, report.only_b)):
        if names:
            print(f"only in {label}: {', '.join(names)}")
    if report.first is None:
        print(f"equal: {len(report.taps)} taps within {tolerance:g}")
    else:
        first = report.first
        reason = first.note or f"relative {first.relative:.2e} > {tolerance:g}"
        print(f"first difference: {first.name} ({reason})")
