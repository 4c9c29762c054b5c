"""Comparison of two runs, intermediate by intermediate: where do they part?"""

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .contracts import Int32, TapSession
from .errors import EvalError
from .partial import partial_file

# The state of every layer: what it read from the n-gram table, the mixer, the experts, their sum.
DEFAULT_TAPS = (
    "blk.*.ngram_out",
    "blk.*.attn_out",
    "blk.*.ffn_out",
    "blk.*.residual",
    "result_norm",
    "logits",
)
# Largest |difference| over largest |value| that two float32 implementations may show.
DEFAULT_TOLERANCE = 2e-4
TOKENS_KEY = "tokens"

Taps = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class TapRun:
    """Intermediates of one run, in the order in which they were computed.

    Attributes:
        label: where they are from.
        tokens: int32 [n], what was run.
        taps: float32 or int32 [rows, width] by name.

    """

    label: str
    tokens: Int32
    taps: Taps


@dataclass(frozen=True)
class TapDiff:
    """How one intermediate differs.

    Attributes:
        name: which.
        max_diff: largest |a - b|.
        max_value: largest |a|.
        relative: ``max_diff / max_value``; for integers the share of unequal entries. Infinite if
            the shapes differ or if one side is not finite where the other is.
        cosine: of the angle between the two as float64 vectors, NaN for integers.
        note: why there are no numbers, if there are none.

    """

    name: str
    max_diff: float
    max_value: float
    relative: float
    cosine: float
    note: str = ""


@dataclass(frozen=True)
class DiffReport:
    """Outcome of a comparison.

    Attributes:
        taps: one entry per intermediate of both runs, in order of computation.
        only_a, only_b: names that just one of them has.
        first: the first one beyond the tolerance, None if none is.

    """

    taps: list[TapDiff]
    only_a: list[str]
    only_b: list[str]
    first: TapDiff | None

    @property
    def equal(self) -> bool:
        """Whether everything that both have is within the tolerance."""
        return self.first is None


def record(session: TapSession, tokens: Sequence[int] | Int32, label: str = "") -> TapRun:
    """Run tokens int32 [n] in one step and keep the intermediates the session was opened for.

    Raises:
        ImpError: if the step cannot run; its room must be at least n tokens.
        EvalError: if the session keeps no intermediates.

    """
    text = np.ascontiguousarray(tokens, np.int32)
    sequence = session.open()
    try:
        sequence.extend(text, outputs="all")
        taps = {name: np.array(value) for name, value in session.taps().items()}
    finally:
        sequence.close()
    if not taps:
        raise EvalError("no intermediate has a name that matches the patterns")
    return TapRun(label, text, taps)


def save_run(run: TapRun, path: Path) -> None:
    """Store a run as an uncompressed .npz, beside its name first."""
    arrays: dict[str, Any] = {TOKENS_KEY: run.tokens, **run.taps}
    with partial_file(path) as file:
        np.savez(file, **arrays)


def load_run(path: Path) -> TapRun:
    """Read what `save_run` stored.

    Raises:
        EvalError: if the file is no such archive, or an array in it is damaged.
        OSError: if it cannot be read.

    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays: Taps = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, TypeError, AttributeError) as error:
        raise EvalError(f"{path} is not a stored run: {error}") from None
    tokens = arrays.pop(TOKENS_KEY, None)
    if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32 or not arrays:
        raise EvalError(f"{path} is not a stored run: it lacks its tokens or its intermediates")
    return TapRun(str(path), tokens, arrays)


def diff(a: TapRun, b: TapRun, tolerance: float = DEFAULT_TOLERANCE) -> DiffReport:
    """Compare two runs of the same tokens; ``a`` gives the scale and the order.

    Raises:
        EvalError: if the tokens differ or no intermediate has the same name.

    """
    if not np.array_equal(a.tokens, b.tokens):
        raise EvalError(
            f"{a.label} ran {len(a.tokens)} tokens, {b.label} ran {len(b.tokens)}, "
            "and they are not the same"
        )
    shared = [name for name in a.taps if name in b.taps]
    if not shared:
        raise EvalError(f"{a.label} and {b.label} have no intermediate of the same name")
    taps = [_compare(name, a.taps[name], b.taps[name]) for name in shared]
    first = next((tap for tap in taps if not tap.relative <= tolerance), None)
    only_a = [name for name in a.taps if name not in b.taps]
    only_b = [name for name in b.taps if name not in a.taps]
    return DiffReport(taps, only_a, only_b, first)


def _compare(name: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> TapDiff:
    if a.shape != b.shape:
        note = f"shape {list(a.shape)}, the other has {list(b.shape)}"
        return TapDiff(name, math.inf, math.inf, math.inf, math.nan, note)
    if not a.size:
        return TapDiff(name, 0.0, 0.0, 0.0, math.nan, "empty")
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    if not np.issubdtype(a.dtype, np.floating):
        unequal = float(np.mean(a != b))
        return TapDiff(name, float(np.abs(x - y).max()), float(np.abs(x).max()), unequal, math.nan)
    fine = np.isfinite(x) & np.isfinite(y)
    if not fine.all():
        note = f"{int((~fine).sum())} of {x.size} entries are not finite"
        return TapDiff(name, math.inf, math.inf, math.inf, math.nan, note)
    max_diff, max_value = float(np.abs(x - y).max()), float(np.abs(x).max())
    if max_value > 0:
        relative = max_diff / max_value
    else:
        relative = math.inf if max_diff else 0.0
    norms = math.sqrt(float(x @ x) * float(y @ y))
    if norms > 0:
        cosine = float(x @ y) / norms
    else:
        cosine = 1.0 if max_diff == 0 else 0.0
    return TapDiff(name, max_diff, max_value, relative, cosine)
