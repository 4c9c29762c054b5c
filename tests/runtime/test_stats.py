"""What sessions have done, as values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imp_runtime import LLM, SamplingParams
from imp_runtime.stats import ExpertCheck, ExpertCounts, Stats, counter
from imp_runtime.timings import Timings

File = Callable[[str], Path]


def cache(wanted: list[int], hits: list[int]) -> dict[str, object]:
    fetch_ns = [10**6 * (w - h) for w, h in zip(wanted, hits, strict=True)]
    shape = {"slots": 6, "blob_bytes": 1000}
    return {**shape, "wanted": wanted, "hits": hits, "fetch_ns": fetch_ns}


def test_expert_counts() -> None:
    assert ExpertCounts.of({"slots": 0, "blob_bytes": 0, "wanted": [], "hits": []}) is None
    counts = ExpertCounts.of(cache([30, 10], [20, 5]))
    assert counts is not None
    assert (counts.misses, counts.miss_bytes, counts.hit_rate) == (15, 15000, 0.625)
    assert str(counts) == "hit rate 62.50%, 15 of 40 experts missed, 0.000 GB over PCIe in 0.015 s"
    assert (counts - counts).hit_rate == 0.0


def test_expert_check() -> None:
    compared = "4 experts in VRAM and 9 on the host compared, "
    assert str(ExpertCheck(4, 9, [])) == compared + "all are as they were read"
    assert str(ExpertCheck(4, 9, [(2, 7, 3), (2, 8, -1)])) == (
        compared + "2 differ from what was read, first: layer 2, expert 7, slot 3"
    )


def test_counter() -> None:
    shown = [cache([30, 10], [20, 5]), cache([40, 10], [28, 5])]
    since = counter(lambda: shown[0])
    shown.pop(0)
    assert since() == ExpertCounts(6, 1000, 10, 8, pytest.approx(0.002))
    nothing = {"slots": 0, "blob_bytes": 0, "wanted": [], "hits": []}
    assert counter(lambda: nothing)() is None


def test_stats_are_copies_that_subtract() -> None:
    timings = Timings(10, 2.0, 4, 1.0)
    before = Stats.of(timings, cache([4], [3]))
    timings.decode_tokens += 6
    timings.decode_seconds += 2.0
    since = Stats.of(timings, cache([10], [8])) - before
    assert (since.timings.prompt_tokens, since.timings.decode_per_second) == (0, 3.0)
    assert since.experts == ExpertCounts(6, 1000, 6, 5, pytest.approx(0.001))


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_all_generations_count(gguf_file: File, n_parallel: int) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    prompts = ["The old house", "x", "At noon the ship"]
    steps: list[None] = []
    with LLM(gguf_file("prose"), device="cpu", n_ctx=128, n_parallel=n_parallel) as llm:
        done = llm.generate(prompts, params, on_step=lambda: steps.append(None))
        stats = llm.stats()
    assert stats.experts is None and len(steps) >= 8
    assert stats.timings.prompt_tokens == sum(len(c.prompt_token_ids) for c in done)
    # Together they read their prompts in one step, and then decode in seven.
    assert stats.timings.decode_tokens == 21
    alone = sum(c.timings.decode_seconds for c in done)
    assert 0 < stats.timings.decode_seconds <= alone * (1.01 if n_parallel == 1 else 0.7)
    assert all(0 < c.timings.first_token_seconds for c in done)
