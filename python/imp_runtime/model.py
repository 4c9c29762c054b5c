"""A loaded model file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

from imp_runtime import _core, trace
from imp_runtime.errors import ImpError
from imp_runtime.placement import Limits, choose_device
from imp_runtime.planner.sizes import ModelSizes, sizes_of

_PREFETCH_BYTES = 256 << 20
"""Bytes read between two calls of `progress`."""


class Model:
    """Weights of one GGUF file, mapped into memory and shared by any number of sessions."""

    def __init__(
        self,
        core: _core.Model,
        device: str = "auto",
        limits: Limits | None = None,
        routing: str = "model",
    ):
        self._core: _core.Model | None = core
        self.weights = _core.DeviceWeights()
        """Of its sessions on CUDA: uploaded by the first that needs them, freed with the last."""
        self._sizes: dict[tuple[str, str], ModelSizes] = {}
        self.limits = limits or Limits()
        """What its sessions may take of the machine."""
        self.routing = routing
        """Who chooses experts, if a session does not say: see Session."""
        self.recorded = trace.routing(routing, self.sizes)
        """The ids, if `routing` names a file of them."""
        self.device, why = choose_device(device, self.sizes, self.limits)
        """What runs its sessions: "cpu" or "cuda"."""
        self._own_notes = [why] if why else []
        if routing != "model":
            self._own_notes.append(f"routing: {self.routed_by}")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str = "auto",
        progress: Callable[[int, int], None] | None = None,
        ngram_scale: float | None = None,
        limits: Limits | None = None,
    ) -> Model:
        """Map and check a model file.

        Args:
            path: a GGUF file, or the first shard of a split one.
            device: "auto", "cpu" or "cuda": what runs its sessions. "cuda" is refused with the
                reason where it cannot be used; "auto" takes it where it can and the plan fits,
                with all experts in its memory or a cache of them.
            progress: called with (bytes read, bytes in all) while the weights are read into the
                page cache; without it they are read as they are needed. The n-gram table is never
                read ahead.
            ngram_scale: factor of the n-gram table, for files whose converter lost it.
            limits: what may be taken of the machine; None = what is free.

        Raises:
            ImpError: the file is damaged, incomplete, of an architecture imp does not run, or the
                device is not there.
        """
        model = cls(_core.Model.load(os.fspath(path), ngram_scale or 0.0), device, limits)
        if progress is not None:
            total = model.resident_bytes
            for begin in range(0, total, _PREFETCH_BYTES):
                end = min(total, begin + _PREFETCH_BYTES)
                model.core.prefetch(begin, end)
                progress(end, total)
        return model

    @classmethod
    def synthetic(
        cls,
        spec: str,
        *,
        device: str = "auto",
        limits: Limits | None = None,
        routing: str = "model",
        table_file: str | os.PathLike[str] | None = None,
    ) -> Model:
        """Random weights of a released shape, made in memory: for speeds and tests.

        Args:
            spec: "flash-next", or with other numbers "flash-next:layers=4,experts=64,vocab=32000,
                table=65536,seed=2".
            device: as for load(); on CUDA the weights are made where they are kept.
            limits: as for load().
            routing: of its sessions, see Session: random weights route uniformly, "prose" like
                text.
            table_file: keeps the n-gram table, so that its rows come through the page cache as
                those of a GGUF do; written if it does not exist, with the same numbers.

        Raises:
            ImpError: a spec that cannot be read, too little memory, no such device, a routing
                that does not fit the shape, or a table file that cannot be written or is of
                another model.
        """

        def make(on_host: bool) -> _core.Model:
            return _core.Model.synthetic(spec, on_host=on_host, table_file=table_file)

        on_host = device == "cpu"
        model = cls(make(on_host), device, limits, routing)
        if model.device == "cpu" and not on_host:
            model._core = make(on_host=True)
        return model

    @property
    def core(self) -> _core.Model:
        """The C++ object. Raises ImpError after close()."""
        if self._core is None:
            raise ImpError("this model is closed")
        return self._core

    @cached_property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file: GGUF key -> value."""
        return dict(self.core.gguf.keys())

    @property
    def path(self) -> str:
        """The file it was loaded from."""
        return self.core.path

    @property
    def arch(self) -> str:
        """GGUF architecture name."""
        return self.core.arch

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, and logits per position."""
        return self.core.vocab_size

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence that the model was trained for."""
        return self.core.context_length

    @property
    def layers(self) -> int:
        """Decoder layers, without the MTP layer."""
        return self.core.layers

    @property
    def resident_bytes(self) -> int:
        """Bytes that every step may touch: all weights but the n-gram tables."""
        return self.core.resident_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the n-gram tables, which stay on disk."""
        return self.core.table_bytes

    @property
    def routed_by(self) -> str:
        """Who chooses experts, for reports: `routing` in words."""
        if self.routing == "model":
            return "model"
        if self.recorded is None:
            return f"planted ({self.routing})"
        t = self.recorded
        return (
            f"recorded ({self.routing}: {len(t.ids)} tokens of {t.text} by {t.model}, then from "
            "the first again)"
        )

    @property
    def notes(self) -> list[str]:
        """What the loader had to decide by itself."""
        return [*self.core.notes, *self._own_notes]

    def sizes(self, cache_type_k: str = "f32", cache_type_v: str = "f32") -> ModelSizes:
        """Bytes of its parts, for plans; the types are those of a session's cache."""
        types = (cache_type_k, cache_type_v)
        if types not in self._sizes:
            self._sizes[types] = sizes_of(
                self.core.gguf, self.path, cache_type_k=cache_type_k, cache_type_v=cache_type_v
            )
        return self._sizes[types]

    def close(self) -> None:
        """Drop this handle; the memory goes with the last session that uses it."""
        self._core = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
