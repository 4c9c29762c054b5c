"""llama-bench's output formats: md, csv, json, jsonl and sql."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from imp_runtime.bench.speed import SpeedMisfit, SpeedRow
from imp_runtime.bench.speed_fields import (
    FIELDS,
    ModelFacts,
    build_commit,
    build_number,
    fields,
)

FORMATS = ("csv", "json", "jsonl", "md", "sql")
TABLE = "llama_bench"


class Format(Protocol):
    """Turns results into text; every method returns what to write, line ends included."""

    def header(self) -> str:
        """Before the first row."""

    def row(self, row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]) -> str:
        """A measured case; `extra` goes behind llama.cpp's fields."""

    def note(self, misfit: SpeedMisfit) -> str:
        """A case without numbers, written only among extras."""

    def footer(self) -> str:
        """After the last row."""


def make_format(name: str, columns: Sequence[str], extra: Mapping[str, str]) -> Format:
    """A format by name.

    Args:
        name: one of FORMATS.
        columns: optional fields of the table of "md".
        extra: name -> SQL type of fields behind llama.cpp's.
    """
    match name:
        case "csv":
            return Csv(extra)
        case "json":
            return Json()
        case "jsonl":
            return JsonLines()
        case "sql":
            return Sql(extra)
        case _:
            return Markdown(columns)


def _plain(value: Any) -> str:
    """As csv and sql hold it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:f}"
    return value if isinstance(value, str) else json.dumps(value)


def _json(value: Any) -> str:
    return f"{value:f}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _json_fields(
    row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Records, and the samples with extras: llama-bench separates the two kinds differently."""
    head = [f'"{name}": {_json(value)}' for name, value in fields(row, model).items()]
    ns = ", ".join(str(value) for value in row.samples_ns)
    ts = ", ".join(f"{value:g}" for value in row.samples_ts)
    tail = [f'"samples_ns": [ {ns} ]', f'"samples_ts": [ {ts} ]']
    return head, tail + [f'"{name}": {_json(value)}' for name, value in extra.items()]


def _json_note(misfit: SpeedMisfit) -> list[str]:
    case = misfit.case
    values = {
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.setup.n_depth,
        "note": misfit.reason,
    }
    return [f'"{name}": {_json(value)}' for name, value in values.items()]


class Csv:
    """A header and one quoted line per case."""

    def __init__(self, extra: Mapping[str, str]):
        self._names = [*FIELDS, *extra]

    def header(self) -> str:
        """Names, not quoted."""
        return ",".join(self._names) + "\n"

    def row(self, row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]) -> str:
        """Values, all quoted."""
        return _csv([_plain(v) for v in (*fields(row, model).values(), *extra.values())])

    def note(self, misfit: SpeedMisfit) -> str:
        """The case and the reason in the last field, the others empty."""
        setup = misfit.case.setup
        known = {
            "n_prompt": misfit.case.n_prompt,
            "n_gen": misfit.case.n_gen,
            "n_depth": setup.n_depth,
            self._names[-1]: misfit.reason,
        }
        return _csv([_plain(known.get(name)) for name in self._names])

    def footer(self) -> str:
        """Nothing."""
        return ""


def _csv(values: Sequence[str]) -> str:
    return ",".join('"' + value.replace('"', '""') + '"' for value in values) + "\n"


class Json:
    """An array of objects, one field per line."""

    def __init__(self) -> None:
        self._first = True

    def header(self) -> str:
        """The array begins."""
        return "[\n"

    def row(self, row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]) -> str:
        """An object."""
        head, tail = _json_fields(row, model, extra)
        return self._object(head + tail)

    def note(self, misfit: SpeedMisfit) -> str:
        """An object with the reason."""
        return self._object(_json_note(misfit))

    def _object(self, lines: list[str]) -> str:
        begin = "" if self._first else ",\n"
        self._first = False
        return begin + "  {\n    " + ",\n    ".join(lines) + "\n  }"

    def footer(self) -> str:
        """The array ends."""
        return "\n]\n"


