"""Plans of the released shape on machines of every size, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.planner import Machine, ModelSizes, Plan, Request, Tier, plan, synthetic_sizes
from imp_runtime.planner.fit import LEAST_CONTEXT, LEAST_UBATCH
from imp_runtime.planner.types import ONE_CONTEXT, Part

GB, GIB = 10**9, 1 << 30
RAM = 128 * GIB
EXPERT_BYTES = 67_947_724_800


@pytest.fixture(scope="module")
def released() -> ModelSizes:
    return synthetic_sizes("flash-next")


def least_bytes(sizes: ModelSizes, request: Request, ram: int = RAM) -> int:
    """The number that a refusal names."""
    with pytest.raises(ImpError) as caught:
        plan(sizes, Machine(1, ram), request)
    match = re.search(r"at least (\d+) bytes of VRAM", str(caught.value))
    assert match, caught.value
    return int(match[1])


def test_sizes_of_the_released_shape(released: ModelSizes) -> None:
    assert released.expert_bytes == EXPERT_BYTES
    assert (released.expert_layers, released.experts, released.experts_used) == (48, 512, 10)
    assert released.blob_bytes == 2_764_800
    assert released.embedding_bytes == 1_271_398_400
    # 8.62 GB in BF16; routers are F32, and so are the experts' scales.
    assert released.dense_bytes == pytest.approx(8.62e9, rel=0.02)
    assert (released.row_bytes, released.page_bytes) == (118_063_104, 811_008)
    assert (released.vocab, released.context_length) == (248_320, 262_144)
    small = synthetic_sizes("flash-next", dense="8bit", cache_type_k="f16", cache_type_v="f16")
    assert small.dense_bytes == pytest.approx(8.62e9 * 34 / 64, rel=0.05)
    assert small.page_bytes == 417_792


# VRAM limit: tier, expert slots, context. By hand: (limit - 8,755,482,112 dense - 118,063,104 state
# - 50,688 a token of context - 229,376,000 workspace - 896 * 2^20) / 2,764,800 places; as many of
# them as a layer has slots are for experts that are not kept.
BUDGETS = [
    (12 * GB, Tier.PINNED, 657, 2048),
    (12 * GIB, Tier.PINNED, 933, 4096),
    (16 * GB, Tier.PINNED, 1964, 8192),
    (16 * GIB, Tier.PINNED, 2382, 8192),
    (24 * GB, Tier.PINNED, 4651, 16384),
    (24 * GIB, Tier.PINNED, 5279, 16384),
    (32 * GIB, Tier.PINNED, 8027, 32768),
    (80 * GB, Tier.VRAM, 24576, 32768),
    (141 * GB, Tier.VRAM, 24576, 32768),
]


@pytest.mark.parametrize(("limit", "tier", "slots", "n_ctx"), BUDGETS)
def test_defaults_start(
    released: ModelSizes, limit: int, tier: Tier, slots: int, n_ctx: int
) -> None:
    p = plan(released, Machine(limit, RAM))
    assert (p.tier, p.slots, p.n_ctx) == (tier, slots, n_ctx)
    assert limit - p.vram_bytes >= 0
    if tier is Tier.PINNED:
        assert limit - p.vram_bytes < 2 * released.blob_bytes  # nothing is left unused
        assert p.slots >= 480
        assert sum(part.bytes for part in p.ram if "pinned" in part.name) == EXPERT_BYTES
    assert p.kv_tokens == n_ctx
    assert bool(p.steps) == (n_ctx < 32768)
    assert all(name in p.explain() for name in ("dense weights", "tok/s", f"{n_ctx} tokens"))


def test_more_memory_is_never_slower(released: ModelSizes) -> None:
    rates = [plan(released, Machine(n, RAM)).speed.tokens_per_second for n, *_ in BUDGETS]
    assert rates == sorted(rates)


# Rows, slots: tok/s on an H200 with the usual policy (docs/measured.md).
MEASURED = [(1, 999, 43), (1, 2520, 65), (1, 5564, 107), (1, 8546, 139.7), (8, 8189, 246)]


@pytest.mark.parametrize(("rows", "slots", "rate"), MEASURED)
def test_predictions_are_near_what_was_measured(
    released: ModelSizes, rows: int, slots: int, rate: float
) -> None:
    def experts(kept: int) -> int:
        shape = {"layers": 48, "experts": 512, "slots": kept}
        return (kept + _core.staging_slots(**shape, policy="lrfu")) * released.blob_bytes

    request = Request(n_ctx=1024, n_ubatch=64, parallel=rows, policy="lrfu")
    vram = least_bytes(released, request) - experts(480 * rows) + experts(slots)
    p = plan(released, Machine(vram, RAM), request)
    assert p.slots == slots
    assert p.speed.tokens_per_second == pytest.approx(rate, rel=0.15)


def test_vram_at_the_least_and_one_byte_less(released: ModelSizes) -> None:
    least = least_bytes(released, Request())
    p = plan(released, Machine(least, RAM))
    assert (p.n_ctx, p.n_ubatch, p.slots) == (LEAST_CONTEXT, LEAST_UBATCH, 480)
    assert [step.split(" ")[0] for step in p.steps] == ["context", "n_ubatch"]
    with pytest.raises(ImpError, match=rf"{least} bytes of VRAM .* {least - 1} may be used"):
        plan(released, Machine(least - 1, RAM))


def test_what_was_asked_for_is_not_made_smaller(released: ModelSizes) -> None:
    request = Request(n_ctx=32768, n_ubatch=512)
    least = least_bytes(released, request)
    p = plan(released, Machine(least, RAM), request)
    assert (p.n_ctx, p.n_ubatch, p.steps) == (32768, 512, ())
    with pytest.raises(ImpError, match="may be used"):
        plan(released, Machine(least - 1, RAM), request)
    only_context = plan(released, Machine(least - 1, RAM), replace(request, n_ubatch=None))
    assert (only_context.n_ctx, only_context.n_ubatch) == (32768, 256)


def test_ram_at_the_need_and_one_byte_less(released: ModelSizes) -> None:
    assert plan(released, Machine(32 * GIB, EXPERT_BYTES)).tier is Tier.PINNED
    short = Machine(32 * GIB, EXPERT_BYTES - 1)
    p = plan(released, short)
    assert (p.tier, p.slots, p.vram) == (Tier.CPU, 0, ())
    assert f"{EXPERT_BYTES} bytes of experts cannot be pinned" in p.steps[0]
    assert str(EXPERT_BYTES - 1) in p.steps[0]
    pinned = plan(released, Machine(32 * GIB, EXPERT_BYTES))
    assert pinned.tier is Tier.PINNED and p.speed.step_ms > pinned.speed.step_ms


def test_all_experts_at_the_need_and_one_byte_less(released: ModelSizes) -> None:
    request = Request(n_ctx=4096)
    parts = plan(released, Machine(141 * GB, RAM), request)
    assert plan(released, Machine(parts.vram_bytes, 0), request).tier is Tier.VRAM  # needs no RAM
    below = plan(released, Machine(parts.vram_bytes - 1, RAM), request)
    assert below.tier is Tier.PINNED
    assert below.slots + below.slots // 48 == 24575


def test_a_smaller_context_keeps_every_expert_in_vram(released: ModelSizes) -> None:
    most = plan(released, Machine(141 * GB, RAM)).vram_bytes
    p = plan(released, Machine(most - 1, RAM))
    assert (p.tier, p.n_ctx) == (Tier.VRAM, 16384)
    assert p.steps == ("context 32768 -> 16384: with it all 24576 experts fit in VRAM",)


def test_several_sequences_need_more_slots(released: ModelSizes) -> None:
    for parallel, slots in ((1, 480), (3, 1440), (64, 24576)):
        request = Request(n_ctx=2048, n_ubatch=64, parallel=parallel)
        with pytest.raises(ImpError, match=f"{slots} expert slots"):
            plan(released, Machine(1, RAM), request)


def test_without_a_device(released: ModelSizes) -> None:
    p = plan(released, Machine(0, RAM))
    assert (p.tier, p.steps) == (Tier.CPU, ())
    need = sum(part.bytes for part in p.ram)
    small = plan(released, Machine(0, need))
    assert small.n_ctx == 32768 and "read from disk again and again" in small.steps[0]
    assert plan(released, Machine(0, need - 1)).n_ctx == 16384
    with pytest.raises(ImpError, match=f"{need} bytes of RAM are needed .* {need - 1} may be used"):
        plan(released, Machine(0, need - 1), Request(n_ctx=32768))


def test_share(released: ModelSizes) -> None:
    machine = Machine(32 * GIB, RAM)
    full: Plan = plan(released, machine, Request(policy="lru"))
    half = plan(released, machine, Request(expert_share=0.5, policy="lru"))
    assert abs(half.slots - full.slots / 2) <= 1
    few = int(full.slots * 0.01)
    with pytest.raises(ImpError, match=f"a cache share of 0.01 leaves {few} expert slots"):
        plan(released, machine, Request(expert_share=0.01, policy="lru"))


def test_the_embedding_stays_on_the_host(released: ModelSizes) -> None:
    p = plan(released, Machine(32 * GIB, RAM))
    assert Part("mapped token embedding", 1_271_398_400) in p.ram
    tied = replace(released, embedding_bytes=0, dense_bytes=released.dense_bytes + GB)
    assert all("embedding" not in part.name for part in plan(tied, Machine(32 * GIB, RAM)).ram)


def test_kept_sequences_need_states_but_no_slots(released: ModelSizes) -> None:
    request = Request(n_ctx=2048, n_ubatch=64, parallel=2, cache_tokens=ONE_CONTEXT)
    least = least_bytes(released, request)
    kept = least_bytes(released, replace(request, kept=10))
    assert kept - least == 10 * released.row_bytes
    decoding = least_bytes(released, replace(request, parallel=12))
    assert decoding - kept >= 10 * 480 * released.blob_bytes
    p = plan(released, Machine(kept, RAM), replace(request, kept=10))
    assert (p.slots, p.kv_tokens) == (960, 2048)
    with pytest.raises(ImpError, match=rf"at least {kept} bytes of VRAM .* {kept - 1} may be used"):
        plan(released, Machine(kept - 1, RAM), replace(request, kept=10))


def test_checkpoints_are_states(released: ModelSizes) -> None:
    request = Request(n_ctx=2048, n_ubatch=64, parallel=3)
    more = least_bytes(released, replace(request, state_rows=3)) - least_bytes(released, request)
    assert more == 2 * 3 * released.row_bytes


def test_workspace_by_hand(released: ModelSizes) -> None:
    def workspace(**wanted: Any) -> int:
        p = plan(released, Machine(64 * GIB, RAM), Request(**wanted))
        return next(part.bytes for part in p.vram if part.name == "workspace")

    def arena(tokens: int, outputs: int) -> int:
        layers, head = tokens * 10240 * 6.1, tokens * 10240 * 1.3 + outputs * 248320
        return 4 * int(max(layers, head))

    # 64 parts of a token's 24 heads of 256, with two more numbers each, of 64 tokens.
    attention = 4 * 64 * 64 * 24 * 258
    assert workspace(n_ctx=4096) == arena(512, 64) + attention
    assert workspace(n_ctx=4096, outputs=512) == arena(512, 512) + attention
    assert workspace(n_ctx=4096, outputs=1, parallel=8) == arena(512, 8) + attention
    assert workspace(n_ctx=4096, n_ubatch=16) == arena(16, 16) + attention // 4
    assert workspace(n_ctx=4096, n_ubatch=17) == arena(17, 17) + 85 * 2**20  # of large maps
    assert workspace(n_ctx=262144, n_ubatch=512) == arena(512, 64) + 4 * 512 * 65537
    assert workspace(n_ctx=262144, n_ubatch=2048) == arena(2048, 64) + 256 * 2**20


def test_how_many_tokens_the_cache_holds(released: ModelSizes) -> None:
    def tokens(**wanted: Any) -> tuple[int, int]:
        p = plan(released, Machine(32 * GIB, RAM), Request(**wanted))
        return p.n_ctx, p.kv_tokens

    assert tokens(n_ctx=4096, parallel=4) == (4096, 16384)
    assert tokens(n_ctx=4096, parallel=4, kept=2) == (4096, 24576)
    assert tokens(n_ctx=4096, parallel=4, cache_tokens=ONE_CONTEXT) == (4096, 4096)
    assert tokens(parallel=4, cache_tokens=ONE_CONTEXT) == (32768, 32768)
    assert tokens(parallel=4, cache_tokens=10000) == (10000, 10000)
    assert tokens(parallel=4) == (8192, 32768)


@pytest.mark.parametrize(
    ("policy", "places"), [("lru", 0), ("pool", 0), ("lrfu:8", 160), ("pool-lrfu", 512)]
)
def test_admission_needs_places_that_keep_nothing(
    released: ModelSizes, policy: str, places: int
) -> None:
    machine = Machine(32 * GIB, RAM)
    p = plan(released, machine, Request(policy=policy))
    parts = {part.name: part.bytes // released.blob_bytes for part in p.vram}
    staged = parts.get("experts that are not kept", 0)
    assert staged == pytest.approx(places, abs=20)
    without = plan(released, machine, Request(policy="lru"))
    assert p.slots + staged == pytest.approx(without.slots, abs=1)
    assert 0 <= machine.vram_bytes - p.vram_bytes < 2 * released.blob_bytes


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(n_ctx=262145), "context is 262145, it must be from 1 to 262144"),
        (Request(n_ctx=-1), "context is -1"),
        (Request(parallel=0), "parallel sequences is 0, it must be from 1 to 65536"),
        (Request(n_ubatch=65537), "n_ubatch is 65537, it must be from 1 to 65536"),
        (Request(expert_share=0.0), "cache share is 0.0"),
        (Request(expert_share=float("nan")), "cache share is nan"),
        (Request(policy="best"), "expert policy 'best'"),
        (Request(headroom_bytes=-1), "below 0"),
    ],
)
def test_refusals(released: ModelSizes, request_: Request, message: str) -> None:
    with pytest.raises(ImpError, match=message):
        plan(released, Machine(32 * GIB, RAM), request_)


def test_a_policy_is_checked_where_every_expert_fits(released: ModelSizes) -> None:
    with pytest.raises(ImpError, match="expert policy 'best'"):
        plan(released, Machine(141 * GB, RAM), Request(policy="best"))
    with pytest.raises(ImpError, match="expert policy 'best'"):
        plan(released, Machine(0, RAM), Request(policy="best"))


def test_bandwidths(released: ModelSizes) -> None:
    slow = plan(released, Machine(32 * GIB, RAM, pcie_bandwidth=24.5e9)).speed
    usual = plan(released, Machine(32 * GIB, RAM)).speed
    times, again = dict(usual.milliseconds), dict(slow.milliseconds)
    assert again.pop("misses over PCIe") == pytest.approx(2 * times.pop("misses over PCIe"))
    assert again == times
    with pytest.raises(ImpError, match="bandwidth is 0"):
        plan(released, Machine(32 * GIB, RAM, vram_bandwidth=0))


def test_as_many_sequences_as_there_can_be(released: ModelSizes) -> None:
    request = Request(parallel=65536, n_ctx=1, n_ubatch=1)
    p = plan(released, Machine(1 << 50, RAM), request)
    assert p.tier is Tier.VRAM and 250 < p.distinct <= 512
