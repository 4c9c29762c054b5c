"""Sequences over a model: open, extend, fork, close, score."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from imp_runtime import _core, trace
from imp_runtime._core import USUAL_EXPERT_POLICY, USUAL_STEP_TIMEOUT, Draw
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.placement import plan_session
from imp_runtime.planner.types import Plan, Request, Tier
from imp_runtime.snapshot import Snapshot
from imp_runtime.stats import ExpertCheck

TokenIds = Items[int] | npt.NDArray[np.int32]
Outputs = Literal["last", "all", "none"] | int
Floats = npt.NDArray[np.float32]
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0")
"""How a session can store keys and values, by llama.cpp's names."""


class Session:
    """Memory and compiled steps for up to `max_seqs` sequences. One thread at a time."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        max_seqs: int = 1,
        kept_seqs: int = 0,
        n_threads: int | None = None,
        n_ubatch: int = 512,
        taps: Iterable[str] = (),
        kernels: str = "auto",
        poison: bool = False,
        profile: bool = False,
        graphs: bool = True,
        batch_invariant: bool = False,
        cache_tokens: int | None = None,
        rollback_tokens: int = 0,
        max_outputs: int | None = None,
        cache_type_k: str = "f32",
        cache_type_v: str = "f32",
        routing: str | npt.NDArray[np.uint16] | None = None,
        expert_slots: int | None = None,
        expert_policy: str = USUAL_EXPERT_POLICY,
        ram_limit: int = 0,
        verify_experts: bool = False,
        step_timeout: float = USUAL_STEP_TIMEOUT,
        overlap_gathers: bool = True,
    ):
        """Plan memory.

        Args:
            model: shared with other sessions.
            n_ctx: tokens of the longest sequence; None = what the model was trained for, less if
                memory is short.
            max_seqs: sequences open at the same time.
            kept_seqs: of max_seqs, those that never decode in one step with the others, such as a
                prefix cache's: plans make no room for their experts.
            n_threads: None = all processors that this process may use.
            n_ubatch: tokens of one step at most.
            taps: patterns (`*`, `?`) of intermediates that `taps()` returns, such as
                "blk.*.residual".
            kernels: "auto", "generic", "avx2" or "avx512".
            poison: fill unused memory, and slots before experts come, with NaN (for tests).
            profile: time every op, for `op_times()`.
            graphs: CUDA: record small steps once and replay them.
            batch_invariant: CUDA: a sequence's logits are the same bits whatever other sequences
                share its steps; otherwise they may differ in the last bits between steps of one
                token, of 2 to 16 and of more. Costs speed at few sequences. The CPU is always so.
            cache_tokens: of all sequences together; None = a full context for each,
                planner.ONE_CONTEXT = one full context that they share.
            rollback_tokens: that truncate() can take back from a sequence.
            max_outputs: tokens of one step whose logits can be wanted at most; None = all. Fewer
                take less memory: longer texts are scored in more steps.
            cache_type_k: how the cache stores keys: one of CACHE_TYPES. "f32" is exact; "f16" and
                "bf16" take half the memory, "q8_0" about a quarter, and round what is stored. The
                keys of the block indexer are fp32 always.
            cache_type_v: the same for values.
            routing: who chooses experts, None = as the model says: "model"; for benchmarks "prose"
                or "uniform" (planted ids that follow a hit curve, whatever the router says),
                "trace:FILE" (see imp_runtime.trace) or recorded ids, uint16 [tokens, layers, k]:
                those of the next tokens in each step, from the first again after the last.
            expert_slots: CUDA: experts of all layers together that device memory holds; the others
                stay in pinned host memory. None = as planned within the model's limits.
            expert_policy: of expert_slots; who makes room: "lru" (per layer), "pool" (all layers
                share), and with decayed counts and admission "lrfu[:half_life]" or
                "pool-lrfu[:half_life]".
            ram_limit: of expert_slots; bytes of pinned memory at most; 0 = what the machine has.
            verify_experts: CUDA: read all experts twice when they are first needed, and compare
                those in device memory with their checksums after every step; a step that used one
                that differs raises. For machines in doubt: it is slow.
            step_timeout: CUDA: seconds of a step of up to 512 tokens, after which it raises and the
                session is of no more use; more tokens have as much longer.
            overlap_gathers: of expert_slots; kernels that read experts run beside the gather of
                those that are missing. False: after it, to measure what that hides.

        Raises:
            ImpError: a number is out of range, a cache type that the device or the heads of the
                model cannot have, or memory is too small (naming both numbers).
            OSError: a trace that cannot be read.
        """
        self.model = model
        self.vocab_size = model.vocab_size  # stays when the model's handle is closed
        self.plan: Plan | None = None
        """Where everything is, on CUDA unless expert_slots were given."""
        if model.device == "cuda" and expert_slots is None:
            self.plan = plan_session(
                model.sizes(cache_type_k, cache_type_v),
                model.limits.machine(model.weights),
                Request(
                    n_ctx=n_ctx,
                    parallel=max_seqs - kept_seqs,
                    kept=kept_seqs,
                    cache_tokens=cache_tokens,
                    state_rows=3 if rollback_tokens else 1,
                    n_ubatch=n_ubatch,
                    outputs=max_outputs or n_ubatch,
                    policy=model.limits.expert_policy,
                ),
            )
            n_ctx = n_ctx or self.plan.n_ctx
            if self.plan.tier is Tier.PINNED:
                expert_slots, expert_policy = self.plan.slots, self.plan.policy
                ram_limit = model.limits.ram_bytes or 0
        self.routing, ids = _routing(model, routing)
        self.core = _core.Session(
            model.core,
            n_ctx=n_ctx or 0,
            max_seqs=max_seqs,
            n_ubatch=n_ubatch,
            n_threads=n_threads or 0,
            kernels=kernels,
            taps=list(taps),
            poison=poison,
            profile=profile,
            device=model.device,
            graphs=graphs,
            batch_invariant=batch_invariant,
            cache_tokens=cache_tokens or 0,
            rollback_tokens=rollback_tokens,
            max_outputs=max_outputs or 0,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            routing=self.routing if ids is None else "model",
            routing_ids=ids,
            expert_slots=-1 if expert_slots is None else expert_slots,
            expert_policy=expert_policy,
            ram_limit=ram_limit,
            weights=model.weights,
            verify_experts=verify_experts,
            step_timeout=step_timeout,
            overlap_gathers=overlap_gathers,
        )
        # Any thread may ask for these, even while a step runs.
        self._n_ctx, self._n_ubatch = self.core.n_ctx, self.core.n_ubatch
        self._max_outputs = min(max_outputs or n_ubatch, n_ubatch)
        self._closed = False
        self._taps: dict[str, list[npt.NDArray[Any]]] = {}

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest sequence. Raises ImpError after close()."""
        self._check_open()
        return self._n_ctx

    @property
    def n_ubatch(self) -> int:
        """Tokens of one step at most. Raises ImpError after close()."""
        self._check_open()
        return self._n_ubatch

    @property
    def max_outputs(self) -> int:
        """Tokens of one step whose logits can be wanted."""
        return self._max_outputs

    @property
    def backend(self) -> str:
        """What runs the steps, e.g. "cpu: avx512, 2 threads"."""
        return self.core.backend

    def open(self) -> Sequence:
        """A new sequence without tokens. Raises ImpError if max_seqs are open."""
        return Sequence(self, self.core.open())

    def restore(self, snapshot: Snapshot) -> Sequence:
        """A new sequence that goes on where the saved one was.

        Raises:
            ImpError: the snapshot is damaged, of another model or of other cache types, or memory
                is too small.
        """
        return Sequence(self, self.core.restore(snapshot.data, snapshot.name))

    def taps(self) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
        """Intermediates of the last extend: name -> [rows, cols], one row per token or output."""
        return {name: np.concatenate(parts) for name, parts in self._taps.items()}

    def op_times(self) -> dict[str, tuple[float, int]]:
        """Op name -> (seconds, calls) since the session was opened with profile=True."""
        return self.core.op_times()

    def expert_stats(self) -> dict[str, Any]:
        """The cache of experts since the session was opened.

        layers, experts (a layer), slots (0 = there is no cache), blob_bytes (of an expert),
        store_bytes (pinned), pin_seconds, fill_seconds; by layer: wanted (distinct experts of
        steps), hits, kept (misses that entered).
        """
        return self.core.expert_stats()

    def verify_experts(self) -> ExpertCheck:
        """Compare all experts, cached and on the host, with checksums taken when they were read.

        Slots that differ are emptied: the next step that wants the expert fetches it again.

        Raises:
            ImpError: the session was opened without verify_experts.
        """
        return ExpertCheck(*self.core.verify_experts())

    def close(self) -> None:
        """Free all memory; its sequences become unusable."""
        self.core.close()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ImpError("this session is closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, seq: int, tokens: npt.NDArray[np.int32], first: int) -> Floats:
        """Extend in steps, so that Ctrl-C works: float32 [len(tokens) - first, vocab]."""
        wanted = len(tokens) - first
        step = self.n_ubatch if wanted <= self.max_outputs else self.max_outputs
        self._taps = {}
        if len(tokens) <= step:
            logits = self.core.step([(seq, tokens, first)])
            self._collect_taps()
            return logits
        out = np.empty((len(tokens) - first, self.vocab_size), np.float32)
        for begin in range(0, len(tokens), step):
            part = tokens[begin : begin + step]
            skip = min(max(first - begin, 0), len(part))
            logits = self.core.step([(seq, part, skip)])
            self._collect_taps()
            done = begin + skip - first
            if len(logits):
                out[done : done + len(logits)] = logits
        return out

    def _choose(self, seq: int, tokens: npt.NDArray[np.int32], draw: Draw | None) -> int | Floats:
        """As _run() with the last output, which becomes a token if it can."""
        before = max(len(tokens) - 1, 0) // self.n_ubatch * self.n_ubatch
        self._taps = {}
        if before:
            self._run(seq, tokens[:before], before)
        last = tokens[before:]
        (choice,) = self.core.choose([(seq, last, len(last) - 1)], [draw])
        self._collect_taps()
        return choice

    def _collect_taps(self) -> None:
        for name, value in self.core.taps().items():
            self._taps.setdefault(name, []).append(value)


def _routing(
    model: Model, wanted: str | npt.NDArray[np.uint16] | None
) -> tuple[str, npt.NDArray[np.uint16] | None]:
    """(name, recorded ids)"""
    if wanted is not None and not isinstance(wanted, str):
        return "recorded", np.ascontiguousarray(wanted)
    name = model.routing if wanted is None else wanted
    recorded = model.recorded if wanted is None else trace.routing(name, model.sizes)
    return name, None if recorded is None else recorded.ids


class Sequence:
    """One sequence of tokens with all of its state. Made by Session.open() or fork()."""

    def __init__(self, session: Session, seq: int):
        self._session = session
        self._seq: int | None = seq

    @property
    def id(self) -> int:
        """Handle in the session. Raises ImpError after close()."""
        if self._seq is None:
            raise ImpError("this sequence is closed")
        return self._seq

    @property
    def tokens(self) -> list[int]:
        """Token ids so far."""
        return self._session.core.tokens(self.id)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._session.core.length(self.id)

    @property
    def n_ubatch(self) -> int:
        """Tokens of one step at most."""
        return self._session.n_ubatch

    def extend(self, tokens: TokenIds, outputs: Outputs = "last") -> Floats:
        """Append tokens and return logits.

        Args:
            tokens: token ids.
            outputs: which positions: "last", "all", "none", or the first of `tokens` whose logits
                are wanted.

        Returns:
            float32 [n, vocab], row i = the distribution after that token; a view that is valid
            until the session's next extend.

        Raises:
            ImpError: a token outside the vocabulary, or more tokens than the context holds; the
                sequence is as it was.
            KeyboardInterrupt: the sequence has the tokens of the steps that ran.
        """
        ids = token_ids(tokens)
        if isinstance(outputs, str):
            known = {"last": max(len(ids) - 1, 0), "all": 0, "none": len(ids)}
            if outputs not in known:
                raise ImpError(f"outputs '{outputs}': last, all, none or an index")
            first = known[outputs]
        else:
            first = int(outputs)
        self._check(ids, first)
        return self._session._run(self.id, ids, first)

    def choose(self, tokens: TokenIds, draw: Draw | None) -> int | Floats:
        """Append tokens and choose the next one, which is not appended.

        Args:
            tokens: at least one id.
            draw: how, from Sampler.next(); None = the caller chooses.

        Returns:
            The chosen token, or its float32 [vocab] logits where the caller has to choose: a view
            that is valid until the session's next extend.

        Raises:
            ImpError: as extend().
        """
        ids = token_ids(tokens)
        self._check(ids, max(len(ids) - 1, 0))
        return self._session._choose(self.id, ids, draw)

    def _check(self, ids: npt.NDArray[np.int32], first: int) -> None:
        """Refuse what a later step would refuse, before the first one runs."""
        if not 0 <= first <= len(ids):
            raise ImpError(f"first output {first} of {len(ids)} tokens")
        length, n_ctx, vocab = self.length, self._session.n_ctx, self._session.vocab_size
        if length + len(ids) > n_ctx:
            raise ImpError(f"{length + len(ids)} tokens in a context of {n_ctx}")
        bad = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(bad):
            at = int(bad[0])
            raise ImpError(f"token {ids[at]} at position {length + at}, the vocabulary has {vocab}")

    def score(self, tokens: TokenIds) -> npt.NDArray[np.float64]:
        """Append tokens; -log p of each but the first in nats: float64 [len(tokens) - 1]."""
        ids = token_ids(tokens)
        self._check(ids, 0)
        nll = np.empty(max(len(ids) - 1, 0))
        step = self._session.max_outputs
        for begin in range(0, len(ids), step):
            part = ids[begin : begin + step]
            targets = ids[begin + 1 : begin + step + 1]
            logits = self.extend(part, outputs="all")
            nll[begin : begin + len(targets)] = _core.token_nll(logits[: len(targets)], targets)
        return nll

    def fork(self) -> Sequence:
        """An independent copy that shares unchanged cache pages.

        Raises ImpError if max_seqs are open.
        """
        return Sequence(self._session, self._session.core.fork(self.id))

    def truncate(self, length: int) -> None:
        """Take back the tokens after the first `length`, as if they had never been there.

        Raises:
            ImpError: further back than the session's rollback_tokens allow (names both lengths).
        """
        self._session.core.truncate(self.id, int(length))

    def save(self) -> Snapshot:
        """All of its state, to restore() here, later, or in another process."""
        return Snapshot(self._session.core.save(self.id))

    def close(self) -> None:
        """Give pages and state back."""
        if self._seq is not None:
            self._session.core.close_sequence(self._seq)
            self._seq = None

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def token_ids(tokens: TokenIds) -> npt.NDArray[np.int32]:
    """int32 [n]. Raises ImpError for anything but one dimension of whole numbers."""
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ImpError(f"tokens have {ids.ndim} dimensions, 1 needed")
    if len(ids) and ids.dtype.kind not in "iu":
        raise ImpError(f"tokens are {ids.dtype}, whole numbers needed")
    limits = np.iinfo(np.int32)
    if len(ids) and (int(ids.min()) < limits.min or int(ids.max()) > limits.max):
        bad = int(ids.max()) if int(ids.max()) > limits.max else int(ids.min())
        raise ImpError(f"token {bad} is not an id: at most {limits.max}")
    return np.ascontiguousarray(ids, dtype=np.int32)
