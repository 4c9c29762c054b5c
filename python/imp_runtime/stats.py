"""What a session has done so far, as values: two of them subtracted are what came in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from imp_runtime.timings import Timings


@dataclass(frozen=True)
class ExpertCounts:
    """A cache of experts: the distinct experts of steps, all layers together."""

    slots: int
    blob_bytes: int
    """Of one expert."""
    wanted: int
    hits: int
    fetch_seconds: float = 0.0
    """While misses came from the host."""

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> ExpertCounts | None:
        """From Session.expert_stats(); None where there is no cache."""
        if not stats["slots"]:
            return None
        wanted, hits = sum(stats["wanted"]), sum(stats["hits"])
        seconds = sum(stats["fetch_ns"]) * 1e-9
        return cls(stats["slots"], stats["blob_bytes"], wanted, hits, seconds)

    @property
    def misses(self) -> int:
        """Experts that were fetched from the host."""
        return self.wanted - self.hits

    @property
    def miss_bytes(self) -> int:
        """Bytes that they took over PCIe."""
        return self.misses * self.blob_bytes

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were there; 0 if none was wanted."""
        return self.hits / self.wanted if self.wanted else 0.0

    def __sub__(self, before: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(
            self.slots,
            self.blob_bytes,
            self.wanted - before.wanted,
            self.hits - before.hits,
            self.fetch_seconds - before.fetch_seconds,
        )

    def __str__(self) -> str:
        return (
            f"hit rate {self.hit_rate:.2%}, {self.misses} of {self.wanted} experts missed, "
            f"{self.miss_bytes / 1e9:.3f} GB over PCIe in {self.fetch_seconds:.3f} s"
        )


@dataclass(frozen=True)
class ExpertCheck:
    """Experts compared with the checksums of what was read from the file."""

    slots: int
    """Of device memory that hold one."""
    stored: int
    """On the host."""
    damaged: list[tuple[int, int, int]]
    """(layer, expert, slot) of those that differ; slot -1 = on the host."""

    def __str__(self) -> str:
        text = f"{self.slots} experts in VRAM and {self.stored} on the host compared, "
        if not self.damaged:
            return text + "all are as they were read"
        first = "layer {}, expert {}, slot {}".format(*self.damaged[0])
        return text + f"{len(self.damaged)} differ from what was read, first: {first}"


def counter(expert_stats: Callable[[], Mapping[str, Any]]) -> Callable[[], ExpertCounts | None]:
    """What tells the counts from this call on; `expert_stats` is a session's."""
    before = ExpertCounts.of(expert_stats())

    def since() -> ExpertCounts | None:
        now = ExpertCounts.of(expert_stats())
        return now - before if now is not None and before is not None else None

    return since


@dataclass(frozen=True)
class Stats:
    """Tokens, seconds and experts of all generations of a session together."""

    timings: Timings
    experts: ExpertCounts | None
    """None where there is no cache of them."""

    @classmethod
    def of(cls, timings: Timings, expert_stats: Mapping[str, Any]) -> Stats:
        """A copy of what whoever runs the steps keeps, and Session.expert_stats()."""
        return cls(replace(timings), ExpertCounts.of(expert_stats))

    def __sub__(self, before: Stats) -> Stats:
        experts = self.experts
        if experts is not None and before.experts is not None:
            experts = experts - before.experts
        return Stats(self.timings - before.timings, experts)
