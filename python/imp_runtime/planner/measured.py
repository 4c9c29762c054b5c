"""What plans take from docs/measured.md: an H200 behind PCIe 5 x16, two cores of an EPYC.

When kernels get faster, this is the only place to change.
"""

from __future__ import annotations

from dataclasses import dataclass

VRAM_BANDWIDTH = 4.8e12
"""Bytes/s of device memory: data sheet. An RTX 5090 has 1.79e12."""
PCIE_BANDWIDTH = 49e9
"""Bytes/s of experts read from pinned memory (48 to 51e9)."""
RAM_BANDWIDTH = 34.6e9
"""Bytes/s of weights that the CPU decodes."""
RESOLVE_SECONDS = 5e-6
"""Of a layer with a cache: 3 to 6 us."""
HIDDEN_SHARE = 0.1
"""Of the time of misses: by which a step is shorter than its parts together. 17 % with one
sequence, 3 % with eight."""


@dataclass(frozen=True)
class Step:
    """A decode step of the released shape with all experts in VRAM."""

    rows: int
    seconds: float
    """GPU time, logits not copied."""
    read_bytes: float
    """Weights of the experts that were chosen, dense weights and states."""


_DENSE, _STATE, _EXPERT = 8_755_482_112, 2 * 118_063_104, 48 * 2_764_800
STEP_LAYERS = 48
STEPS = (
    Step(1, 4.667e-3, _DENSE + _STATE + 10.0 * _EXPERT),
    Step(8, 9.28e-3, _DENSE + 8 * _STATE + 74.7 * _EXPERT),
    Step(16, 13.92e-3, _DENSE + 16 * _STATE + 138.6 * _EXPERT),
    Step(32, 18.68e-3, _DENSE + 32 * _STATE + 239.6 * _EXPERT),
    Step(64, 26.84e-3, _DENSE + 64 * _STATE + 367.1 * _EXPERT),
    Step(128, 42.03e-3, _DENSE + 128 * _STATE + 471.0 * _EXPERT),
)
"""By rows, ascending. Experts of a layer: 512 (1 - (1 - 10 / 512)^rows)."""
