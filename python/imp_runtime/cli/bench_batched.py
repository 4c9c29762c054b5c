"""imp-bench with -npp, -ntg or -npl: several sequences at once."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from . import bench_common as common
from .bench_flags import BATCHED_FLAGS, numbers
from .llama_flags import Parsed

if TYPE_CHECKING:
    from ..bench import (
        BatchedCase,
        BatchedMisfit,
        BatchedOptions,
        BatchedRow,
        Ceiling,
        TokenSource,
    )
    from ..bench.extra_text import Extra
    from ..model import Model


def run_batched(parsed: Parsed) -> int:
    """Measure and print; the exit status is 1 if a row failed that should have fit."""
    for note in parsed.notes:
        common.log(f"note: {note}")
    (path,) = common.model_names(parsed)
    cases = _cases(parsed)
    for key in ("batch_size", "ubatch_size", "reps"):
        common.at_least(parsed, key, 1)
    common.at_least(parsed, "seed", 0)
    common.at_least(parsed, "ctx_size", 0)
    with common.load(path, parsed) as model:
        return _run(model, cases, _options(parsed, model), parsed)


def _cases(parsed: Parsed) -> list[BatchedCase]:
    from ..bench import BatchedCase

    lists = []
    for name, least in zip(BATCHED_FLAGS, (0, 0, 1), strict=True):
        given = parsed[name.lstrip("-")]
        if given is None:
            common.log(f"no rows: {name} is not given")
        lists.append(numbers(name, given, least, ranges=False) if given else [])
    return [
        BatchedCase(pp, tg, pl, parsed["pps"], parsed["kv_unified"])
        for pp, tg, pl in product(*lists)
    ]


def _options(parsed: Parsed, model: Model) -> BatchedOptions:
    from ..bench import BatchedOptions

    if parsed["threads_batch"] is not None and parsed["threads_batch"] != parsed["threads"]:
        common.log("note: -tb goes before -t: prompts and generation use the same threads")
    wanted = parsed["threads"] if parsed["threads_batch"] is None else parsed["threads_batch"]
    return BatchedOptions(
        n_kv_max=parsed["ctx_size"] or model.context_length,
        n_batch=parsed["batch_size"],
        n_ubatch=parsed["ubatch_size"],
        n_threads=wanted if wanted > 0 else common.all_threads(),
        separate=parsed["tgs"],
        reps=parsed["reps"],
        warmup=not parsed["no_warmup"],
        type_k=parsed["cache_type_k"],
        type_v=parsed["cache_type_v"],
    )


def _run(model: Model, cases: list[BatchedCase], options: BatchedOptions, parsed: Parsed) -> int:
    from ..bench import BatchedMisfit, batched_bench
    from ..bench import batched_text as text
    from ..bench.extra_text import extra_fields, extra_lines

    tokens = common.token_source(model, parsed)
    extra, table = parsed["extra"], parsed["output_format"] == "md"
    ceilings = common.measure_ceilings(parsed, [options.n_threads])
    if table:
        print(
            f"\n{text.settings(options, parsed['pps'])}\n\n{text.HEADER}\n{text.RULE}", flush=True
        )
    about = common.describe(model)
    lines: list[str] = []
    failed = False
    for result in batched_bench(model, cases, options, tokens):
        if isinstance(result, BatchedMisfit):
            failed = failed or not result.expected
            common.log(f"{result.case.name}: {result.reason}")
            if extra:
                print(_note(result, options, table), flush=True)
            continue
        fields: dict[str, Any] = {}
        if extra:
            measured = _extra(model, result, options, tokens, ceilings)
            fields = extra_fields(measured, about)
            lines += ["", *extra_lines(result.case.name, measured, about)]
        row = text.table_row(result) if table else text.json_row(result, options, fields)
        print(row, flush=True)
        common.log_experts(result.case.name, result.experts)
    if table and lines:
        print(*lines, sep="\n")
    print(flush=True)
    return int(failed)


def _note(misfit: BatchedMisfit, options: BatchedOptions, table: bool) -> str:
    from ..bench import batched_text as text

    return text.note_row(misfit) if table else text.json_note(misfit, options)


def _extra(
    model: Model,
    row: BatchedRow,
    options: BatchedOptions,
    tokens: TokenSource,
    ceilings: dict[int, Ceiling],
) -> Extra:
    from ..bench import Workload, samples

    case = row.case
    generated = case.pl * case.tg
    speeds = {
        "prompt": [samples.rate(case.prompt_tokens, s) for s in row.prompt_seconds],
        "generation": [samples.rate(generated, s) for s in row.generate_seconds],
    }
    work = Workload(
        context=case.pp,
        n_gen=case.tg,
        sequences=1 if options.separate else case.pl,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_threads=options.n_threads,
        reps=options.reps,
        type_k=options.type_k,
        type_v=options.type_v,
    )
    return common.measure_extra(model, work, tokens, ceilings, speeds, row.speed_pp)
