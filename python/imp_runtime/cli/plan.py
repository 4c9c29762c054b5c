"""`imp plan`: what goes where, and how fast it would be, before anything is loaded."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from imp_runtime._core import USUAL_EXPERT_POLICY
from imp_runtime.cli.llama_common import limits_of
from imp_runtime.errors import ImpError
from imp_runtime.planner import ModelSizes, Request, file_sizes, plan, synthetic_sizes
from imp_runtime.planner.measured import PCIE_BANDWIDTH, RAM_BANDWIDTH, VRAM_BANDWIDTH
from imp_runtime.session import CACHE_TYPES
from imp_runtime.units import parse_bytes


def register(app: typer.Typer) -> None:
    """Add the command to `imp`."""

    @app.command("plan")
    def command(
        file: Annotated[
            Path | None, typer.Argument(help="GGUF file; only its header is read")
        ] = None,
        synthetic: Annotated[
            str | None, typer.Option("--synthetic", help="a released shape, such as flash-next")
        ] = None,
        vram_limit: Annotated[
            str | None,
            typer.Option("--vram-limit", help="VRAM for all of imp, such as 32GiB; 0: no GPU"),
        ] = None,
        ram_limit: Annotated[
            str | None, typer.Option("--ram-limit", help="host memory for experts and caches")
        ] = None,
        n_ctx: Annotated[
            int, typer.Option("-c", "--ctx-size", help="context; 0: chosen", min=0)
        ] = 0,
        parallel: Annotated[
            int, typer.Option("-np", "--parallel", help="sequences together", min=1)
        ] = 1,
        n_ubatch: Annotated[
            int, typer.Option("-ub", "--ubatch-size", help="prefill step; 0: chosen", min=0)
        ] = 0,
        policy: Annotated[
            str, typer.Option("--policy", help="lru, pool, lrfu[:n] or pool-lrfu[:n]")
        ] = USUAL_EXPERT_POLICY,
        share: Annotated[
            float, typer.Option("--cache-share", help="of the VRAM left for experts")
        ] = 1.0,
        headroom: Annotated[
            str | None, typer.Option("--headroom", help="VRAM left for the driver")
        ] = None,
        dense: Annotated[
            str, typer.Option("--dense", help="stored, or 8bit: as if BF16 matrices were Q8_0")
        ] = "stored",
        cache_type_k: Annotated[str, typer.Option("-ctk", "--cache-type-k")] = "f32",
        cache_type_v: Annotated[str, typer.Option("-ctv", "--cache-type-v")] = "f32",
        vram_bandwidth: Annotated[
            float, typer.Option("--vram-bandwidth", help="GB/s")
        ] = VRAM_BANDWIDTH / 1e9,
        pcie_bandwidth: Annotated[
            float, typer.Option("--pcie-bandwidth", help="GB/s")
        ] = PCIE_BANDWIDTH / 1e9,
        ram_bandwidth: Annotated[float, typer.Option("--ram-bandwidth", help="GB/s")] = (
            RAM_BANDWIDTH / 1e9
        ),
        as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    ) -> None:
        """Show what would go where, for this machine or the one that limits describe."""
        if dense not in ("stored", "8bit"):
            raise ImpError(f"--dense is '{dense}', it must be stored or 8bit")
        for flag, value in (("-ctk", cache_type_k), ("-ctv", cache_type_v)):
            if value not in CACHE_TYPES:
                raise ImpError(f"{flag} is '{value}', it must be one of {', '.join(CACHE_TYPES)}")
        machine = replace(
            limits_of(vram_limit, ram_limit, policy).machine(),
            vram_bandwidth=vram_bandwidth * 1e9,
            pcie_bandwidth=pcie_bandwidth * 1e9,
            ram_bandwidth=ram_bandwidth * 1e9,
        )
        request = Request(
            n_ctx=n_ctx or None,
            parallel=parallel,
            n_ubatch=n_ubatch or None,
            expert_share=share,
            policy=policy,
            headroom_bytes=None if headroom is None else parse_bytes(headroom, "--headroom"),
        )
        options = {"dense": dense, "cache_type_k": cache_type_k, "cache_type_v": cache_type_v}
        made = plan(_sizes(file, synthetic, options), machine, request)
        if as_json:
            speed = {
                "step_ms": made.speed.step_ms,
                "tokens_per_second": made.speed.tokens_per_second,
            }
            print(json.dumps(asdict(made) | {"vram_bytes": made.vram_bytes} | speed, indent=2))
        else:
            print(made.explain())


def _sizes(file: Path | None, synthetic: str | None, options: dict[str, str]) -> ModelSizes:
    if (file is None) == (synthetic is None):
        raise ImpError("a model is needed: FILE or --synthetic flash-next")
    if file is not None:
        return file_sizes(file, **options)
    return synthetic_sizes(synthetic or "", **options)
