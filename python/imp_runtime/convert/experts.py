"""Routed experts of one layer: stacked in one tensor, or one by one in any scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from imp_runtime.convert.config import ModelConfig
from imp_runtime.convert.forms import PLAIN_FORMS
from imp_runtime.convert.schemes import Source, Sources
from imp_runtime.convert.views import Gathered, View, as_values

MAX_LISTED_EXPERTS = 8  # ids that a message names


@dataclass(frozen=True)
class ExpertSource:
    """One projection of all experts; `cut` takes the rows of each out of the sources' views."""

    sources: tuple[Source, ...]
    cut: Callable[[list[View]], View]

    @property
    def schemes(self) -> tuple[str, ...]:
        """The distinct schemes of the experts."""
        return tuple(dict.fromkeys(s.scheme for s in self.sources))

    @property
    def is_nvfp4(self) -> bool:
        """Whether every expert can move without being decoded."""
        return all(s.is_nvfp4 for s in self.sources)

    @property
    def is_plain(self) -> bool:
        """Whether no expert is quantised."""
        return all(scheme in PLAIN_FORMS for scheme in self.schemes)

    def native(self) -> View:
        """Rows as stored; all sources have to share one form."""
        return self.cut([s.native for s in self.sources])

    def values(self) -> View:
        """Rows with every scale applied."""
        if self.is_plain and len(self.schemes) == 1:
            return self.native()
        return self.cut([as_values(s.values()) for s in self.sources])


def _projection(spec: Any) -> str:
    return str(spec.name).rsplit("ffn_", 1)[1].removesuffix("_exps.weight")


def _stacked_module(prefix: str, projection: str) -> str:
    return f"{prefix}mlp.experts.{'down_proj' if projection == 'down' else 'gate_up_proj'}"


def expert_modules(sources: Sources, prefix: str, spec: Any, config: ModelConfig) -> list[str]:
    """The modules of one projection: the stacked one if it is there, otherwise one per expert."""
    projection = _projection(spec)
    stacked = _stacked_module(prefix, projection)
    if sources.has(stacked):
        return [stacked]
    return [f"{prefix}mlp.experts.{e}.{projection}_proj" for e in range(config.experts)]


def find_experts(
    sources: Sources, prefix: str, spec: Any, config: ModelConfig
) -> ExpertSource | None:
    """One projection of all experts of a layer; None (and problems) if some are unusable."""
    cols, rows, count = spec.dims
    projection = _projection(spec)
    modules = expert_modules(sources, prefix, spec, config)
    if modules[0] == _stacked_module(prefix, projection):
        parts = 1 if projection == "down" else 2  # gate rows, then up rows, in each expert
        source = sources.find(modules[0], (count, parts * rows, cols))
        if source is None:
            return None
        first = rows if projection == "up" else 0

        def cut(views: list[View]) -> View:
            return Gathered([(views[0], e * parts * rows + first, rows) for e in range(count)])

        return ExpertSource((source,), cut)
    missing = [e for e, module in enumerate(modules) if not sources.has(module)]
    for e in missing:
        sources.give_up(modules[e])
    if missing:
        ids = ", ".join(map(str, missing[:MAX_LISTED_EXPERTS]))
        sources.problems.add(
            f"{prefix}mlp.experts: {len(missing)} of {count} experts lack {projection}_proj: {ids}"
            f"{', ...' if len(missing) > MAX_LISTED_EXPERTS else ''}"
        )
    found = [sources.find(m, (rows, cols)) for m in modules if sources.has(m)]
    usable = tuple(s for s in found if s is not None)
    if len(usable) < count:
        return None
    return ExpertSource(usable, lambda views: Gathered([(v, 0, rows) for v in views]))
