"""The machine form of `imp info`."""

import math
from typing import Any

from imp_runtime.gguf import Description

SHOWN_ITEMS = 16
"""Arrays up to this length are in the JSON without --keys."""


def as_json(
    description: Description | None,
    machine: dict[str, Any] | None,
    *,
    keys: bool,
    tensors: bool,
) -> dict[str, Any]:
    """A JSON-ready object; sizes in bytes.

    Args:
        description: the file, if one was given.
        machine: facts of this machine, if they were asked for.
        keys: long arrays in full instead of {"type", "length"}.
        tensors: with the list of all tensors.
    """
    out: dict[str, Any] = {}
    if description is not None:
        out |= _file(description, keys)
        if tensors:
            out["tensors"] = [
                {
                    "name": t.name,
                    "kind": t.kind.value,
                    "type": t.type,
                    "dims": list(t.dims),
                    "bytes": t.bytes,
                    "shard": t.shard,
                    "offset": t.offset,
                }
                for t in description.tensors
            ]
    if machine is not None:
        out["machine"] = machine
    return out


def _file(d: Description, full: bool) -> dict[str, Any]:
    cost = d.sequence
    return {
        "path": str(d.path),
        "files": [str(file) for file in d.files],
        "file_bytes": d.file_bytes,
        "version": d.version,
        "architecture": d.architecture,
        "name": d.name,
        "parameters": d.parameters,
        "active_parameters": d.active_parameters,
        "bits_per_weight": round(d.bits_per_weight, 4),
        "experts": d.experts,
        "experts_used": d.experts_used,
        "context_length": d.context_length,
        "vocab_size": d.vocab_size,
        "bos_token_id": d.bos_token_id,
        "eos_token_id": d.eos_token_id,
        "chat_template": d.chat_template,
        "groups": [
            {
                "kind": g.kind.value,
                "type": g.type,
                "tensors": g.tensors,
                "parameters": g.parameters,
                "bytes": g.bytes,
            }
            for g in d.groups
        ],
        "needs": {
            "weight_bytes": d.weight_bytes,
            "table_bytes": d.table_bytes,
            "gpu_dense_bytes": d.dense_bytes,
            "gpu_host_expert_bytes": d.expert_bytes,
            "sequence": None
            if cost is None
            else {
                "kv_bytes_per_token": cost.kv_bytes_per_token,
                "state_bytes": cost.state_bytes,
                "estimated": cost.estimated,
            },
        },
        "supported": d.support.ok,
        "reason": d.support.reason,
        "notes": list(d.support.notes),
        "keys": {key: _value(d, key, full) for key in d.keys},
    }


def _value(d: Description, key: str, full: bool) -> Any:
    value = d.keys[key]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinities
    if isinstance(value, (str, int, float)):
        return value
    if not full and len(value) > SHOWN_ITEMS:
        return {"type": d.key_types[key], "length": len(value)}
    return _items(value)


def _items(value: Any) -> Any:
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, list):
        return [_items(item) for item in plain]
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    return plain
