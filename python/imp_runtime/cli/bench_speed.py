"""imp-bench without llama-batched-bench's lists: one sequence, as llama-bench measures it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import ImpError
from . import bench_common as common
from .bench_flags import cache_types, numbers, pairs
from .llama_flags import FlagError, Parsed

if TYPE_CHECKING:
    from ..bench import Ceiling, SpeedCase, SpeedOptions, SpeedRow, TokenSource
    from ..bench.extra_text import Extra
    from ..bench.speed_text import Format
    from ..model import Model

DEFAULTS = {
    "n_prompt": 512,
    "n_gen": 128,
    "n_depth": 0,
    "batch_size": 2048,
    "ubatch_size": 512,
}
CACHE_TYPE = "f32"
MAX_CASES = 10_000


def run_speed(parsed: Parsed) -> int:
    """Measure and print; the exit status is 1 if a row failed."""
    for note in parsed.notes:
        common.log(f"note: {note}")
    paths = common.model_names(parsed)
    common.at_least(parsed, "repetitions", 1)
    common.at_least(parsed, "delay", 0)
    common.at_least(parsed, "seed", 0)
    lists = {name: _list(parsed, name) for name in (*DEFAULTS, "threads")}
    types = {
        name: cache_types("--" + name.replace("_", "-"), parsed[name] or [CACHE_TYPE])
        for name in ("cache_type_k", "cache_type_v")
    }
    cases = _cases(lists, types, pairs("-pg", parsed["pg"] or []))
    outputs = _Outputs(parsed, lists, types)
    outputs.write(lambda f: f.header())
    ceilings = common.measure_ceilings(parsed, lists["threads"])
    failed = False
    for path in paths:
        try:
            model = common.load(path, parsed)
        except ImpError as error:
            raise ImpError(f"failed to load model '{path}': {error}") from error
        with model:
            failed = _run_model(model, path, cases, parsed, outputs, ceilings) or failed
    outputs.write(lambda f: f.footer())
    outputs.write_lines()
    return int(failed)


def _list(parsed: Parsed, key: str) -> list[int]:
    name = "--" + key.replace("_", "-")
    least = 0 if key in ("n_prompt", "n_gen", "n_depth") else 1
    if parsed[key] is not None:
        return numbers(name, parsed[key], least)
    return [DEFAULTS.get(key) or 0] if key != "threads" else [common.all_threads()]


def _cases(
    lists: dict[str, list[int]], types: dict[str, list[str]], both: list[tuple[int, int]]
) -> list[SpeedCase]:
    """All combinations, in llama-bench's order. Raises FlagError for too many."""
    from ..bench import Setup, SpeedCase

    tests = [(n, 0) for n in lists["n_prompt"]] + [(0, n) for n in lists["n_gen"]] + both
    tests = [test for test in tests if test != (0, 0)]
    if not tests:
        common.log("no tests: -p, -n and -pg give no tokens")
    order: list[Sequence[Any]] = [
        lists["batch_size"],
        lists["ubatch_size"],
        types["cache_type_k"],
        types["cache_type_v"],
        lists["threads"],
        lists["n_depth"],
    ]
    n_cases = len(tests) * math.prod(len(values) for values in order)
    if n_cases > MAX_CASES:
        raise FlagError(f"the lists make {n_cases} tests, at most {MAX_CASES} are run")
    return [
        SpeedCase(n_prompt, n_gen, Setup(depth, batch, ubatch, threads, type_k, type_v))
        for batch, ubatch, type_k, type_v, threads, depth in product(*order)
        for n_prompt, n_gen in tests
    ]


