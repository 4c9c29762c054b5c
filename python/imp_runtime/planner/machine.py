"""What a plan may use of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from imp_runtime import _core
from imp_runtime.planner.measured import PCIE_BANDWIDTH, RAM_BANDWIDTH, VRAM_BANDWIDTH

RAM_HEADROOM_BYTES = 4 << 30
"""Left free where nobody sets a limit, as the store of experts does."""


@dataclass(frozen=True)
class Machine:
    """Limits in bytes, bandwidths in bytes a second."""

    vram_bytes: int
    """Of device memory that imp may use in total; 0 = there is no device."""
    ram_bytes: int
    """Of host memory that imp may pin or fill."""
    vram_bandwidth: float = VRAM_BANDWIDTH
    pcie_bandwidth: float = PCIE_BANDWIDTH
    ram_bandwidth: float = RAM_BANDWIDTH

    @classmethod
    def here(cls, *, vram_bytes: int | None = None, ram_bytes: int | None = None) -> Machine:
        """What this machine has; a number that is given replaces what was found.

        Host memory is what the cgroup and MemAvailable leave, less a headroom.
        """
        info = _core.system_info()
        free = info["cuda_free_bytes"] if info["cuda_usable"] else 0
        available = max(0, info["memory_available_bytes"] - RAM_HEADROOM_BYTES)
        return cls(
            free if vram_bytes is None else vram_bytes,
            available if ram_bytes is None else ram_bytes,
        )
