"""`imp-perplexity`: perplexity, KL divergence and task scores, with llama-perplexity's flags."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from ..eval import (
    KldBase,
    KldOptions,
    KldWindow,
    PerplexityOptions,
    Window,
    kl_divergence,
    perplexity,
)
from ..eval.contracts import Int32
from ..eval.kl_divergence import plan_kld
from ..eval.kld_stats import MIN_COUNT_FOR_STATISTICS
from ..eval.tasks import DEFAULT_PARALLEL
from . import perplexity_lines as lines
from . import perplexity_tasks
from .llama_common import CACHE, COMMON, PLACEMENT, add_command, exit_status, limits
from .llama_flags import FlagError, FlagTable, Meaning, Parsed, flag, without
from .perplexity_input import read_text

if TYPE_CHECKING:
    from ..session import Session
    from ..tokenizer import Tokenizer

_PARALLEL = flag(
    "-np,--parallel N",
    "windows per pass at most (default: those of -b), or endings of tasks at once "
    f"(default: {DEFAULT_PARALLEL})",
    type=int,
)
FLAGS = FlagTable(
    [
        flag("-h,--help,--usage", "print this and exit"),
        flag("--version", "print the version and exit"),
        flag("-m,--model FNAME", "the GGUF model"),
        flag("-f,--file FNAME", "text to evaluate; one newline at its end is dropped"),
        flag("-bf,--binary-file FNAME", "text to evaluate, every byte of it"),
        flag("-p,--prompt PROMPT", "text to evaluate"),
        flag("-e,--escape", r"replace \n, \r, \t, \', \", \\ and \xHH in the text", default=False),
        flag("--no-escape", "keep the text as it is (the default)", store=False, into="escape"),
        flag("-c,--ctx-size N", "tokens per window", type=int, default=512),
        flag(
            "-b,--batch-size N", "tokens per pass; its windows share steps", type=int, default=2048
        ),
        flag("-ub,--ubatch-size N", "tokens per forward pass", type=int, default=512),
        flag("-t,--threads N", "threads, -1 for all cores", type=int, default=-1),
        flag("-tb,--threads-batch N", "threads, goes before -t", type=int),
        _PARALLEL,
        flag("--chunks N", "windows at most, -1 for all", type=int, default=-1),
        flag("--ppl-stride N", "start a window every N tokens", type=int, default=0),
        flag("--ppl-output-type 0|1", "1: a table instead of a list", default="0"),
        flag(
            "--kl-divergence-base,--save-all-logits FNAME",
            "file to write all log-probabilities to, or with --kl-divergence to read them from",
        ),
        flag("--kl-divergence", "compare with the file of --kl-divergence-base"),
        flag("-dev,--device auto|cpu|cuda|none", "where to run; none is cpu", default="auto"),
        *CACHE,
        *PLACEMENT,
        *perplexity_tasks.FLAGS,
        flag(
            "--score-from N",
            "score positions from N of each window on (default: half of -c)",
            type=int,
        ),
        flag("--dump FNAME", "npz file to write every scored position to"),
        *without(COMMON, [_PARALLEL]),
    ]
)
SECTIONS = {
    Meaning.USED: "usage: imp-perplexity -m MODEL -f TEXT [flags]\n",
    Meaning.IGNORED: "Flags of llama.cpp without effect here:\n",
    Meaning.REFUSED: "Flags of llama.cpp that are refused:\n",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: of the process); returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: _run(FLAGS.parse(words)))


def register(app: typer.Typer) -> None:
    """Add the command to ``imp``; it parses its own flags."""
    help = (
        "Perplexity, KL divergence and task scores, with llama-perplexity's flags (-h lists them)."
    )
    add_command(app, "perplexity", main, help)


def _run(parsed: Parsed) -> int:
    if parsed["help"]:
        print(FLAGS.help_text(SECTIONS))
        return 0
    if parsed["version"]:
        print(f"imp-runtime {metadata.version('imp-runtime')}")
        return 0
    for note in parsed.notes:
        _log(f"note: {note}")
    _check(parsed)
    kind = perplexity_tasks.wanted_kind(parsed)
    if kind is not None:
        _run_tasks(parsed, kind)
    elif parsed["kl_divergence"]:
        _run_kl_divergence(parsed)
    else:
        _run_perplexity(parsed)
    return 0


def _check(parsed: Parsed) -> None:
    if parsed["model"] is None:
        raise FlagError("--model is required")
    for key in ("batch_size", "ubatch_size"):
        if parsed[key] < 1:
            name = key.replace("_", "-")
            raise FlagError(f"--{name} is {parsed[key]}, it must be at least 1")
    if parsed["kl_divergence"] and parsed["kl_divergence_base"] is None:
        raise FlagError("--kl-divergence needs the stored run: give it with --kl-divergence-base")
    for key in ("score_from", "dump"):
        if parsed["kl_divergence"] and parsed[key] is not None:
            raise FlagError(f"--kl-divergence and --{key.replace('_', '-')} cannot be combined")


def _run_tasks(parsed: Parsed, kind: perplexity_tasks.Kind) -> None:
    tokenizer = load_tokenizer(parsed["model"])

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=True)

    def open_tasks(n_ctx: int, max_seqs: int) -> "AbstractContextManager[Session]":
        return open_session(parsed, n_ctx, max_seqs)

    perplexity_tasks.run(kind, parsed, encode, open_tasks, _n_threads(parsed), _log)


def _run_perplexity(parsed: Parsed) -> None:
    name = "perplexity_v2" if parsed["ppl_stride"] else "perplexity"
    text = read_text(parsed)
    tokenizer = load_tokenizer(parsed["model"])
    _log(f"{name}: tokenizing the input ..")
    tokens: Int32 = np.asarray(tokenizer.encode(text, add_special=True), np.int32)
    options = PerplexityOptions(
        n_ctx=parsed["ctx_size"],
        n_batch=parsed["batch_size"],
        n_parallel=parsed["parallel"],
        chunks=parsed["chunks"],
        stride=parsed["ppl_stride"],
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        save_logits=_path(parsed["kl_divergence_base"]),
        score_from=parsed["score_from"],
        dump=_path(parsed["dump"]),
        n_threads=_n_threads(parsed),
    )
    plan = options.plan(len(tokens))
    if options.save_logits is not None:
        _log(f"{name}: saving all logits to {options.save_logits}")
    if options.dump is not None:
        _log(f"{name}: saving all scores to {options.dump}")
    if options.stride:
        _log(f"{name}: have {len(tokens)} tokens. Calculation chunk = {plan.n_ctx}")
    _log(
        f"{name}: {'computing' if options.stride else 'calculating perplexity'} over "
        f"{plan.n_chunks} chunks, n_ctx={plan.n_ctx}, batch_size={plan.n_batch}, n_seq={plan.n_seq}"
    )
    passes = lines.Passes(plan, lambda seconds: _log(lines.pass_time(name, seconds, plan)))
    as_table = parsed["ppl_output_type"] == "1"

    def on_window(window: Window) -> None:
        def show() -> None:
            if as_table:
                print(lines.table_row(window, plan, bool(options.stride)), flush=True)
            else:
                print(lines.running(window), end="", flush=True)

        passes.add(window.index, window.seconds, show)

    with open_session(parsed, plan.n_ctx, plan.together(parsed["ubatch_size"])) as session:
        result = perplexity(session, tokens, options, on_window)
    print(flush=True)
    _log(lines.final_estimate(result, options.score_from))
    print(flush=True)
    _log_speed(name, result.n_tokens, result.seconds, result.logits_sha256)


def _run_kl_divergence(parsed: Parsed) -> None:
    name = "kl_divergence"
    base = KldBase(Path(parsed["kl_divergence_base"]))
    tokenizer = load_tokenizer(parsed["model"])
    options = KldOptions(
        n_ctx=parsed["ctx_size"],
        n_batch=parsed["batch_size"],
        n_parallel=parsed["parallel"],
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        n_threads=_n_threads(parsed),
    )
    plan = plan_kld(base, options)
    with open_session(parsed, plan.n_ctx, plan.together(parsed["ubatch_size"])) as session:
        _log(
            f"{name}: computing over {plan.n_chunks} chunks, n_ctx={plan.n_ctx}, "
            f"batch_size={plan.n_batch}, n_seq={plan.n_seq}"
        )

        def show_time(seconds: float) -> None:
            _log(lines.pass_time(name, seconds, plan))
            print(f"\n{lines.CHUNK_HEADER}", flush=True)

        passes = lines.Passes(plan, show_time)

        def on_window(window: KldWindow) -> None:
            row = lines.kld_row(window.index, window.totals)
            passes.add(window.index, window.seconds, lambda: print(row, flush=True))

        result = kl_divergence(session, base, options, on_window)
    print()
    for line in lines.kld_statistics(result):
        print(line)
    print(flush=True)
    if result.totals.count < MIN_COUNT_FOR_STATISTICS:
        _log(
            f"{name}: {result.totals.count} positions are scored, the closing statistics need "
            f"{MIN_COUNT_FOR_STATISTICS}"
        )
    _log_speed(name, result.n_tokens, result.seconds, result.logits_sha256)


def load_tokenizer(model: str) -> "Tokenizer":
    """The tokenizer stored in a GGUF."""
    from ..tokenizer import Tokenizer

    return Tokenizer.from_gguf(model)


@contextmanager
def open_session(parsed: Parsed, n_ctx: int, max_seqs: int = 1) -> "Iterator[Session]":
    """Load the model of the command line for ``max_seqs`` sequences of ``n_ctx`` tokens at a time.

    Prints the settings.
    """
    from ..model import Model
    from ..session import Session

    device = "cpu" if parsed["device"] == "none" else parsed["device"]
    with Model.load(parsed["model"], device=device, limits=limits(parsed)) as model:
        for note in model.notes:
            _log(f"{model.path}: {note}")
        if n_ctx > model.context_length:
            _log(
                f"warning: the model was trained on {model.context_length} tokens, "
                f"the window is {n_ctx}"
            )
        n_threads, n_ubatch = _n_threads(parsed), parsed["ubatch_size"]
        types = {key: parsed[key] for key in ("cache_type_k", "cache_type_v")}
        with Session(
            model,
            n_ctx=n_ctx,
            max_seqs=max_seqs,
            n_threads=n_threads,
            n_ubatch=n_ubatch,
            **types,
        ) as session:
            _log(
                f"system_info: {session.backend} | n_ubatch = {n_ubatch} | "
                f"kv cache {' '.join(types.values())}"
            )
            yield session


def _n_threads(parsed: Parsed) -> int:
    wanted: int = parsed["threads"] if parsed["threads_batch"] is None else parsed["threads_batch"]
    return wanted if wanted > 0 else len(os.sched_getaffinity(0))


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _log_speed(name: str, n_tokens: int, seconds: float, digest: str) -> None:
    _log(f"{name}: {n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.2f} tokens/s")
    _log(f"{name}: sha256 of the last logits = {digest[:16]}")


def _log(*words: Any) -> None:
    print(*words, file=sys.stderr, flush=True)
