"""llama-batched-bench's table and JSON lines."""

from __future__ import annotations

import json
from typing import Any

from imp_runtime.bench.batched import BatchedCase, BatchedMisfit, BatchedOptions, BatchedRow

HEADER = (
    "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |"
    "      T s |    S t/s |"
)
RULE = (
    "|-------|--------|------|--------|----------|----------|----------|----------|"
    "----------|----------|"
)
# What llama.cpp prints for "auto"; imp has one attention and places layers itself.
FLASH_ATTN = N_GPU_LAYERS = -1


def settings(options: BatchedOptions, shared: bool) -> str:
    """The line above the table."""
    return (
        f"llama_batched_bench: n_kv_max = {options.n_kv_max}, n_batch = {options.n_batch}, "
        f"n_ubatch = {options.n_ubatch}, flash_attn = {FLASH_ATTN}, "
        f"is_pp_shared = {int(shared)}, is_tg_separate = {int(options.separate)}, "
        f"n_gpu_layers = {N_GPU_LAYERS}, n_threads = {options.n_threads}, "
        f"n_threads_batch = {options.n_threads}"
    )


def table_row(row: BatchedRow) -> str:
    """A measured case."""
    return (
        f"{_cells(row.case)} {row.t_pp:8.3f} | {row.speed_pp:8.2f} | {row.t_tg:8.3f} | "
        f"{row.speed_tg:8.2f} | {row.t:8.3f} | {row.speed:8.2f} |"
    )


def note_row(misfit: BatchedMisfit) -> str:
    """A case without numbers."""
    return f"{_cells(misfit.case)} {misfit.reason} |"


def _cells(case: BatchedCase) -> str:
    return f"|{case.pp:6d} | {case.tg:6d} | {case.pl:4d} | {case.n_kv:6d} |"


def json_row(row: BatchedRow, options: BatchedOptions, extra: dict[str, Any] | None = None) -> str:
    """A measured case; `extra` goes behind llama.cpp's fields."""
    fields = _json_fields(row.case, options) + [
        (name, f"{value:f}")
        for name, value in (
            ("t_pp", row.t_pp),
            ("speed_pp", row.speed_pp),
            ("t_tg", row.t_tg),
            ("speed_tg", row.speed_tg),
            ("t", row.t),
            ("speed", row.speed),
        )
    ]
    fields += [(name, json.dumps(value)) for name, value in (extra or {}).items()]
    return _json(fields)


def json_note(misfit: BatchedMisfit, options: BatchedOptions) -> str:
    """A case without numbers."""
    return _json([*_json_fields(misfit.case, options), ("note", json.dumps(misfit.reason))])


def _json_fields(case: BatchedCase, options: BatchedOptions) -> list[tuple[str, str]]:
    return [
        (name, str(value))
        for name, value in (
            ("n_kv_max", options.n_kv_max),
            ("n_batch", options.n_batch),
            ("n_ubatch", options.n_ubatch),
            ("flash_attn", FLASH_ATTN),
            ("is_pp_shared", int(case.shared)),
            ("n_gpu_layers", N_GPU_LAYERS),
            ("n_threads", options.n_threads),
            ("n_threads_batch", options.n_threads),
            ("pp", case.pp),
            ("tg", case.tg),
            ("pl", case.pl),
            ("n_kv", case.n_kv),
        )
    ]


def _json(fields: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields) + "}"
