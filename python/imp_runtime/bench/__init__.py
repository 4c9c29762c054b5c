"""Benchmarks: prompts and generation of one or several sequences, measured as llama.cpp does."""

from imp_runtime.bench.batched import (
    BatchedCase,
    BatchedMisfit,
    BatchedOptions,
    BatchedRow,
    batched_bench,
)
from imp_runtime.bench.extra import Decode, Profile, Workload, measure_decode, profile
from imp_runtime.bench.machine import Ceiling, measure_ceiling
from imp_runtime.bench.speed import (
    Setup,
    SpeedCase,
    SpeedMisfit,
    SpeedOptions,
    SpeedRow,
    speed_bench,
)
from imp_runtime.bench.tokens import RandomTokens, TextTokens, TokenSource

__all__ = [
    "BatchedCase",
    "BatchedMisfit",
    "BatchedOptions",
    "BatchedRow",
    "Ceiling",
    "Decode",
    "Profile",
    "RandomTokens",
    "Setup",
    "SpeedCase",
    "SpeedMisfit",
    "SpeedOptions",
    "SpeedRow",
    "TextTokens",
    "TokenSource",
    "Workload",
    "batched_bench",
    "measure_ceiling",
    "measure_decode",
    "profile",
    "speed_bench",
]
