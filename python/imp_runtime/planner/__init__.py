"""What goes where before anything is loaded: `plan(model, machine, request)`."""

from imp_runtime.planner.fit import plan
from imp_runtime.planner.machine import Machine
from imp_runtime.planner.sizes import ModelSizes, file_sizes, synthetic_sizes
from imp_runtime.planner.types import ONE_CONTEXT, Part, Plan, Request, Speed, Tier

__all__ = [
    "ONE_CONTEXT",
    "Machine",
    "ModelSizes",
    "Part",
    "Plan",
    "Request",
    "Speed",
    "Tier",
    "file_sizes",
    "plan",
    "synthetic_sizes",
]
