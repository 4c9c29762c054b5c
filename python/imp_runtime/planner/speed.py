"""How fast decoding would be: bytes over bandwidths, and what kernels cost beside."""

from __future__ import annotations

from itertools import pairwise

from imp_runtime.planner import measured
from imp_runtime.planner.machine import Machine
from imp_runtime.planner.sizes import ModelSizes
from imp_runtime.planner.types import Speed, Tier


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
    on_cpu = tier is Tier.CPU
    bandwidth = machine.ram_bandwidth if on_cpu else machine.vram_bandwidth
    parts = {
        "dense weights": model.dense_bytes / bandwidth,
        "experts": wanted / bandwidth,
        "states": 2 * rows * model.row_bytes / bandwidth,
    }
    if not on_cpu:
        layers = max(1, model.expert_layers)
        parts["kernels"] = kernel_seconds(rows) * layers / measured.STEP_LAYERS
    if tier is Tier.PINNED:
        misses = wanted * (1 - hit_rate) / machine.pcie_bandwidth
        parts["finding experts"] = model.expert_layers * measured.RESOLVE_SECONDS
        parts["misses over PCIe"] = misses * (1 - measured.HIDDEN_SHARE)
    return Speed(tuple((name, 1000 * s) for name, s in parts.items()), rows)


def kernel_seconds(rows: int) -> float:
    """What bandwidth does not explain of a step of the released shape.

    Between the measured steps, and beyond the last, it follows straight lines.
    """
    points = [
        (step.rows, step.seconds - step.read_bytes / measured.VRAM_BANDWIDTH)
        for step in measured.STEPS
    ]
    for (low, a), (high, b) in pairwise(points):  # noqa: B007 the last line is used below
        if rows <= high:
            break
    return a + (b - a) * (rows - low) / (high - low)
