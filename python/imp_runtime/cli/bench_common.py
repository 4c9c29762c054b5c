"""What both modes of imp-bench do: load, choose tokens, measure the extras."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ImpError
from .llama_common import limits
from .llama_flags import FlagError, Parsed
from .text import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..bench import Ceiling, TokenSource, Workload
    from ..bench.extra_text import Extra
    from ..gguf import Description
    from ..model import Model
    from ..stats import ExpertCounts


SYNTHETIC = "synthetic "
"""Starts the name of a model that --synthetic makes."""


def log(*words: object) -> None:
    """A line on stderr."""
    print("imp-bench:", *words, file=sys.stderr, flush=True)


def log_experts(name: str, experts: ExpertCounts | None) -> None:
    """What the cache did during a row, if there is one; llama.cpp's tables have no room for it."""
    if experts is not None:
        log(f"{name}: experts: {experts}")


def at_least(parsed: Parsed, key: str, least: int) -> int:
    """A number of the command line. Raises FlagError if it is too small."""
    value: int = parsed[key]
    if value < least:
        name = key.replace("_", "-")
        raise FlagError(f"--{name} is {value}, it must be at least {least}")
    return value


def all_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def device(parsed: Parsed) -> str:
    """Name of the device as Model.load takes it."""
    return "cpu" if parsed["device"] == "none" else str(parsed["device"])


def model_names(parsed: Parsed) -> list[str]:
    """Paths of -m, or the model of --synthetic.

    Raises:
        FlagError: neither or both are given, or what only --synthetic takes for a file.
    """
    given = parsed["model"]
    if given is not None and parsed["synthetic"] is not None:
        raise FlagError("--model and --synthetic are two models, one is needed")
    if given is None:
        if parsed["synthetic"] is None:
            raise FlagError("--model is required, or --synthetic")
        return [SYNTHETIC + parsed["synthetic"]]
    if parsed["routing"] is not None:
        raise FlagError("--routing is for --synthetic, a model's own router chooses its experts")
    if parsed["ngram_file"] is not None:
        raise FlagError("--ngram-file is for --synthetic, a model has its own table")
    return [given] if isinstance(given, str) else ",".join(given).split(",")


def load(path: str, parsed: Parsed) -> Model:
    """A model of model_names(); says what its loader had to decide."""
    from ..model import Model

    options: dict[str, Any] = {"device": device(parsed), "limits": limits(parsed)}
    if path.startswith(SYNTHETIC):
        options["routing"] = parsed["routing"] or "prose"
        options["table_file"] = parsed["ngram_file"]
        model = Model.synthetic(path.removeprefix(SYNTHETIC), **options)
    else:
        model = Model.load(path, **options)
    for note in model.notes:
        log(f"{model.path}: {note}")
    return model


def describe(model: Model) -> Description:
    """Sizes and keys of a loaded model."""
    from ..gguf import Support, describe_open

    return describe_open(model.core.gguf, model.path, Support(True, "", tuple(model.notes)))


def token_source(model: Model, parsed: Parsed) -> TokenSource:
    """Text or random tokens, named on stderr.

    Raises:
        ImpError: the text cannot be read or is empty.
    """
    from ..bench import RandomTokens, TextTokens
    from ..tokenizer import Tokenizer

    source: TokenSource
    if parsed["text"] is not None:
        text = read_file(Path(parsed["text"]))
        ids = Tokenizer.from_gguf(model.path).encode(text, add_special=True)
        source = TextTokens.of(ids, parsed["text"])
    else:
        bos = model.keys.get("tokenizer.ggml.bos_token_id")
        add_bos = model.keys.get("tokenizer.ggml.add_bos_token") is True
        source = RandomTokens(
            model.vocab_size, at_least(parsed, "seed", 0), int(bos) if add_bos and bos else None
        )
    log(f"tokens: {source.label}")
    return source


def measure_ceilings(parsed: Parsed, threads: Iterable[int]) -> dict[int, Ceiling]:
    """Number of threads -> what the processor can do with them, described on stderr.

    Empty without --extra, or if the processor does not run the model.
    """
    from ..bench import measure_ceiling

    out: dict[int, Ceiling] = {}
    if not parsed["extra"] or device(parsed) == "cuda":
        return out
    for n_threads in sorted(set(threads)):
        out[n_threads] = measure_ceiling(n_threads)
        log(out[n_threads].describe())
    return out


def measure_extra(
    model: Model,
    work: Workload,
    tokens: TokenSource,
    ceilings: Mapping[int, Ceiling],
    speeds: Mapping[str, Sequence[float]],
    prompt_ts: float,
) -> Extra:
    """Everything beside a row; what does not fit becomes a note."""
    from ..bench import Decode, Profile, measure_decode, profile
    from ..bench.extra_text import Extra
    from ..bench.machine import peak_rss_bytes

    notes: list[str] = []
    decode: Decode | None = None
    ops: Profile | None = None
    try:
        decode = measure_decode(model, work, tokens)
        if decode is None and work.n_gen:
            notes.append(
                f"no difference of two lengths: {work.n_gen} tokens are too few, or noise is larger"
            )
    except ImpError as error:
        notes.append(f"no difference of two lengths: {error}")
    try:
        ops = profile(model, work, tokens)
    except ImpError as error:
        notes.append(f"no op times: {error}")
    return Extra(
        tokens.label,
        speeds,
        prompt_ts,
        decode,
        ops,
        ceilings.get(work.n_threads),
        peak_rss_bytes(),
        "; ".join(notes),
        model.routed_by,
    )
