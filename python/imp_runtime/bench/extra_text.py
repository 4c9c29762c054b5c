"""Extras of a row, as fields for machines and as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imp_runtime.bench import samples
from imp_runtime.bench.extra import Decode, OpTimes, Profile, step_weight_bytes
from imp_runtime.bench.machine import Ceiling
from imp_runtime.gguf.describe import Description
from imp_runtime.units import gib

TOP_OPS = 6

# Name -> SQL type, in order.
EXTRA_FIELDS = {
    "tokens": "TEXT",
    "speeds": "TEXT",
    "decode_lengths": "TEXT",
    "decode_ts": "REAL",
    "decode_weight_bytes": "INTEGER",
    "decode_gb_per_s": "REAL",
    "decode_share": "REAL",
    "prompt_gflop_per_s": "REAL",
    "prompt_share": "REAL",
    "ceiling_gb_per_s": "REAL",
    "ceiling_gflop_per_s": "REAL",
    "experts_per_layer": "REAL",
    "routing": "TEXT",
    "hit_rate": "REAL",
    "expert_slots": "INTEGER",
    "misses_per_step": "REAL",
    "miss_bytes_per_step": "REAL",
    "miss_ms_per_step": "REAL",
    "vram_limit_bytes": "INTEGER",
    "vram_planned_bytes": "INTEGER",
    "vram_used_bytes": "INTEGER",
    "peak_rss_bytes": "INTEGER",
    "prompt_ops": "TEXT",
    "decode_ops": "TEXT",
    "note": "TEXT",
}


@dataclass(frozen=True)
class Extra:
    """Everything measured beside a row.

    Attributes:
        tokens: label of the token source.
        speeds: tokens per second of every repetition, by what was measured.
        prompt_ts: prompt tokens per second, if a prompt was measured alone.
        decode: None if nothing was generated.
        profile: None if it did not fit.
        ceiling: of the processor; None if it does not run the model.
        peak_rss_bytes: of the process so far.
        note: why something is missing.
        routing: who chose the experts.
    """

    tokens: str
    speeds: Mapping[str, Sequence[float]]
    prompt_ts: float
    decode: Decode | None
    profile: Profile | None
    ceiling: Ceiling | None
    peak_rss_bytes: int
    note: str = ""
    routing: str = "model"

    def weight_bytes(self, about: Description) -> int | None:
        """Bytes of weights per decode step."""
        if self.decode is None or self.profile is None:
            return None
        return round(step_weight_bytes(about, self.profile.experts_per_layer))


def extra_fields(extra: Extra, about: Description) -> dict[str, Any]:
    """Name -> value as in EXTRA_FIELDS; None where nothing was measured."""
    n_bytes, decode, profile = extra.weight_bytes(about), extra.decode, extra.profile
    experts, vram = (decode.experts, decode.vram) if decode else (None, None)
    ceiling = extra.ceiling
    gb = n_bytes / decode.seconds_per_step / 1e9 if decode and n_bytes else None
    gflop = 2 * about.active_parameters * extra.prompt_ts / 1e9 or None
    values: dict[str, Any] = {
        "tokens": extra.tokens,
        "speeds": {name: _spread(values) for name, values in extra.speeds.items()},
        "decode_lengths": list(decode.lengths) if decode else None,
        "decode_ts": decode.tokens_per_second if decode else None,
        "decode_weight_bytes": n_bytes,
        "decode_gb_per_s": gb,
        "decode_share": gb / ceiling.read_gb_per_s if gb and ceiling else None,
        "prompt_gflop_per_s": gflop,
        "prompt_share": gflop / ceiling.gflop_per_s if gflop and ceiling else None,
        "ceiling_gb_per_s": ceiling.read_gb_per_s if ceiling else None,
        "ceiling_gflop_per_s": ceiling.gflop_per_s if ceiling else None,
        "experts_per_layer": profile.experts_per_layer if profile else None,
        "routing": extra.routing,
        "hit_rate": experts.hit_rate if experts else None,
        "expert_slots": experts.slots if experts else None,
        "misses_per_step": experts.misses / decode.steps if decode and experts else None,
        "miss_bytes_per_step": experts.miss_bytes / decode.steps if decode and experts else None,
        "miss_ms_per_step": 1e3 * experts.fetch_seconds / decode.steps
        if decode and experts
        else None,
        "vram_limit_bytes": vram.limit if vram else None,
        "vram_planned_bytes": vram.planned if vram else None,
        "vram_used_bytes": vram.in_use if vram else None,
        "peak_rss_bytes": extra.peak_rss_bytes,
        "prompt_ops": _rounded(profile.prompt_ops) if profile else None,
        "decode_ops": _rounded(profile.decode_ops) if profile else None,
        "note": extra.note,
    }
    return {name: values[name] for name in EXTRA_FIELDS}


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Tokens per second of the repetitions."""
    spread = {"median": samples.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in spread.items()}


