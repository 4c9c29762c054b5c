"""A loaded model file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

from imp_runtime import _core
from imp_runtime.errors import ImpError

_PREFETCH_BYTES = 256 << 20
"""Bytes read between two calls of `progress`."""
_BESIDE_WEIGHTS_BYTES = 4 << 30
"""Device memory that "auto" wants for caches, states and activations."""


class Model:
    """Weights of one GGUF file, mapped into memory and shared by any number of sessions."""

    def __init__(self, core: _core.Model, device: str = "cpu"):
        self._core: _core.Model | None = core
        self.device = device
        """What runs its sessions: "cpu" or "cuda"."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str = "auto",
        progress: Callable[[int, int], None] | None = None,
        ngram_scale: float | None = None,
    ) -> Model:
        """Map and check a model file.

        Args:
            path: a GGUF file, or the first shard of a split one.
            device: "auto", "cpu" or "cuda": what runs its sessions. "cuda" is refused with the
                reason where it cannot be used; "auto" takes it where it can and the weights fit.
            progress: called with (bytes read, bytes in all) while the weights are read into the
                page cache; without it they are read as they are needed. The n-gram table is never
                read ahead.
            ngram_scale: factor of the n-gram table, for files whose converter lost it.

        Raises:
            ImpError: the file is damaged, incomplete, of an architecture imp does not run, or the
                device is not there.
        """
        if device != "auto":
            device = choose_device(device)
        core = _core.Model.load(os.fspath(path), ngram_scale or 0.0)
        model = cls(core, choose_device(device, core.resident_bytes))
        if progress is not None:
            total = model.resident_bytes
            for begin in range(0, total, _PREFETCH_BYTES):
                end = min(total, begin + _PREFETCH_BYTES)
                model.core.prefetch(begin, end)
                progress(end, total)
        return model

    @classmethod
    def synthetic(cls, spec: str, *, device: str = "auto") -> Model:
        """Random weights of a released shape, made in memory: for speeds and tests.

        Args:
            spec: "flash-next", or with other numbers "flash-next:layers=4,experts=64,vocab=32000,
                table=65536,seed=2".
            device: as for load(); on CUDA the weights are made in its memory alone.

        Raises:
            ImpError: a spec that cannot be read, too little memory, or no such device.
        """
        device = choose_device(device)
        return cls(_core.Model.synthetic(spec, on_host=device == "cpu"), device)

    @property
    def core(self) -> _core.Model:
        """The C++ object. Raises ImpError after close()."""
        if self._core is None:
            raise ImpError("this model is closed")
        return self._core

    @cached_property
    def keys(self) -> dict[str, Any]:
        """Metadata of the file: GGUF key -> value."""
        return dict(_core.Gguf.open(self.path).keys())

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
    def notes(self) -> list[str]:
        """What the loader had to decide by itself."""
        return self.core.notes

    def close(self) -> None:
        """Drop this handle; the memory goes with the last session that uses it."""
        self._core = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def choose_device(device: str, weight_bytes: int | None = None) -> str:
    """The device by name, "cpu" or "cuda".

    "auto" is CUDA where it can be used and has room for the weights and what goes beside them, else
    the CPU, also where the size is not known.

    Raises:
        ImpError: the device cannot run a model here.
    """
    if device == "cpu":
        return "cpu"
    info = _core.system_info()
    if device == "auto":
        fits = weight_bytes is not None and (
            weight_bytes + _BESIDE_WEIGHTS_BYTES <= info["cuda_free_bytes"]
        )
        return "cuda" if info["cuda_usable"] and fits else "cpu"
    if device == "cuda":
        if not info["cuda_usable"]:
            raise ImpError(f"device cuda: {info['cuda_detail']}")
        return "cuda"
    raise ImpError(f"device '{device}': auto, cpu or cuda")
