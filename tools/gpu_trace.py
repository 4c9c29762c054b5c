"""Hit rates of the device's cache on a trace, beside `imp sim` on the same file, at released shape.

    python tools/gpu_trace.py [--tokens 512] [--vram-limit 32GiB] [--policy lru,lrfu,pool]

The trace is planted prose, written as `imp trace` writes one, and replayed one token a step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from imp_runtime import expert_sim, trace
from imp_runtime.model import Model
from imp_runtime.placement import Limits
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts
from imp_runtime.units import parse_bytes

MOST_APART = 0.001  # of a hit rate


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--synthetic", default="flash-next")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vram-limit", default="32GiB")
    parser.add_argument("--policy", default="lru,lrfu,pool")
    args = parser.parse_args()
    ok = True
    for policy in args.policy.split(","):
        limits = Limits(
            vram_bytes=parse_bytes(args.vram_limit, "--vram-limit"), expert_policy=policy
        )
        model = Model.synthetic(args.synthetic, device="cuda", limits=limits)
        sizes = model.sizes()
        made = expert_sim.planted(
            "prose",
            tokens=args.tokens,
            layers=sizes.expert_layers,
            experts=sizes.experts,
            used=sizes.experts_used,
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.npz"
            trace.save(made, file)
            with Session(model, n_ctx=args.tokens + 1, routing=f"trace:{file}") as session:
                seq = session.open()
                for token in range(args.tokens):
                    session.core.step([(seq.id, np.array([token], np.int32), 0)])
                stats = session.expert_stats()
            (point,) = expert_sim.hit_curve(trace.load(file), [policy], [stats["slots"]], 0)
        engine = ExpertCounts.of(stats)
        if engine is None:
            raise SystemExit(f"all experts fit in {args.vram_limit}")
        apart = abs(engine.hit_rate - point.hit_rate)
        ok = ok and apart <= MOST_APART and engine.wanted == point.wanted
        print(
            f"{policy}: {args.tokens} tokens, {stats['slots']} slots: engine {engine.hits} of "
            f"{engine.wanted} = {engine.hit_rate:.5f}, imp sim {point.hits} of {point.wanted} = "
            f"{point.hit_rate:.5f}",
            flush=True,
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