def _rounded(ops: OpTimes) -> dict[str, tuple[float, int]]:
    """Seconds to whole nanoseconds, so that text stays short."""
    return {name: (round(seconds, 9), calls) for name, (seconds, calls) in ops.items()}


def extra_lines(name: str, extra: Extra, about: Description) -> list[str]:
    """Indented lines under the name of the row."""
    f = extra_fields(extra, about)
    lines = [f"{name}:", f"  tokens: {extra.tokens}"]
    for what, values in extra.speeds.items():
        lines.append(
            f"  {what}: median {samples.median(values):.2f} t/s, {min(values):.2f} to "
            f"{max(values):.2f} in {len(values)} runs"
        )
    if extra.decode is not None:
        short, long = extra.decode.lengths
        lines.append(
            f"  decode, {long} less {short} tokens: {f['decode_ts']:.2f} t/s, "
            f"{1e3 * extra.decode.seconds_per_step:.2f} ms per step"
        )
    if f["decode_gb_per_s"] is not None:
        lines.append(
            f"  weights read per decode step: {f['decode_weight_bytes'] / 1e9:.3f} GB (cache and "
            f"state not counted), {f['decode_gb_per_s']:.2f} GB/s{_of_ceiling(f['decode_share'])}"
        )
    if f["prompt_gflop_per_s"] is not None:
        lines.append(
            f"  prompt: {f['prompt_gflop_per_s']:.1f} GFLOP/s in weights (attention not counted)"
            f"{_of_ceiling(f['prompt_share'])}"
        )
    lines.append(_routing(f, about))
    if f["vram_used_bytes"] is not None:
        lines.append(
            f"  device memory: {gib(f['vram_used_bytes'])} in use, "
            f"{gib(f['vram_planned_bytes'])} planned, limit {gib(f['vram_limit_bytes'])}"
        )
    for what in ("prompt", "decode"):
        if f[f"{what}_ops"]:
            lines.append(f"  {what} ops: {_ops(f[f'{what}_ops'])}")
    lines.append(f"  peak memory of the process so far: {extra.peak_rss_bytes / 1e9:.2f} GB")
    return lines + ([f"  note: {extra.note}"] if extra.note else [])


def _routing(fields: Mapping[str, Any], about: Description) -> str:
    rate, experts = fields["hit_rate"], fields["experts_per_layer"]
    hits = "- (no expert cache)"
    if rate is not None:
        hits = (
            f"{_percent(rate)} with {fields['expert_slots']} slots, "
            f"{fields['misses_per_step']:.1f} misses = "
            f"{fields['miss_bytes_per_step'] / 1e6:.1f} MB over PCIe in "
            f"{fields['miss_ms_per_step']:.2f} ms per step"
        )
    line = f"  routing: {fields['routing']}; expert hit rate: {hits}"
    if experts is None:
        return line
    return f"{line}; {experts:.1f} of {about.experts} experts per layer and decode step"


def _ops(ops: OpTimes) -> str:
    total = sum(seconds for seconds, _ in ops.values()) or 1.0
    largest = sorted(ops.items(), key=lambda item: -item[1][0])
    shown = [f"{name} {_percent(seconds / total)}" for name, (seconds, _) in largest[:TOP_OPS]]
    rest = sum(seconds for _, (seconds, _) in largest[TOP_OPS:])
    return ", ".join(shown + ([f"others {_percent(rest / total)}"] if rest else []))


def _of_ceiling(share: float | None) -> str:
    return "" if share is None else f", {_percent(share)} of the measured ceiling"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
