"""The lines that `imp info` prints."""

from typing import Any

from imp_runtime.gguf import Description, SequenceCost
from imp_runtime.units import size, table

CONTEXTS = (4096, 32768)
"""Tokens for which the memory of a sequence is shown, beside the model's longest."""
LINE = 100
"""Characters of a key's value without --keys."""


def count(n: int) -> str:
    """1234567 -> `1.23 M`."""
    value, unit = float(n), ""
    for bigger in ("k", "M", "G", "T"):
        if value < 999.5:
            break
        value, unit = value / 1000, bigger
    return f"{value:.3g} {unit}".rstrip() if unit else str(n)


def printable(text: str) -> str:
    """Text of a file for one line of a terminal: control characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def summary_lines(d: Description) -> list[str]:
    """What the file is, its tensors by kind and type, what it needs, whether imp runs it."""
    facts = [
        ("file", f"{printable(str(d.path))} ({size(d.file_bytes)}, GGUF v{d.version})"),
        ("architecture", printable(d.architecture) or "not given"),
        ("name", printable(d.name) or "not given"),
        ("parameters", f"{count(d.parameters)}, {count(d.active_parameters)} active per token"),
        ("bits per weight", f"{d.bits_per_weight:.2f}"),
    ]
    if len(d.files) > 1:
        facts[1:1] = [("part", f"{i + 1}: {printable(str(p))}") for i, p in enumerate(d.files)]
    if d.experts:
        facts.append(("experts", f"{d.experts}, {d.experts_used} per token"))
    if d.context_length is not None:
        facts.append(("context length", f"{d.context_length} tokens"))
    if d.vocab_size is not None:
        facts.append(("vocabulary", f"{d.vocab_size} tokens"))
    facts.append(("bos, eos", f"{_id(d.bos_token_id)}, {_id(d.eos_token_id)}"))
    facts.append(("chat template", "yes" if d.chat_template else "no"))
    return [
        *table(facts, frozenset()),
        "",
        *_group_lines(d),
        "",
        *_need_lines(d),
        "",
        *_support_lines(d),
    ]


def _id(token: int | None) -> str:
    return "none" if token is None else str(token)


def _group_lines(d: Description) -> list[str]:
    rows = [("tensors", "type", "number", "parameters", "bytes")]
    for g in d.groups:
        rows.append((g.kind.value, g.type, str(g.tensors), f"{g.parameters:,}", f"{g.bytes:,}"))
    rows.append(("total", "", str(len(d.tensors)), f"{d.parameters:,}", f"{d.tensor_bytes:,}"))
    return table(rows, frozenset({2, 3, 4}))


def _need_lines(d: Description) -> list[str]:
    rows = [("RAM for weights", size(d.weight_bytes), "mapped; slow if it does not fit")]
    if d.table_bytes:
        rows.append(("n-gram table", size(d.table_bytes), "mapped, single rows read; not in RAM"))
    if d.sequence is not None:
        rows += _sequence_rows(d.sequence, d.context_length)
    rows.append(("GPU plan", size(d.dense_bytes), "VRAM for all but experts and look-ups"))
    if d.expert_bytes:
        rows.append(("", size(d.expert_bytes), "host memory for the experts"))
    return ["needs", *("  " + line for line in table(rows, frozenset({1})))]


def _sequence_rows(cost: SequenceCost, longest: int | None) -> list[tuple[str, str, str]]:
    how = "estimated for 16-bit keys and values" if cost.estimated else "as imp keeps it"
    rows = [("cache", size(cost.kv_bytes_per_token), f"per token, {how}")]
    if cost.state_bytes:
        rows.append(("state", size(cost.state_bytes), "per sequence"))
    contexts = [n for n in CONTEXTS if longest is None or n < longest]
    if longest is not None:
        contexts.append(longest)
    rows += [("sequence", size(cost.bytes(n)), f"of {n} tokens") for n in contexts]
    return rows


def _support_lines(d: Description) -> list[str]:
    if not d.support.ok:
        return [f"imp does not run it: {printable(d.support.reason)}"]
    return ["imp runs it", *(f"  note: {printable(note)}" for note in d.support.notes)]


def key_lines(d: Description, *, full: bool) -> list[str]:
    """One line per key: type and value; long ones cut, or all of it."""
    rows = [
        (printable(key), d.key_types[key], _value(value, full)) for key, value in d.keys.items()
    ]
    return ["", f"{len(rows)} keys", *("  " + line for line in table(rows, frozenset()))]


def _value(value: Any, full: bool) -> str:
    if isinstance(value, (str, int, float)):
        text = printable(str(value))
        return text if full or len(text) <= LINE else f"{text[:LINE]}... ({len(text)} characters)"
    if full:
        return printable(str(value.tolist() if hasattr(value, "tolist") else list(value)))
    shown = ""
    for i, item in enumerate(value):
        word = ("" if i == 0 else ", ") + printable(str(item))
        if len(shown) + len(word) > LINE:
            return f"[{shown}, ...] ({len(value)})"
        shown += word
    return f"[{shown}] ({len(value)})"


def tensor_lines(d: Description) -> list[str]:
    """One line per tensor, in file order."""
    rows = [("name", "kind", "type", "dims", "bytes", "part", "offset")]
    for t in d.tensors:
        dims = " x ".join(map(str, t.dims))
        rows.append(
            (
                printable(t.name),
                t.kind.value,
                t.type,
                dims,
                str(t.bytes),
                str(t.shard + 1),
                str(t.offset),
            )
        )
    return ["", *table(rows, frozenset({4, 5, 6}))]


def device_lines(machine: dict[str, Any]) -> list[str]:
    """Facts of this machine."""
    cuda = "usable" if machine["cuda_usable"] else "not usable"
    detail = machine["cuda_detail"]
    return table(
        [
            ("processor", f"{machine['processors']} usable, {machine['cpu_features']}"),
            (
                "memory",
                f"{size(machine['memory_available_bytes'])} available of "
                f"{size(machine['memory_total_bytes'])} (limit: {machine['memory_limited_by']})",
            ),
            ("CUDA", f"{cuda}: {detail}" if detail else cuda),
            ("CUDA code", machine["cuda_architectures"] or "none"),
            ("cuBLASLt", machine["cublas_lt"]),
        ],
        frozenset(),
    )
