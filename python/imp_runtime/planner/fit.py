"""Fits a model into a machine: experts take what is left, context and batch shrink first."""

from __future__ import annotations

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.expert_sim import predict
from imp_runtime.planner.machine import Machine
from imp_runtime.planner.sizes import ModelSizes
from imp_runtime.planner.speed import decode_speed
from imp_runtime.planner.types import ONE_CONTEXT, Part, Plan, Request, Tier
from imp_runtime.units import gib

USUAL_CONTEXT = 32768
LEAST_CONTEXT = 2048
"""An automatic context is not made smaller than this."""
CONTEXT_SHARE = 0.1
"""An automatic context's keys and values take at most this of what experts could have."""
USUAL_UBATCH = 512
LEAST_UBATCH = 64
"""An automatic n_ubatch is not made smaller than this."""
HEADROOM_BYTES = 896 << 20
"""For the CUDA context (552 MB on an H200) and for modules, graphs and tables (142 MB), a third of
them spare."""
LAYER_VALUES, HEAD_VALUES = 6.1, 1.3
"""fp32 values a token of a step for each residual channel, while layers run (6.04 on the released
shape) and beside the logits (1.28): tests/cpp/programs_test.cpp."""
KEY_PARTS, SPLIT_TOKENS = 64, 64
"""Attention of steps of so many tokens keeps a result for each part of the keys
(cuda/attention.cu; cuda/attend_mma.cu takes no more)."""
MOST_SCORE_BYTES = 256 << 20
"""Of blocks that the indexer scores at once (cuda/indexer.cu)."""
LARGE_MAP_BYTES, LARGE_MAP_TOKENS = 85 << 20, 17
"""Linear maps of steps of so many tokens and more: halves of activations, products, and cuBLASLt's
workspace (cuda/linear_large.cu)."""
MAX_PARALLEL = 65536
MAX_CTX = 1 << 30


def plan(model: ModelSizes, machine: Machine, request: Request | None = None) -> Plan:
    """Decide what goes where.

    Args:
        model: sizes of the parts.
        machine: limits and bandwidths.
        request: what is wanted; None = everything is chosen.

    Returns:
        The plan; pure, nothing is measured or loaded.

    Raises:
        ImpError: a number is out of range, or memory is too small for the least that the request
            allows (naming both numbers).
    """
    fit = _Fit(model, machine, request or Request())
    return fit.on_device() if machine.vram_bytes else fit.on_cpu(())


