"""Which device runs a model, and where its experts wait: the planner applied to a real session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from imp_runtime import _core
from imp_runtime._core import USUAL_EXPERT_POLICY
from imp_runtime.errors import ImpError
from imp_runtime.planner import Machine, ModelSizes, Plan, Request, Tier, plan


@dataclass(frozen=True)
class Limits:
    """What imp may take of a machine. None = what is free."""

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    """Host memory for experts."""
    expert_policy: str = USUAL_EXPERT_POLICY

    def machine(self, weights: _core.DeviceWeights | None = None) -> Machine:
        """Of this machine, what the limits allow, with what other sessions' `weights` take."""
        found = Machine.here(vram_bytes=self.vram_bytes, ram_bytes=self.ram_bytes)
        if weights is None:
            return found
        return replace(
            found,
            vram_bytes=found.vram_bytes + (weights.device_bytes if self.vram_bytes is None else 0),
            ram_bytes=found.ram_bytes + (weights.pinned_bytes if self.ram_bytes is None else 0),
        )


def check_policy(name: str) -> None:
    """Raises ImpError if no policy of the cache of experts has that name."""
    none = np.zeros((0, 1, 1), np.uint16)
    _core.simulate_experts(none, [], experts=1, slots=1, policy=name, first_counted=0)


def choose_device(device: str, sizes: Callable[[], ModelSizes], limits: Limits) -> tuple[str, str]:
    """The device by name, "cpu" or "cuda", and why if it was left to us.

    "auto" is CUDA where it can be used and the plan needs nothing else.

    Raises:
        ImpError: the device cannot run a model here.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ImpError(f"device '{device}': auto, cpu or cuda")
    if device == "cpu":
        return "cpu", ""
    info = _core.system_info()
    if not info["cuda_usable"]:
        if device == "cuda":
            raise ImpError(f"device cuda: {info['cuda_detail']}")
        return "cpu", ""
    if device == "cuda":
        return "cuda", ""
    try:
        made = plan(sizes(), limits.machine(), Request())
    except ImpError as error:
        return "cpu", f"on the CPU: {error}"
    if made.tier in (Tier.VRAM, Tier.PINNED):
        return "cuda", ""
    return "cpu", f"on the CPU: {_why(made)}"


def vram_in_use() -> int:
    """Bytes of device memory that all processes hold now, CUDA's own included.

    0 without a device.
    """
    info = _core.system_info()
    return int(info["cuda_total_bytes"]) - int(info["cuda_free_bytes"])


def plan_session(sizes: ModelSizes, machine: Machine, request: Request) -> Plan:
    """Where everything of a session on CUDA goes.

    Args:
        sizes: of the model, with the session's cache types.
        machine: what may be used.
        request: of the session.

    Raises:
        ImpError: it does not fit (naming both numbers).
    """
    made = plan(sizes, machine, request)
    if made.tier not in (Tier.VRAM, Tier.PINNED):
        raise ImpError(f"device cuda: {_why(made)}")
    return made


def _why(made: Plan) -> str:
    return "; ".join(made.steps) or "no VRAM may be used"
