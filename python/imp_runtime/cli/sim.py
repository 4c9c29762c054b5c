"""`imp sim`: hit rates of expert caches by policy and size, for recorded or planted routing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from imp_runtime import expert_sim, trace
from imp_runtime.cli.sim_plot import need_plot, save_plot
from imp_runtime.errors import ImpError
from imp_runtime.units import parse_bytes

RELEASED_BLOB_BYTES = 2_764_800
"""Of an expert of the released shape."""


def register(app: typer.Typer) -> None:
    """Add the command to `imp`."""

    @app.command("sim")
    def command(
        traces: Annotated[
            list[Path] | None, typer.Option("--trace", help="of `imp trace`; repeatable")
        ] = None,
        routing: Annotated[
            str | None, typer.Option("--routing", help="planted: prose or uniform")
        ] = None,
        tokens: Annotated[int, typer.Option("--tokens", help="planted", min=1)] = 4000,
        layers: Annotated[int, typer.Option("--layers", help="planted", min=1)] = 48,
        experts: Annotated[int, typer.Option("--experts", help="planted", min=1)] = 512,
        used: Annotated[int, typer.Option("--used", help="planted: a token's", min=1)] = 10,
        seed: Annotated[int, typer.Option("--seed", help="planted", min=0)] = 1,
        policy: Annotated[
            str, typer.Option("--policy", help="lru, pool, lrfu[:n], pool-lrfu[:n], with commas")
        ] = "lru,pool,lrfu",
        per_layer: Annotated[
            str | None, typer.Option("--experts-per-layer", help="sizes, such as 31,62,124")
        ] = None,
        vram: Annotated[
            str | None, typer.Option("--vram", help="or VRAM for experts, such as 8GiB,16GiB")
        ] = None,
        blob: Annotated[
            str, typer.Option("--expert-size", help="bytes of an expert, for --vram")
        ] = str(RELEASED_BLOB_BYTES),
        batch: Annotated[
            int, typer.Option("--batch", help="tokens of a step; 0: as recorded", min=0)
        ] = 0,
        warm: Annotated[
            int, typer.Option("--warm", help="steps that only fill the cache; -1: chosen", min=-1)
        ] = -1,
        as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
        plot: Annotated[
            Path | None, typer.Option("--plot", help="hit curves as a PNG (needs matplotlib)")
        ] = None,
    ) -> None:
        """Replay routing through policies at several sizes of the cache.

        Without --experts-per-layer and --vram: an eighth to three quarters of the experts. Planted
        routing warms the cache with its first quarter; traces count from their first step.
        """
        if plot is not None:
            need_plot()
        if bool(traces) == (routing is not None):
            raise ImpError("routing is needed: --trace FILE or --routing prose")
        sources = [trace.load(path) for path in traces or []]
        if routing is not None:
            sources = [
                expert_sim.planted(
                    routing, tokens=tokens, layers=layers, experts=experts, used=used, seed=seed
                )
            ]
        policies = [p for p in policy.split(",") if p]
        if not policies:
            raise ImpError("--policy names none")
        runs = []
        for source in sources:
            steps = expert_sim.batched(source, batch) if batch else source
            share = expert_sim.WARM_UP_SHARE if routing is not None else 0.0
            first = int(len(steps.step_rows) * share) if warm < 0 else warm
            if first >= len(steps.step_rows):
                raise ImpError(f"--warm is {first}, {source.text} has {len(steps.step_rows)} steps")
            sizes = _sizes(source, per_layer, vram, parse_bytes(blob, "--expert-size"))
            points = expert_sim.hit_curve(steps, policies, sizes, first)
            runs.append((steps, points))
        if as_json:
            print(json.dumps([_json(t, points) for t, points in runs], indent=2))
        else:
            for t, points in runs:
                print(_heading(t, points))
                Console().print(_table(t, points))
        if plot is not None:
            save_plot(plot, [(_title(t), points) for t, points in runs])


def _sizes(
    source: trace.Trace, per_layer: str | None, vram: str | None, blob_bytes: int
) -> list[int]:
    """Slots of all layers together, ascending."""
    if per_layer is not None and vram is not None:
        raise ImpError("--experts-per-layer and --vram are two lists of sizes, one is needed")
    if per_layer is not None:
        words = per_layer.split(",")
        if not all(w.isascii() and w.isdigit() and len(w) < 10 for w in words):
            raise ImpError(f"--experts-per-layer is '{per_layer}', it must be such as 31,62")
        slots = [int(w) * source.layers for w in words]
    elif vram is not None:
        if blob_bytes < 1:
            raise ImpError(f"--expert-size is {blob_bytes}, it must be at least 1")
        slots = [parse_bytes(w, "--vram") // blob_bytes for w in vram.split(",")]
    else:
        slots = [source.layers * source.experts * eighths // 8 for eighths in (1, 2, 3, 4, 6)]
    pairs = source.layers * source.experts
    for n in slots:
        if not source.layers <= n:
            raise ImpError(f"{n} slots for {source.layers} layers: at least one each is needed")
    return sorted({min(n, pairs) for n in slots})


def _title(source: trace.Trace) -> str:
    if source.model == "planted":
        return f"routing: planted ({source.text})"
    return f"routing of {source.model}, text {source.text}"


def _heading(source: trace.Trace, points: list[expert_sim.Point]) -> str:
    rows = len(source.ids) / len(source.step_rows)
    return (
        f"{_title(source)}; {source.layers} layers, {source.k} of {source.experts} experts; "
        f"{points[0].steps} steps counted, {rows:.3g} tokens a step"
    )


def _table(source: trace.Trace, points: list[expert_sim.Point]) -> Table:
    table = Table()
    table.add_column("policy, experts a layer")
    sizes = sorted({p.slots for p in points})
    pairs = source.layers * source.experts
    for n in sizes:
        table.add_column(f"{n / source.layers:.4g}\n{n / pairs:.1%}", justify="right")
    for policy in dict.fromkeys(p.policy for p in points):
        row = {p.slots: p for p in points if p.policy == policy}
        table.add_row(policy, *(_cell(row[n]) for n in sizes))
    if any(p.uncached for p in points):
        table.caption = "* of steps that fit; some wanted more experts than a layer has slots"
    return table


def _cell(point: expert_sim.Point) -> str:
    if not point.wanted:
        return "-"
    return f"{point.hit_rate:.1%}{'*' if point.uncached else ''}"


def _json(source: trace.Trace, points: list[expert_sim.Point]) -> dict[str, object]:
    return {
        "model": source.model,
        "text": source.text,
        "layers": source.layers,
        "experts": source.experts,
        "experts_used": source.k,
        "tokens": len(source.ids),
        "points": [asdict(p) | {"hit_rate": p.hit_rate} for p in points],
    }
