"""Decode speed of a model of random weights on CUDA, by batch size, with the time of each kernel.

    python tools/gpu_decode.py [--synthetic flash-next] [--batch 1,8,16,32,64,128] [--context 4096]

The sequences of a batch are forks of one prompt, so their cache pages are shared, and each goes on
with its own tokens. GPU time is from the first kernel of a step that samples tokens to the end of
its last one; a kernel's own time is what it adds to that (kernels overlap at the edges).
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from imp_runtime._core import USUAL_EXPERT_POLICY
from imp_runtime.model import Model
from imp_runtime.placement import Limits, vram_in_use
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Session
from imp_runtime.stats import ExpertCounts, counter
from imp_runtime.units import gib, parse_bytes

WARM_UP, STEPS, TRACED = 3, 8, 4
DENSE_BYTES = 8.75e9  # BF16 weights that every step of the released shape reads, fp32 of routers
STREAM_BYTES = 94 * 2.0 * (324 + 320) * 10240  # of them: low rank and gates of residual streams
EXPERT_BYTES = 2764800.0
SEQUENCE_BYTES = 0.226e9  # recurrent state, read and written
LAYERS = 48
PARTS = {
    "misses over the bus": "gather_kernel",
    "finding experts": "resolve",
    "experts": "up_tiles|down_tiles|sum_mma|ffn|combine|group_kernel|swiglu",
    "choice of experts": "route",
    "residual streams": "read_|residual|inject|mix",
    "attention": "attend|score|select|merge|rope|index|head_norm|kv_store",
    "delta net": "delta|conv_silu|gated_norm",
    "dense maps": "linear|Kernel|gemm|nvjet|split|join",
    "tokens": "sample|embed|ngram|outputs",
}
"""Parts of a step by the first pattern that a kernel's name has."""


class Batch:
    """`n` forks of a prompt in one session."""

    def __init__(self, session: Session, prompt: np.ndarray, n: int):
        self.session, self.n = session, n
        self.random = np.random.RandomState(7)
        first = session.open()
        first.extend(prompt, outputs="none")
        self.seqs = [first, *(first.fork() for _ in range(n - 1))]

    def step(self, count: int, params: SamplingParams | None = None) -> None:
        """One token for each of the first `count` sequences; `params`: the step chooses the next,
        otherwise it returns logits."""
        tokens = self.random.randint(0, self.session.vocab_size, (count, 1)).astype(np.int32)
        requests = [(s.id, t, 0) for s, t in zip(self.seqs, tokens, strict=False)]
        if params is None:
            self.session.core.step(requests)
        else:
            self.session.core.choose(requests, [params.sampler().next()] * count)


def wall_time(batch: Batch, count: int, steps: int, params: SamplingParams | None) -> float:
    """Seconds of a step."""
    for _ in range(WARM_UP):
        batch.step(count, params)
    begin = time.perf_counter()
    for _ in range(steps):
        batch.step(count, params)
    return (time.perf_counter() - begin) / steps


@dataclass
class Times:
    """Seconds of a step that ends with greedy tokens (each run), sampled ones or logits."""

    greedy: list[float]
    sampled: float
    logits: float
    memory: str
    experts: ExpertCounts | None  # of the steps with logits


def wall_times(batch: Batch, count: int, steps: int, repeat: int) -> Times:
    greedy = [wall_time(batch, count, steps, SamplingParams(temperature=0)) for _ in range(repeat)]
    sampled = wall_time(batch, count, steps, SamplingParams())
    experts = counter(batch.session.expert_stats)
    logits = wall_time(batch, count, steps, None)
    return Times(greedy, sampled, logits, memory_line(batch.session), experts())


def kernel_name(name: str) -> str:
    found = re.search(r"(\w+_kernel)", name)
    return found[1] if found else name[:40]


def traced(batch: Batch, count: int) -> tuple[float, int, dict[str, tuple[float, int]]]:
    """(GPU seconds of a step, kernels of a step, own seconds and calls a step by kernel)"""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED):
            batch.step(count, SamplingParams())
        torch.cuda.synchronize()
    events = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in trace.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    kernels = sorted(e for e in events if not e[2].startswith("Mem"))  # copies and fills
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


def by_part(own: dict[str, tuple[float, int]], read: dict[str, float]) -> str:
    """ms a step of each part, and TB/s of what it must `read`."""
    sums: dict[str, float] = defaultdict(float)
    for name, (seconds, _) in own.items():
        part = next((p for p, pattern in PARTS.items() if re.search(pattern, name)), "others")
        sums[part] += seconds
    order = sorted(sums.items(), key=lambda item: -item[1])
    return "ms by part: " + ", ".join(
        f"{part} {s * 1e3:.2f}" + (f" ({read[part] / s * 1e-12:.2f} TB/s)" if part in read else "")
        for part, s in order
    )


def memory_line(session: Session) -> str:
    """Device memory that is in use, all processes and CUDA itself included, beside the plan."""
    line = f"device memory: {gib(vram_in_use())} in use"
    if (plan := session.plan) is None:
        return line
    over = ": MORE THAN THE LIMIT" if vram_in_use() > plan.vram_limit else ""
    return f"{line}, {gib(plan.vram_bytes)} planned, limit {gib(plan.vram_limit)}{over}"


