"""Bytes of a model's parts, from a file's header alone."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.gguf import Kind
from imp_runtime.gguf.describe import tensors_of
from imp_runtime.gguf.kinds import split_layer
from imp_runtime.gguf.sequence import arch_keys

BLOB_ALIGNMENT = 128
"""Bytes; an expert's block starts on a whole line of the bus."""
Q8_0_OVER_BF16 = 34 / 64
"""Bytes of a block of 32 weights."""


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of the parts, and the numbers that decide how many of them a session needs."""

    name: str
    dense_bytes: int
    """All that every step reads: no routed experts, look-ups, MTP layers or vision."""
    embedding_bytes: int
    """Token embedding; single rows are read. 0 if the output matrix is the same tensor."""
    table_bytes: int
    """N-gram tables: on disk, never pinned."""
    expert_layers: int
    experts: int
    """Of a layer."""
    experts_used: int
    blob_bytes: int
    """Of one expert; the largest, if layers differ."""
    row_bytes: int
    """State of one sequence."""
    page_bytes: int
    page_tokens: int
    vocab: int
    context_length: int
    channels: int
    """Values of the residual streams of a token."""
    attention_values: int
    """Of a token's attention, its heads' sums included."""
    block_tokens: int
    """Of a block of keys that the indexer scores; 0 = there is none."""

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return self.expert_layers * self.experts * self.blob_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Cache of keys and values in whole pages."""
        return -(-tokens // self.page_tokens) * self.page_bytes


def file_sizes(path: str | os.PathLike[str], **options: str) -> ModelSizes:
    """Of a GGUF file; `options` as for sizes_of().

    Raises:
        ImpError: the file is damaged, or of an architecture that imp does not run.
    """
    file = _core.Gguf.open(path)
    return sizes_of(file, os.fspath(path), **options)


def synthetic_sizes(spec: str, **options: str) -> ModelSizes:
    """Of a model as Model.synthetic() makes it; nothing is made.

    Raises:
        ImpError: a spec that cannot be read.
    """
    model = _core.Model.synthetic(spec, on_host=False)
    return sizes_of(model.gguf, f"synthetic {spec}", **options)


def sizes_of(
    file: _core.Gguf,
    name: str,
    *,
    dense: str = "stored",
    cache_type_k: str = "f32",
    cache_type_v: str = "f32",
) -> ModelSizes:
    """Sum a header up.

    Args:
        file: the GGUF.
        name: of the file or spec, for the plan and for errors.
        dense: "stored", or "8bit": as if its BF16 matrices were Q8_0.
        cache_type_k: as for Session.
        cache_type_v: as for Session.

    Raises:
        ImpError: an architecture that imp does not run, or keys that do not tell its shape.
    """
    keys = file.keys()
    arch = str(keys.get("general.architecture", ""))
    if arch not in _core.architectures():
        raise ImpError(f"{name}: imp does not run architecture '{arch}'")
    own = arch_keys(keys, arch)
    _core.tensor_table(arch, own)  # refuses keys that do not fit each other
    cost = _core.memory_cost(arch, own, cache_type_k, cache_type_v)
    tensors = tuple(tensors_of(file, keys, arch))
    elsewhere = {Kind.EXPERTS, Kind.EMBEDDING, Kind.NGRAM_TABLE, Kind.MTP, Kind.VISION}
    tied = not any(t.kind is Kind.OUTPUT for t in tensors)
    dense_bytes = embedding_bytes = table_bytes = 0
    by_layer: Counter[int] = Counter()
    for t in tensors:
        shrinks = dense == "8bit" and t.type == "BF16"
        size = round(t.bytes * Q8_0_OVER_BF16) if shrinks else t.bytes
        if t.kind not in elsewhere or (tied and t.kind is Kind.EMBEDDING):
            dense_bytes += size
        elif t.kind is Kind.EMBEDDING:
            embedding_bytes += t.bytes
        elif t.kind is Kind.NGRAM_TABLE:
            table_bytes += t.bytes
        elif t.kind is Kind.EXPERTS and len(t.dims) == 3:
            by_layer[split_layer(t.name)[0] or 0] += t.bytes
        elif t.kind is Kind.EXPERTS:  # their scales stay beside the kernels
            dense_bytes += t.bytes
    experts = int(keys.get(f"{arch}.expert_count", 0))
    blob = max(by_layer.values(), default=0) // max(1, experts)
    vocab = keys.get("tokenizer.ggml.tokens")
    streams = int(keys.get(f"{arch}.hyper_connection.count", 1))
    heads, head = (_most(keys[f"{arch}.attention.{key}"]) for key in ("head_count", "value_length"))
    return ModelSizes(
        name=name,
        dense_bytes=dense_bytes,
        embedding_bytes=embedding_bytes,
        table_bytes=table_bytes,
        expert_layers=len(by_layer),
        experts=experts if by_layer else 0,
        experts_used=int(keys.get(f"{arch}.expert_used_count", 0)) if by_layer else 0,
        blob_bytes=-(-blob // BLOB_ALIGNMENT) * BLOB_ALIGNMENT,
        row_bytes=cost["row_bytes"],
        page_bytes=cost["page_bytes"],
        page_tokens=cost["page_tokens"],
        vocab=len(vocab) if isinstance(vocab, list) else int(keys[f"{arch}.vocab_size"]),
        context_length=int(keys[f"{arch}.context_length"]),
        channels=int(keys[f"{arch}.embedding_length"]) * streams,
        attention_values=heads * (head + 2),
        block_tokens=_most(keys.get(f"{arch}.attention.compress_ratios", 0)),
    )


def _most(value: Any) -> int:
    """Of a number, or of one a layer."""
    return int(np.max(value, initial=0))
