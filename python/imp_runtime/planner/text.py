"""A plan as lines."""

from __future__ import annotations

from imp_runtime.planner.types import Plan, Tier
from imp_runtime.units import gib, size, table


def explain(plan: Plan) -> str:
    """Every number of the plan with its reason, a line each."""
    p = plan
    facts = [("model", p.model), ("plan", p.tier.value)]
    if p.tier is Tier.PINNED:
        share = p.slots / p.experts
        facts.append(
            (
                "expert slots",
                f"{p.slots} of {p.experts} ({share:.1%}), {p.slots_per_layer:.0f} a layer, "
                f"policy {p.policy}",
            )
        )
    sequences = "sequence" if p.parallel == 1 else "sequences"
    facts += [
        ("context", f"{p.n_ctx} tokens, {p.parallel} {sequences}, prefill steps of {p.n_ubatch}"),
        ("keys and values", f"{p.kv_tokens} tokens, taken whole at start"),
    ]
    lines = table(facts, frozenset())
    rows = [("memory", "bytes", "")]
    for part in p.vram:
        rows.append((f"  VRAM {part.name}", f"{part.bytes:,}", gib(part.bytes)))
    if p.vram:
        rows.append(("  VRAM in all", f"{p.vram_bytes:,}", gib(p.vram_bytes)))
        rows.append(("  VRAM limit", f"{p.vram_limit:,}", gib(p.vram_limit)))
    for part in p.ram:
        rows.append((f"  RAM {part.name}", f"{part.bytes:,}", gib(part.bytes)))
    rows.append(("  RAM limit", f"{p.ram_limit:,}", gib(p.ram_limit)))
    if p.table_bytes:
        rows.append(("  disk n-gram table", f"{p.table_bytes:,}", gib(p.table_bytes)))
    lines += ["", *table(rows, frozenset({1, 2}))]
    if p.steps:
        lines += ["", "made smaller", *(f"  {step}" for step in p.steps)]
    lines += ["", "predicted for running text (planted routing: prose), decoding"]
    expected = []
    if p.tier is Tier.PINNED:
        expected = [
            ("  hit rate", f"{p.hit_rate:.1%} of {p.distinct:.1f} experts a layer and step"),
            ("  over PCIe", f"{size(round(p.pcie_bytes_per_token))} a token"),
        ]
    expected += [(f"  {name}", f"{ms:.2f} ms") for name, ms in p.speed.milliseconds]
    s = p.speed
    expected.append(("  step", f"{s.step_ms:.2f} ms, {s.tokens_per_second:.0f} tok/s in all"))
    return "\n".join([*lines, *table(expected, frozenset())])
