"""What is asked of a plan, and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where routed experts are while they wait."""

    VRAM = "all experts in VRAM"
    PINNED = "experts in pinned RAM, a cache in VRAM"
    PAGEABLE = "experts in pageable RAM, copied through a staging buffer, a cache in VRAM"
    CPU = "everything on the CPU, weights mapped from the file"


@dataclass(frozen=True)
class Request:
    """What a session shall hold. None = chosen by the plan, and made smaller if memory is short."""

    n_ctx: int | None = None
    """Tokens of the longest sequence."""
    parallel: int = 1
    """Sequences that decode together."""
    n_ubatch: int | None = None
    """Tokens of a prefill step."""
    expert_share: float = 1.0
    """Of the memory that is left for experts; the rest stays free."""
    policy: str = "lru"
    headroom_bytes: int | None = None
    """VRAM for the CUDA context, graphs and fragments."""
    embedding_in_vram: bool = True
    """As sessions on CUDA keep it."""
    kv_grows: bool = False
    """Whether the cache of keys and values starts small and takes from the experts later; sessions
    take all of it at start."""
    pageable: bool = False
    """Whether experts may be staged from pageable memory where they cannot be pinned."""


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Speed:
    """A decode step of all sequences, by a floor model: parts do not overlap."""

    milliseconds: tuple[tuple[str, float], ...]
    """Part of the step and its time."""
    tokens: int
    """Of a step."""

    @property
    def step_ms(self) -> float:
        """All parts."""
        return sum(ms for _, ms in self.milliseconds)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return 1000 * self.tokens / self.step_ms


@dataclass(frozen=True)
class Plan:
    """What goes where. Bytes."""

    model: str
    tier: Tier
    slots: int
    """Experts of all layers together that VRAM holds at start."""
    slots_least: int
    """What is left of them when the cache of keys and values has grown to its most."""
    slots_per_layer: float
    experts: int
    """Of all layers together."""
    n_ctx: int
    parallel: int
    n_ubatch: int
    kv_tokens_start: int
    """Of all sequences together."""
    kv_tokens_most: int
    policy: str
    vram: tuple[Part, ...]
    vram_limit: int
    ram: tuple[Part, ...]
    ram_limit: int
    table_bytes: int
    """Read from disk row by row."""
    steps: tuple[str, ...]
    """What was made smaller, and why; one sentence each."""
    distinct: float
    """Experts of a layer that a step wants, predicted for running text."""
    hit_rate: float
    """Share of them in VRAM, predicted."""
    pcie_bytes_per_token: float
    speed: Speed

    @property
    def vram_bytes(self) -> int:
        """All parts in VRAM."""
        return sum(part.bytes for part in self.vram)

    def explain(self) -> str:
        """The plan as a table in plain text."""
        from imp_runtime.planner.text import explain

        return explain(self)