def report(
    count: int,
    times: Times,
    gpu: float,
    nodes: int,
    own: dict[str, tuple[float, int]],
    args: argparse.Namespace,
    slots: int,
) -> None:
    """Prints what was measured of a batch size."""
    distinct = 512 * (1 - (1 - 10 / 512) ** count)
    read = {
        "dense maps": DENSE_BYTES - STREAM_BYTES,
        "residual streams": STREAM_BYTES,
        "experts": LAYERS * EXPERT_BYTES * distinct,
        "delta net": count * SEQUENCE_BYTES,
    }
    size = sum(read.values())
    greedy = statistics.median(times.greedy)
    print(
        f"batch {count}: GPU {gpu * 1e3:.3f} ms = {count / gpu:.0f} tok/s, "
        f"{size / gpu * 1e-12:.2f} TB/s, {nodes} kernels; "
        f"with logits on the host {times.logits * 1e3:.2f} ms = {count / times.logits:.0f} tok/s, "
        f"greedy tokens {greedy * 1e3:.2f} ms = {count / greedy:.0f} tok/s, "
        f"sampled {times.sampled * 1e3:.2f} ms = {count / times.sampled:.0f} tok/s"
    )
    print(f"    {times.memory}")
    print(f"    {by_part(own, read if args.synthetic == 'flash-next' else {})}")
    if args.repeat > 1:
        print(
            f"    greedy tokens, {args.repeat} runs of {args.tokens}: "
            f"{count / max(times.greedy):.1f} to {count / min(times.greedy):.1f} tok/s, "
            f"median {count / greedy:.1f}"
        )
    if (found := times.experts) is not None:
        steps = WARM_UP + args.tokens
        print(
            f"    routing {args.routing}, {args.policy}, {slots} slots: hit rate "
            f"{found.hit_rate:.4f}, {found.misses / steps:.1f} experts = "
            f"{found.miss_bytes / steps * 1e-6:.1f} MB in "
            f"{found.fetch_seconds / steps * 1e3:.2f} ms over the bus a step = "
            f"{found.miss_bytes / max(1e-9, found.fetch_seconds) * 1e-9:.1f} GB/s"
        )
    top = sorted(own.items(), key=lambda item: -item[1][0])[: args.kernels]
    for name, (seconds, calls) in top:
        print(f"    {name:<26} {seconds * 1e6:9.1f} us  {calls:4d} calls", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--synthetic", default="flash-next")
    parser.add_argument("--batch", default="1,8,16,32,64,128")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--kernels", type=int, default=14, help="lines of the breakdown")
    parser.add_argument("--slots", type=int, help="experts in device memory, others on the host")
    parser.add_argument("--vram-limit", help="as many slots as such a card has, as 32GiB")
    parser.add_argument("--ngram-file", help="n-gram table, written if it does not exist")
    parser.add_argument("--policy", default=USUAL_EXPERT_POLICY)
    parser.add_argument("--routing", default="model", help="or prose, uniform, trace:FILE")
    parser.add_argument("--no-overlap", action="store_true", help="experts after their gather")
    parser.add_argument("--tokens", type=int, default=STEPS, help="measured steps of a batch size")
    parser.add_argument("--repeat", type=int, default=1, help="runs of greedy tokens")
    args = parser.parse_args()
    counts = [int(n) for n in args.batch.split(",")]
    begin = time.perf_counter()
    limit = None if args.vram_limit is None else parse_bytes(args.vram_limit, "--vram-limit")
    limits = Limits(vram_bytes=limit, expert_policy=args.policy)
    model = Model.synthetic(
        args.synthetic, device="cuda", limits=limits, table_file=args.ngram_file
    )
    prompt = np.random.RandomState(1).randint(0, model.vocab_size, args.context).astype(np.int32)
    room = args.context + len(counts) * ((2 + args.repeat) * (WARM_UP + args.tokens) + TRACED) + 16
    options = {"expert_slots": args.slots, "expert_policy": args.policy, "routing": args.routing}
    options["batch_invariant"] = args.batch_invariant
    options["overlap_gathers"] = not args.no_overlap
    most = max(counts)
    with Session(model, n_ctx=room, max_seqs=most, max_outputs=most, **options) as session:
        batch = Batch(session, prompt, max(counts))
        print(f"{args.synthetic}, {', '.join(model.notes)}; {session.backend}")
        s = session.expert_stats()
        slots, size = s["slots"], s["store_bytes"]
        if slots:
            print(
                f"store: {size / 2**30:.1f} GiB, touched and pinned in {s['pin_seconds']:.1f} s, "
                f"filled in {s['fill_seconds']:.1f} s = {size * 1e-9 / s['fill_seconds']:.1f} GB/s"
            )
        print(
            f"context {args.context}, ready after {time.perf_counter() - begin:.1f} s; "
            f"{memory_line(session)}",
            flush=True,
        )
        # The profiler makes later launches of graphs slower: it comes when all times are taken.
        times = {count: wall_times(batch, count, args.tokens, args.repeat) for count in counts}
        for count in counts:
            gpu, nodes, own = traced(batch, count)
            report(count, times[count], gpu, nodes, own, args, slots)


if __name__ == "__main__":
    main()
