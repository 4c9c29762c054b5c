"""What is asked of a plan, and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from imp_runtime._core import USUAL_EXPERT_POLICY

ONE_CONTEXT = -1
"""Tokens of a cache that holds one full context for all sequences together."""


class Tier(StrEnum):
    """Where routed experts are while they wait."""

    VRAM = "all experts in VRAM"
    PINNED = "experts in pinned RAM, a cache in VRAM"
    CPU = "everything on the CPU, weights mapped from the file"


@dataclass(frozen=True)
class Request:
    """What a session shall hold. None = chosen by the plan, and made smaller if memory is short."""

    n_ctx: int | None = None
    """Tokens of the longest sequence."""
    parallel: int = 1
    """Sequences that decode together."""
    kept: int = 0
    """Further sequences that are only kept, such as a prefix cache's."""
    cache_tokens: int | None = None
    """Tokens of keys and values of all sequences together; None = a full context for each,
    ONE_CONTEXT = one full context."""
    state_rows: int = 1
    """Of a sequence: its own, and the checkpoints that it can go back to."""
    n_ubatch: int | None = None
    """Tokens of a prefill step."""
    outputs: int = 64
    """Tokens of a step whose logits are wanted at most, as LLM asks for them."""
    expert_share: float = 1.0
    """Of the memory that is left for experts; the rest stays free."""
    policy: str = USUAL_EXPERT_POLICY
    headroom_bytes: int | None = None
    """VRAM for the CUDA context, graphs and fragments."""


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
    """Experts of all layers together that VRAM holds."""
    slots_per_layer: float
    experts: int
    """Of all layers together."""
    n_ctx: int
    parallel: int
    n_ubatch: int
    kv_tokens: int
    """Of all sequences together; taken whole at start."""
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