class _Fit:
    """Numbers that shrink while the plan is made."""

    def __init__(self, model: ModelSizes, machine: Machine, request: Request):
        self.model, self.machine, self.request = model, machine, request
        _check(model, machine, request)
        fixed_cache = request.cache_tokens is not None and request.cache_tokens != ONE_CONTEXT
        self.context_open = request.n_ctx is None and not fixed_cache
        self.n_ctx = request.n_ctx or min(USUAL_CONTEXT, model.context_length)
        if fixed_cache:
            self.n_ctx = min(self.n_ctx, self.kv_tokens)
        self.n_ubatch = request.n_ubatch or min(USUAL_UBATCH, self.n_ctx)
        self.steps: list[str] = []
        rows = request.parallel
        self.pairs = model.expert_layers * model.experts
        self.least_slots = model.expert_layers * min(model.experts, model.experts_used * rows)

    @property
    def kv_tokens(self) -> int:
        """Of all sequences together."""
        r = self.request
        if r.cache_tokens is None:
            return self.n_ctx * (r.parallel + r.kept)
        return self.n_ctx if r.cache_tokens == ONE_CONTEXT else r.cache_tokens

    def working(self) -> tuple[Part, ...]:
        """What steps need beside weights, on any device."""
        m, r = self.model, self.request
        return (
            Part("states", m.row_bytes * r.state_rows * (r.parallel + r.kept)),
            Part("keys and values", m.cache_bytes(self.kv_tokens)),
            Part("workspace", self.workspace()),
        )

    def workspace(self) -> int:
        """Activations of the largest step, and the buffer that its kernels share."""
        m, tokens = self.model, self.n_ubatch
        decoding = 1 << (self.request.parallel - 1).bit_length()  # padded to no more
        outputs = min(tokens, max(self.request.outputs, decoding))
        streams = tokens * m.channels
        arena = max(streams * LAYER_VALUES, streams * HEAD_VALUES + outputs * m.vocab)
        attention = min(tokens, SPLIT_TOKENS) * KEY_PARTS * m.attention_values
        blocks = self.n_ctx // m.block_tokens + 1 if m.block_tokens else 0
        scores = min(MOST_SCORE_BYTES // 4, tokens * blocks)
        maps = LARGE_MAP_BYTES // 4 if tokens >= LARGE_MAP_TOKENS else 0
        return 4 * (int(arena) + max(attention, scores, maps))

    def parts(self) -> list[Part]:
        """VRAM beside the experts."""
        m, r = self.model, self.request
        headroom = HEADROOM_BYTES if r.headroom_bytes is None else r.headroom_bytes
        found = [
            Part("dense weights", m.dense_bytes),
            *self.working(),
            Part("headroom", headroom),
        ]
        return [part for part in found if part.bytes]

    def beside_experts(self) -> int:
        """Bytes of parts()."""
        return sum(part.bytes for part in self.parts())

    def staging(self, slots: int) -> int:
        """Places of experts that a step reads and a policy with admission does not keep."""
        m = self.model
        if not m.expert_layers:
            return 0
        return _core.staging_slots(
            layers=m.expert_layers, experts=m.experts, slots=slots, policy=self.request.policy
        )

    def needed(self, experts: int) -> int:
        """VRAM with room for so many experts."""
        return self.beside_experts() + experts * self.model.blob_bytes

    def least(self) -> int:
        """VRAM with the smallest cache of experts."""
        return self.needed(self.least_slots + self.staging(self.least_slots))

    def on_device(self) -> Plan:
        vram = self.machine.vram_bytes
        wanted = self.n_ctx
        if not self._whole_model():
            self._share_context()
            if self.least() > vram:
                self._shrink()
        least = self.least()
        if least > vram:
            raise ImpError(
                f"{self.model.name}: at least {least} bytes of VRAM are needed ({gib(least)}: "
                f"{self._listing()}), {vram} may be used ({gib(vram)})"
            )
        if self.n_ctx < wanted and not self.steps:
            self.steps.append(
                f"context {wanted} -> {self.n_ctx}: with it all {self.pairs} experts fit in VRAM"
            )
        if self.needed(self.pairs) <= vram and self.request.expert_share == 1.0:
            return self._plan(Tier.VRAM, self.pairs)
        store = self.model.expert_bytes
        if store <= self.machine.ram_bytes:
            return self._cached()
        reason = (
            f"{store} bytes of experts cannot be pinned ({gib(store)}), "
            f"{self.machine.ram_bytes} may be used ({gib(self.machine.ram_bytes)})"
        )
        return self.on_cpu((*self.steps, f"{reason}: everything runs on the CPU"))

    def _whole_model(self) -> bool:
        """Take a smaller automatic context if with it no expert has to stay outside."""
        if self.context_open and self.request.expert_share == 1.0:
            for n_ctx in _halves(self.n_ctx, min(LEAST_CONTEXT * 4, self.n_ctx)):
                before, self.n_ctx = self.n_ctx, n_ctx
                if self.needed(self.pairs) <= self.machine.vram_bytes:
                    return True
                self.n_ctx = before
        return self.needed(self.pairs) <= self.machine.vram_bytes

    def _share_context(self) -> None:
        """An automatic context takes its share of what experts could have, and no more."""
        before = self.n_ctx
        if not self.context_open:
            return
        for self.n_ctx in _halves(before, min(LEAST_CONTEXT, before)):
            cache = self.model.cache_bytes(self.kv_tokens)
            free = self.machine.vram_bytes - self.beside_experts() + cache
            if cache <= CONTEXT_SHARE * free:
                break
        if self.n_ctx != before:
            self.steps.append(
                f"context {before} -> {self.n_ctx}: keys and values of {before} tokens would take "
                f"more than {CONTEXT_SHARE:.0%} of the VRAM that experts could have"
            )

    def _listing(self) -> str:
        parts = [f"{p.name} {gib(p.bytes)}" for p in self.parts()]
        experts = gib(self.least_slots * self.model.blob_bytes)
        return ", ".join([*parts, f"{self.least_slots} expert slots {experts}"])

    def _shrink(self) -> None:
        """Context first, then the prefill step, as far as the request leaves them open."""
        vram = self.machine.vram_bytes
        for what, least, open_ in (
            ("n_ctx", LEAST_CONTEXT, self.context_open),
            ("n_ubatch", LEAST_UBATCH, self.request.n_ubatch is None),
        ):
            before, over = getattr(self, what), self.least() - vram
            if over <= 0 or not open_:
                continue
            for value in _halves(before, min(least, before)):
                setattr(self, what, value)
                if self.least() <= vram:
                    break
            after = getattr(self, what)
            if after != before:
                name = "context" if what == "n_ctx" else what
                self.steps.append(
                    f"{name} {before} -> {after}: with {before} the least number of expert slots "
                    f"({self.least_slots}) needs {over} bytes more than there are"
                )

    def _cached(self) -> Plan:
        m, share = self.model, self.request.expert_share
        places = int((self.machine.vram_bytes - self.beside_experts()) * share) // m.blob_bytes
        slots = min(self.pairs, places)
        while slots + self.staging(slots) > places:
            slots -= 1
        if slots < self.least_slots:  # a share that leaves too few
            raise ImpError(
                f"{m.name}: a cache share of {share} leaves {slots} expert "
                f"slots, a step of {self.request.parallel} tokens needs {self.least_slots}"
            )
        return self._plan(Tier.PINNED, slots)

    def _plan(self, tier: Tier, slots: int) -> Plan:
        m, r = self.model, self.request
        parts = self.parts()
        staging = 0 if tier is Tier.VRAM else self.staging(slots)
        for name, count in (("experts", slots), ("experts that are not kept", staging)):
            if count:
                parts.append(Part(name, count * m.blob_bytes))
        outside = slots < self.pairs
        ram = [Part("pinned experts", m.expert_bytes)] if outside else []
        if m.embedding_bytes:
            ram.append(Part("mapped token embedding", m.embedding_bytes))
        per_layer = slots / m.expert_layers if m.expert_layers else 0.0
        distinct, hits = 0.0, 1.0
        if m.expert_layers:
            distinct, hits = predict(
                experts=m.experts,
                used=m.experts_used,
                per_layer=per_layer,
                rows=r.parallel,
                policy=r.policy,
            )
            hits = hits if outside else 1.0
        missed = distinct * (1 - hits) * m.expert_layers * m.blob_bytes
        return Plan(
            model=m.name,
            tier=tier,
            slots=slots,
            slots_per_layer=per_layer,
            experts=self.pairs,
            n_ctx=self.n_ctx,
            parallel=r.parallel,
            n_ubatch=self.n_ubatch,
            kv_tokens=self.kv_tokens,
            policy=r.policy,
            vram=tuple(parts),
            vram_limit=self.machine.vram_bytes,
            ram=tuple(ram),
            ram_limit=self.machine.ram_bytes,
            table_bytes=m.table_bytes,
            steps=tuple(self.steps),
            distinct=distinct,
            hit_rate=hits,
            pcie_bytes_per_token=missed / r.parallel,
            speed=decode_speed(m, self.machine, r.parallel, tier, distinct, hits),
        )

    def on_cpu(self, steps: tuple[str, ...]) -> Plan:
        """Weights stay in the page cache; states and caches must fit in RAM."""
        m, r = self.model, self.request
        self.steps = list(steps)
        ram = self.machine.ram_bytes

        def total() -> int:
            return sum(p.bytes for p in self.working())

        before = self.n_ctx
        if self.context_open:
            for self.n_ctx in _halves(before, min(LEAST_CONTEXT, before)):
                if total() <= ram:
                    break
        if total() > ram:
            raise ImpError(
                f"{m.name}: at least {total()} bytes of RAM are needed beside the weights, "
                f"{ram} may be used"
            )
        if self.n_ctx != before:
            self.steps.append(f"context {before} -> {self.n_ctx}: its cache must fit in RAM")
        weights = m.dense_bytes + m.embedding_bytes + m.expert_bytes
        if weights + total() > ram:
            self.steps.append(
                f"{weights} bytes of weights do not stay in {ram} bytes of RAM beside the caches: "
                "they are read from disk again and again, and the predicted speed is not reached"
            )
        distinct = 0.0
        if m.expert_layers:
            full = float(m.experts)
            distinct, _ = predict(
                experts=m.experts,
                used=m.experts_used,
                per_layer=full,
                rows=r.parallel,
                policy=r.policy,
            )
        return Plan(
            model=m.name,
            tier=Tier.CPU,
            slots=0,
            slots_per_layer=0.0,
            experts=self.pairs,
            n_ctx=self.n_ctx,
            parallel=r.parallel,
            n_ubatch=self.n_ubatch,
            kv_tokens=self.kv_tokens,
            policy=r.policy,
            vram=(),
            vram_limit=self.machine.vram_bytes,
            ram=self.working(),
            ram_limit=ram,
            table_bytes=m.table_bytes,
            steps=tuple(self.steps),
            distinct=distinct,
            hit_rate=0.0,
            pcie_bytes_per_token=0.0,
            speed=decode_speed(m, self.machine, r.parallel, Tier.CPU, distinct, 0.0),
        )


def _halves(value: int, least: int) -> list[int]:
    """value, value / 2, ... down to `least`, which is the last."""
    out = []
    while value > least:
        out.append(value)
        value //= 2
    return [*out, least]


def _check(model: ModelSizes, machine: Machine, request: Request) -> None:
    for name, value, most in (
        ("context", request.n_ctx, min(MAX_CTX, model.context_length)),
        ("parallel sequences", request.parallel, MAX_PARALLEL),
        ("kept sequences", request.kept + 1, MAX_PARALLEL),
        ("n_ubatch", request.n_ubatch, MAX_PARALLEL),
    ):
        if value is not None and not 1 <= value <= most:
            raise ImpError(f"{name} is {value}, it must be from 1 to {most}")
    if not 0 < request.expert_share <= 1:
        raise ImpError(f"cache share is {request.expert_share}, it must be above 0 and at most 1")
    if min(machine.vram_bytes, machine.ram_bytes, request.headroom_bytes or 0) < 0:
        raise ImpError("a limit of memory is below 0")
    rates = (machine.vram_bandwidth, machine.pcie_bandwidth, machine.ram_bandwidth)
    if min(rates) <= 0:
        raise ImpError(f"a bandwidth is {min(rates)} bytes/s, it must be above 0")