class _Outputs:
    """The formats of -o and -oe with their streams."""

    def __init__(self, parsed: Parsed, lists: dict[str, list[int]], types: dict[str, list[str]]):
        from ..bench.extra_text import EXTRA_FIELDS
        from ..bench.speed_text import make_format

        extra = EXTRA_FIELDS if parsed["extra"] else {}
        self._names = [parsed["output"], parsed["output_err"]]
        self._formats: list[tuple[Format, TextIO]] = [
            (make_format(name, _columns(parsed, lists, types), extra), stream)
            for name, stream in zip(self._names, (sys.stdout, sys.stderr), strict=True)
            if name != "none"
        ]
        self.lines: list[str] = []
        """What tables have no room for."""

    def write(self, text: Callable[[Format], str]) -> None:
        """Write what `text` makes of each format."""
        for format_, stream in self._formats:
            stream.write(text(format_))
            stream.flush()

    def write_lines(self) -> None:
        """Under the table, if there is one; other formats have it all in their fields."""
        if self.lines and "md" in self._names:
            stream = sys.stdout if self._names[0] == "md" else sys.stderr
            stream.write("\n" + "\n".join(self.lines) + "\n")


def _columns(parsed: Parsed, lists: dict[str, list[int]], types: dict[str, list[str]]) -> list[str]:
    """Fields of the table that llama-bench shows for these flags."""
    on_gpu = common.device(parsed) == "cuda"
    columns = ["n_gpu_layers"] if on_gpu else ["n_threads"]
    if on_gpu and "threads" in parsed.given:
        columns.append("n_threads")
    for column, key in (("n_batch", "batch_size"), ("n_ubatch", "ubatch_size")):
        if lists[key] != [DEFAULTS[key]]:
            columns.append(column)
    for column, key in (("type_k", "cache_type_k"), ("type_v", "cache_type_v")):
        if types[key] != [CACHE_TYPE]:
            columns.append(column)
    return columns + (["devices"] if parsed["device"] != "auto" else [])


def _run_model(
    model: Model,
    path: str,
    cases: list[SpeedCase],
    parsed: Parsed,
    outputs: _Outputs,
    ceilings: dict[int, Ceiling],
) -> bool:
    """Returns whether a row failed."""
    from ..bench import SpeedMisfit, SpeedOptions, speed_bench
    from ..bench.extra_text import extra_fields, extra_lines
    from ..bench.speed_fields import ModelFacts

    about = common.describe(model)
    facts = ModelFacts.of(path, about, model.device, parsed["device"])
    tokens = common.token_source(model, parsed)
    options = SpeedOptions(parsed["repetitions"], not parsed["no_warmup"], parsed["delay"])

    def progress(index: int, what: str) -> None:
        if parsed["progress"]:
            common.log(f"benchmark {index + 1}/{len(cases)}: {what}")

    def write_row(row: SpeedRow) -> None:
        fields: dict[str, Any] = {}
        if parsed["extra"]:
            extra = _extra(model, row, options, tokens, ceilings)
            fields = extra_fields(extra, about)
            outputs.lines += extra_lines(row.case.name, extra, about)
        outputs.write(lambda f: f.row(row, facts, fields))
        common.log_experts(row.case.name, row.experts)

    def write_misfit(misfit: SpeedMisfit) -> None:
        common.log(f"{misfit.case.name}: {misfit.reason}")
        if parsed["extra"]:
            outputs.write(lambda f: f.note(misfit))

    failed = False
    for result in speed_bench(model, cases, options, tokens, progress):
        if isinstance(result, SpeedMisfit):
            failed = True
            write_misfit(result)
        else:
            write_row(result)
    return failed


def _extra(
    model: Model,
    row: SpeedRow,
    options: SpeedOptions,
    tokens: TokenSource,
    ceilings: dict[int, Ceiling],
) -> Extra:
    from ..bench import Workload, samples

    case, setup = row.case, row.case.setup
    work = Workload(
        context=setup.n_depth + case.n_prompt,
        n_gen=case.n_gen,
        sequences=1,
        n_batch=setup.n_batch,
        n_ubatch=setup.n_ubatch,
        n_threads=setup.n_threads,
        reps=options.reps,
        type_k=setup.type_k,
        type_v=setup.type_v,
    )
    prompt_ts = 0.0 if case.n_gen else samples.median(row.samples_ts)
    return common.measure_extra(model, work, tokens, ceilings, {"speed": row.samples_ts}, prompt_ts)
