"""What a sequence takes beside the weights: cache per token, state per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from imp_runtime import _core
from imp_runtime.errors import ImpError

_CACHE_VALUE_BYTES = 2  # of an estimate: 16-bit keys and values
_STATE_VALUE_BYTES = 4  # of an estimate: fp32 states
MAX_LAYERS = 4096
"""Layers that an estimate looks at; a file that claims more gets none."""


@dataclass(frozen=True)
class SequenceCost:
    """Memory of one sequence, in bytes."""

    kv_bytes_per_token: int
    """Keys, values and index keys of one token, all layers."""
    state_bytes: int
    """State of fixed size: delta-net or SSM states, convolution inputs."""
    estimated: bool
    """From the keys with 16-bit keys and values and fp32 states; else what imp allocates."""

    def bytes(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens."""
        return self.kv_bytes_per_token * tokens + self.state_bytes


def whole(value: Any) -> int | None:
    """The value if it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def positive(keys: Mapping[str, Any], key: str) -> int | None:
    """The key's value if it is an integer above 0, else None."""
    value = whole(keys.get(key))
    return value if value is not None and value > 0 else None


def arch_keys(keys: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The keys that the C++ core reads an architecture's shape from."""
    own = {
        key: value
        for key, value in keys.items()
        if key.startswith((f"{arch}.", "imp.")) and key.isascii() and not _is_odd(value)
    }
    tokens = keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):  # their number is the vocabulary's; the texts do not matter
        own["tokenizer.ggml.tokens"] = [""] * len(tokens)
    return own


def _is_odd(value: Any) -> bool:
    """A text that is not UTF-8, or an array of texts or arrays: no shape is told by those."""
    if isinstance(value, str):
        return not value.isascii()
    return isinstance(value, list)


def sequence_cost(keys: Mapping[str, Any], arch: str) -> SequenceCost | None:
    """What a sequence takes; None if the keys do not tell."""
    if arch not in _core.architectures():
        return _estimate(keys, arch)
    try:
        cost = _core.memory_cost(arch, arch_keys(keys, arch))
    except ImpError:
        return None
    per_token = -(-cost["page_bytes"] // cost["page_tokens"])
    return SequenceCost(per_token, cost["row_bytes"], estimated=False)


def _per_layer(keys: Mapping[str, Any], key: str, layers: int) -> list[int] | None:
    """A key that is one number or one per layer, as a list [layers]."""
    value = keys.get(key)
    number = whole(value)
    if number is not None:
        return [number] * layers
    if not isinstance(value, np.ndarray):
        return None
    numbers = [whole(x) for x in value[:layers].tolist()]
    found = [x for x in numbers if x is not None]
    return found if len(found) == layers else None


def _recurrent(keys: Mapping[str, Any], arch: str, layers: int) -> list[bool]:
    """Which layers have a state instead of a cache [layers]."""
    flags = keys.get(f"{arch}.attention.recurrent_layers")
    if isinstance(flags, np.ndarray) and len(flags) >= layers:
        return [bool(x) for x in flags[:layers]]
    interval = positive(keys, f"{arch}.full_attention_interval")
    if interval is not None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    return [False] * layers


def _estimate(keys: Mapping[str, Any], arch: str) -> SequenceCost | None:
    layers = positive(keys, f"{arch}.block_count")
    heads = positive(keys, f"{arch}.attention.head_count")
    if layers is None or layers > MAX_LAYERS:
        return None
    kv_heads = _per_layer(keys, f"{arch}.attention.head_count_kv", layers)
    if kv_heads is None and heads is not None:
        kv_heads = [heads] * layers
    head_dim = (positive(keys, f"{arch}.embedding_length") or 0) // (heads or 1)
    key_dim = positive(keys, f"{arch}.attention.key_length") or head_dim
    value_dim = positive(keys, f"{arch}.attention.value_length") or head_dim
    if kv_heads is None or min(kv_heads) < 0 or key_dim == 0:
        return None
    recurrent = _recurrent(keys, arch, layers)
    cached = sum(n for n, state in zip(kv_heads, recurrent, strict=True) if not state)
    return SequenceCost(
        kv_bytes_per_token=cached * (key_dim + value_dim) * _CACHE_VALUE_BYTES,
        state_bytes=_state_values(keys, arch, kv_heads, recurrent) * _STATE_VALUE_BYTES,
        estimated=True,
    )


def _state_values(
    keys: Mapping[str, Any], arch: str, kv_heads: list[int], recurrent: list[bool]
) -> int:
    """Values of all recurrent states: inner size x state size, and the convolution's inputs."""
    inner = positive(keys, f"{arch}.ssm.inner_size")
    state = positive(keys, f"{arch}.ssm.state_size")
    if inner is None or state is None:
        return 0
    kernel = positive(keys, f"{arch}.ssm.conv_kernel") or 1
    groups = positive(keys, f"{arch}.ssm.group_count") or 0
    if any(recurrent):
        layers = sum(recurrent)
    else:  # hybrids mark their recurrent layers by 0 KV heads
        layers = sum(n == 0 for n in kv_heads) or len(kv_heads)
    return layers * (inner * state + (kernel - 1) * (inner + 2 * groups * state))
