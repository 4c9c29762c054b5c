"""A plan in words: what will be written, and what running the result will take."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from imp_runtime import _core
from imp_runtime.convert.check import disk_needed
from imp_runtime.convert.keys import ARCH
from imp_runtime.convert.plan import ConvertPlan
from imp_runtime.convert.write import shard_names


def size_text(nbytes: float) -> str:
    """`1.42 GB`: decimal units, three digits."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes:.0f} B"


def tensor_lines(plan: ConvertPlan) -> list[str]:
    """One line per tensor: name, dims, source scheme -> type, bytes."""
    width = max(len(o.name) for o in plan.outputs)
    return [
        f"{o.name:<{width}}  {' x '.join(map(str, o.dims)):>20}  "
        f"{o.scheme} -> {o.type.name}  {o.nbytes}"
        for o in plan.outputs
    ]


def total_lines(plan: ConvertPlan, target: Path | None) -> list[str]:
    """Totals by type, disk space, and the memory that the result will want."""
    by_type: Counter[str] = Counter()
    for o in plan.outputs:
        by_type[o.type.name] += o.nbytes
    table = plan.bytes_of("table")
    experts = plan.bytes_of("experts")
    weights = sum(o.nbytes for o in plan.outputs) - table
    embedding = plan.bytes_of("embedding")
    keys = {k: v.value for k, v in plan.writer.kv_data[0].items()}
    cost = _core.memory_cost(ARCH, keys)
    per_token = cost["page_bytes"] / cost["page_tokens"]
    context = plan.config.context_length
    lines = [
        f"source   {', '.join(f'{n} x {s}' for s, n in plan.schemes.most_common())}",
        f"tensors  {len(plan.outputs)}: "
        + ", ".join(f"{name} {size_text(n)}" for name, n in by_type.most_common()),
    ]
    if target is not None:
        files = len(shard_names(plan, target))
        needed = disk_needed(plan.data_bytes, files)
        free = shutil.disk_usage(target.parent).free
        lines.append(
            f"disk     {size_text(needed)} in {files} file{'s' * (files > 1)}, "
            f"{size_text(free)} free in {target.parent}"
        )
    lines += [
        f"RAM      {size_text(weights)} of weights on the CPU"
        + (f"; the n-gram table ({size_text(table)}) is mapped, a few rows a token" * bool(table)),
        f"VRAM     {size_text(weights - embedding)} with all experts on the device, "
        f"{size_text(weights - embedding - experts)} with the experts in host memory",
        f"state    {size_text(cost['row_bytes'])} and {size_text(per_token)} a token per sequence: "
        f"{size_text(cost['row_bytes'] + per_token * context)} at {context} tokens",
    ]
    return lines
