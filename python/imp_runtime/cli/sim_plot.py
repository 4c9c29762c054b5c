"""Hit curves as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from imp_runtime.errors import ImpError
from imp_runtime.expert_sim import Point


def need_plot() -> None:
    """Raises ImpError if there is no matplotlib."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ImpError("--plot needs matplotlib: pip install 'imp-runtime[plot]'") from None


def save_plot(path: Path, runs: Sequence[tuple[str, Sequence[Point]]]) -> None:
    """Write a PNG: hit rate over experts a layer, a line for each policy and a panel for each run.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(runs), 4.5), layout="constrained")
    for panel, (title, points) in enumerate(runs, 1):
        axes = figure.add_subplot(1, len(runs), panel)
        for policy in dict.fromkeys(p.policy for p in points):
            line = sorted((p.per_layer, p.hit_rate) for p in points if p.policy == policy)
            axes.plot([x for x, _ in line], [y for _, y in line], marker="o", label=policy)
        axes.set(title=title, xlabel="experts a layer", ylabel="hit rate", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