class JsonLines:
    """An object per line."""

    def header(self) -> str:
        """Nothing."""
        return ""

    def row(self, row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]) -> str:
        """An object; llama-bench has no space before the samples in tokens per second."""
        head, tail = _json_fields(row, model, extra)
        return "{" + ", ".join(head) + ", " + ",".join(tail) + "}\n"

    def note(self, misfit: SpeedMisfit) -> str:
        """An object with the reason."""
        return "{" + ", ".join(_json_note(misfit)) + "}\n"

    def footer(self) -> str:
        """Nothing."""
        return ""


class Sql:
    """Statements that create the table and fill it."""

    def __init__(self, extra: Mapping[str, str]):
        self._types = {**FIELDS, **extra}

    def header(self) -> str:
        """CREATE TABLE."""
        columns = ",\n".join(f"  {name} {type_}" for name, type_ in self._types.items())
        return f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n\n"

    def row(self, row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]) -> str:
        """INSERT, every value quoted."""
        values = ", ".join(_sql(v) for v in (*fields(row, model).values(), *extra.values()))
        return f"INSERT INTO {TABLE} ({', '.join(self._types)}) VALUES ({values});\n"

    def note(self, misfit: SpeedMisfit) -> str:
        """A comment."""
        return f"-- {misfit.case.name}: {' '.join(misfit.reason.split())}\n"

    def footer(self) -> str:
        """Nothing."""
        return ""


def _sql(value: Any) -> str:
    return "NULL" if value is None else "'" + _plain(value).replace("'", "''") + "'"


# Heading and width of a column, negative for left-aligned, by field.
_COLUMNS = {
    "model": ("model", -30),
    "size": ("size", 10),
    "params": ("params", 10),
    "backend": ("backend", -10),
    "n_gpu_layers": ("ngl", 3),
    "n_threads": ("threads", 7),
    "n_batch": ("n_batch", 7),
    "n_ubatch": ("n_ubatch", 8),
    "type_k": ("type_k", 6),
    "type_v": ("type_v", 6),
    "devices": ("dev", -12),
    "test": ("test", 15),
    "t/s": ("t/s", 20),
}


class Markdown:
    """The table of READMEs."""

    def __init__(self, columns: Sequence[str]):
        """Args: columns: fields between backend and test."""
        self._names = ["model", "size", "params", "backend", *columns, "test", "t/s"]

    def header(self) -> str:
        """Headings and rule."""
        cells = [_pad(*_COLUMNS[name]) for name in self._names]
        widths = [_COLUMNS[name][1] for name in self._names]
        rules = ["-" * (abs(w) - 1) + (":" if w > 0 else "-") for w in widths]
        return f"| {' | '.join(cells)} |\n| {' | '.join(rules)} |\n"

    def row(self, row: SpeedRow, model: ModelFacts, extra: Mapping[str, Any]) -> str:
        """A measured case; extras have lines of their own."""
        values = {name: _plain(value) for name, value in fields(row, model).items()} | {
            "model": model.type,
            "size": _size(model.size),
            "params": _count(model.n_params),
            "backend": model.backend,
            "test": row.case.name,
            "t/s": f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        }
        cells = [_pad(values[name], _COLUMNS[name][1]) for name in self._names]
        return f"| {' | '.join(cells)} |\n"

    def note(self, misfit: SpeedMisfit) -> str:
        """The case and the reason, in place of a number."""
        return f"| {misfit.case.name} | {misfit.reason} |\n"

    def footer(self) -> str:
        """What was built from what."""
        return f"\nbuild: {build_commit()} ({build_number()})\n"


def _pad(text: str, width: int) -> str:
    return text.rjust(width) if width > 0 else text.ljust(-width)


def _size(n_bytes: int) -> str:
    mib = n_bytes / (1 << 20)
    return f"{mib:.2f} MiB" if n_bytes < 1 << 30 else f"{mib / 1024:.2f} GiB"


def _count(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 10**9 else f"{n / 1e9:.2f} B"
