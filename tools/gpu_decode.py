"""Decode speed of a model of random weights on CUDA, by batch size, with the time of each kernel.

    python tools/gpu_decode.py [--synthetic flash-next] [--batch 1,8,32,64,128] [--context 4096]

The sequences of a batch are forks of one prompt, so their cache pages are shared, and each goes on
with its own tokens. GPU time is from the first kernel of a step to the end of its last one, without
the copy of the logits; a kernel's own time is what it adds to that (kernels overlap at the edges).
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from imp_runtime.model import Model
from imp_runtime.session import Session

WARM_UP, STEPS, TRACED = 3, 8, 4
DENSE_BYTES = 8.62e9  # BF16 weights that every step of the released shape reads
EXPERT_BYTES = 2764800.0
SEQUENCE_BYTES = 0.226e9  # recurrent state, read and written
LAYERS = 48


class Batch:
    """`n` forks of a prompt in one session."""

    def __init__(self, session: Session, prompt: np.ndarray, n: int):
        self.session, self.n = session, n
        self.random = np.random.RandomState(7)
        first = session.open()
        first.extend(prompt, outputs="none")
        self.seqs = [first, *(first.fork() for _ in range(n - 1))]

    def step(self, count: int) -> None:
        """One token for each of the first `count` sequences."""
        tokens = self.random.randint(0, self.session.vocab_size, (count, 1)).astype(np.int32)
        requests = [(s.id, t, 0) for s, t in zip(self.seqs, tokens, strict=False)]
        self.session.core.step(requests)


def kernel_name(name: str) -> str:
    found = re.search(r"(\w+_kernel)", name)
    return found[1] if found else name[:40]


def traced(batch: Batch, count: int) -> tuple[float, int, dict[str, tuple[float, int]]]:
    """(GPU seconds of a step, kernels of a step, own seconds and calls a step by kernel)"""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED):
            batch.step(count)
        torch.cuda.synchronize()
    events = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in trace.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    kernels = sorted(e for e in events if "kernel" in e[2])
    starts = [e[0] for e in kernels if "embed_kernel" in e[2]]
    own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    span = 0.0
    for i, begin in enumerate(starts):
        until = starts[i + 1] if i + 1 < len(starts) else float("inf")
        end = begin
        for start, stop, name in kernels:
            if begin <= start < until:
                entry = own[kernel_name(name)]
                entry[0] += max(0, stop - max(end, start)) * 1e-9
                entry[1] += 1
                end = max(end, stop)
        span += (end - begin) * 1e-9
    n = max(1, len(starts))
    return span / n, len(kernels) // n, {k: (s / n, int(c) // n) for k, (s, c) in own.items()}


def distinct_experts(model: Model, context: int, count: int) -> float:
    """Mean number of experts that a layer reads in a step of `count` sequences."""
    taps = ["blk.*.expert_ids"]
    prompt = np.arange(min(64, context), dtype=np.int32)
    with Session(model, n_ctx=256, max_seqs=count, taps=taps) as session:
        batch = Batch(session, prompt, count)
        batch.step(count)
        ids = session.core.taps()
    return float(np.mean([len(np.unique(v)) for v in ids.values()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--synthetic", default="flash-next")
    parser.add_argument("--batch", default="1,8,32,64,128")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kernels", type=int, default=14, help="lines of the breakdown")
    args = parser.parse_args()
    counts = [int(n) for n in args.batch.split(",")]
    begin = time.perf_counter()
    model = Model.synthetic(args.synthetic, device="cuda")
    prompt = np.random.RandomState(1).randint(0, model.vocab_size, args.context).astype(np.int32)
    room = args.context + len(counts) * (WARM_UP + STEPS + TRACED) + 16
    with Session(model, n_ctx=room, max_seqs=max(counts)) as session:
        batch = Batch(session, prompt, max(counts))
        print(f"{args.synthetic}, {', '.join(model.notes)}; {session.backend}")
        print(
            f"context {args.context}, ready after {time.perf_counter() - begin:.1f} s", flush=True
        )
        for count in counts:
            for _ in range(WARM_UP):
                batch.step(count)
            begin = time.perf_counter()
            for _ in range(STEPS):
                batch.step(count)
            wall = (time.perf_counter() - begin) / STEPS
            gpu, nodes, own = traced(batch, count)
            distinct = 512 * (1 - (1 - 10 / 512) ** count)
            size = DENSE_BYTES + count * SEQUENCE_BYTES + LAYERS * EXPERT_BYTES * distinct
            print(
                f"batch {count}: GPU {gpu * 1e3:.3f} ms = {count / gpu:.0f} tok/s, "
                f"{size / gpu * 1e-12:.2f} TB/s, {nodes} kernels; "
                f"with logits on the host {wall * 1e3:.2f} ms = {count / wall:.0f} tok/s"
            )
            top = sorted(own.items(), key=lambda item: -item[1][0])[: args.kernels]
            for name, (seconds, calls) in top:
                print(f"    {name:<26} {seconds * 1e6:9.1f} us  {calls:4d} calls", flush=True)


if __name__ == "__main__":
    main()
