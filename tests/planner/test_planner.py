"""Plans of the released shape on machines of every size, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from imp_runtime.errors import ImpError
from imp_runtime.planner import Machine, ModelSizes, Plan, Request, Tier, plan, synthetic_sizes
from imp_runtime.planner.fit import LEAST_CONTEXT, LEAST_UBATCH

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


# VRAM limit: tier, expert slots, context. By hand: (limit - 8,755,482,112 dense - 1,271,398,400
# embedding - 118,063,104 state - 50,688 a token of context - 252,651,520 workspace - 2^30)
# / 2,764,800; less workspace where n_ubatch is smaller.
BUDGETS = [
    (12 * GIB, Tier.PINNED, 519, 2048),
    (16 * GB, Tier.PINNED, 1037, 32768),
    (16 * GIB, Tier.PINNED, 1463, 32768),
    (24 * GB, Tier.PINNED, 3930, 32768),
    (32 * GIB, Tier.PINNED, 7677, 32768),
    (80 * GB, Tier.VRAM, 24576, 8192),
    (141 * GB, Tier.VRAM, 24576, 32768),
]
# With the embedding on the host and a cache that starts with 4,096 tokens.
LEAN = Request(embedding_in_vram=False, kv_grows=True)
LEAN_BUDGETS = [
    (12 * GB, Tier.PINNED, 575, 8192),
    (12 * GIB, Tier.PINNED, 896, 16384),
    (16 * GB, Tier.PINNED, 2022, 32768),
    (24 * GB, Tier.PINNED, 4916, 32768),
    (32 * GIB, Tier.PINNED, 8663, 32768),
    (80 * GB, Tier.VRAM, 24576, 32768),
    (141 * GB, Tier.VRAM, 24576, 32768),
]


@pytest.mark.parametrize(
    ("request_", "limit", "tier", "slots", "n_ctx"),
    [(Request(), *b) for b in BUDGETS] + [(LEAN, *b) for b in LEAN_BUDGETS],
)
def test_defaults_start(
    released: ModelSizes, request_: Request, limit: int, tier: Tier, slots: int, n_ctx: int
) -> None:
    p = plan(released, Machine(limit, RAM), request_)
    assert (p.tier, p.slots, p.n_ctx) == (tier, slots, n_ctx)
    assert limit - p.vram_bytes >= 0
    if tier is Tier.PINNED:
        assert limit - p.vram_bytes < released.blob_bytes  # nothing is left unused
        assert p.slots_least >= 480
        full = released.cache_bytes(p.kv_tokens_most) - released.cache_bytes(p.kv_tokens_start)
        assert p.vram_bytes + full - (p.slots - p.slots_least) * released.blob_bytes <= limit
        assert sum(part.bytes for part in p.ram if "pinned" in part.name) == EXPERT_BYTES
    assert (p.kv_tokens_start == p.kv_tokens_most) == (tier is Tier.VRAM or not request_.kv_grows)
    assert bool(p.steps) == (n_ctx < 32768)
    assert all(name in p.explain() for name in ("dense weights", "tok/s", f"{n_ctx} tokens"))


def test_more_memory_is_never_slower(released: ModelSizes) -> None:
    for request, budgets in ((Request(), BUDGETS), (LEAN, LEAN_BUDGETS)):
        machines = [Machine(limit, RAM) for limit, *_ in budgets]
        rates = [plan(released, m, request).speed.tokens_per_second for m in machines]
        assert rates == sorted(rates)
    # Measured with 8,700 slots on an H200: 114 tok/s, and 258 with 8 sequences.
    assert rates[4] == pytest.approx(114, rel=0.15)
    eight = plan(released, Machine(32 * GIB, RAM), replace(LEAN, parallel=8, n_ctx=4096))
    assert eight.speed.tokens_per_second == pytest.approx(258, rel=0.15)


def test_vram_at_the_least_and_one_byte_less(released: ModelSizes) -> None:
    least = least_bytes(released, Request())
    p = plan(released, Machine(least, RAM))
    assert (p.n_ctx, p.n_ubatch, p.slots_least) == (LEAST_CONTEXT, LEAST_UBATCH, 480)
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
    staged = plan(released, short, Request(pageable=True))
    assert staged.tier is Tier.PAGEABLE and staged.slots == 7677
    pinned = plan(released, Machine(32 * GIB, EXPERT_BYTES))
    assert p.speed.step_ms > staged.speed.step_ms > pinned.speed.step_ms


def test_all_experts_at_the_need_and_one_byte_less(released: ModelSizes) -> None:
    request = Request(n_ctx=4096)
    parts = plan(released, Machine(141 * GB, RAM), request)
    assert plan(released, Machine(parts.vram_bytes, 0), request).tier is Tier.VRAM  # needs no RAM
    below = plan(released, Machine(parts.vram_bytes - 1, RAM), request)
    assert (below.tier, below.slots) == (Tier.PINNED, 24575)


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


def test_share_and_embedding(released: ModelSizes) -> None:
    machine = Machine(32 * GIB, RAM)
    full: Plan = plan(released, machine)
    half = plan(released, machine, Request(expert_share=0.5))
    assert abs(half.slots - full.slots / 2) <= 1
    with pytest.raises(ImpError, match="a cache share of 0.01 leaves 76 expert slots"):
        plan(released, machine, Request(expert_share=0.01))
    outside = plan(released, machine, Request(embedding_in_vram=False))
    assert outside.slots - full.slots == pytest.approx(1_271_398_400 / 2_764_800, abs=1)


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
