"""How fast decoding would be: bytes over bandwidths, and what kernels cost beside."""

from __future__ import annotations

from imp_runtime.planner.machine import Machine
from imp_runtime.planner.sizes import ModelSizes
from imp_runtime.planner.types import Speed, Tier

KERNELS_PER_LAYER = 17
"""Of a replayed step: 818 in 48 layers (docs/measured.md, CUDA)."""
KERNEL_SECONDS = 4.5e-6
"""Of a kernel that bandwidth does not explain: (6.37 ms - 2.2 ms) / 818 at first, less what later
kernels gained: 114 tok/s with 8,700 slots, logits on the host."""
ROW_SECONDS = 0.5e-3
"""Of a further row of a step of 48 layers that bandwidth does not explain: 258 tok/s of 8 rows with
8,700 slots."""
ROW_LAYERS = 48
RESOLVE_SECONDS = 4.5e-6
"""Of a layer with a cache: 3 to 6 us."""
PAGEABLE_SHARE = 0.25
"""Of the bus that copies through a staging buffer get; not measured."""


def decode_speed(
    model: ModelSizes, machine: Machine, rows: int, tier: Tier, distinct: float, hit_rate: float
) -> Speed:
    """A step of `rows` sequences, one token each.

    Args:
        model: sizes.
        machine: bandwidths.
        rows: sequences.
        tier: where experts are.
        distinct: experts of a layer that the step wants.
        hit_rate: share of them in VRAM.
    """
    wanted = distinct * model.expert_layers * model.blob_bytes
    states = 2 * rows * model.row_bytes
    if tier is Tier.CPU:
        parts = {
            "dense weights": model.dense_bytes / machine.ram_bandwidth,
            "experts": wanted / machine.ram_bandwidth,
            "states": states / machine.ram_bandwidth,
        }
        return _speed(parts, rows)
    layers = max(1, model.expert_layers)
    parts = {
        "dense weights": model.dense_bytes / machine.vram_bandwidth,
        "experts": wanted / machine.vram_bandwidth,
        "states": states / machine.vram_bandwidth,
        "kernels": layers * KERNELS_PER_LAYER * KERNEL_SECONDS
        + (rows - 1) * ROW_SECONDS * layers / ROW_LAYERS,
    }
    if tier is not Tier.VRAM:
        share = PAGEABLE_SHARE if tier is Tier.PAGEABLE else 1.0
        parts["finding experts"] = model.expert_layers * RESOLVE_SECONDS
        parts["misses over PCIe"] = wanted * (1 - hit_rate) / (machine.pcie_bandwidth * share)
    return _speed(parts, rows)


def _speed(seconds: dict[str, float], rows: int) -> Speed:
    return Speed(tuple((name, 1000 * s) for name, s in seconds.items()), rows)
