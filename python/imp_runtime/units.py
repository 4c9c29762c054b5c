"""Sizes as people write and read them, and columns of text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from imp_runtime.errors import ImpError

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
"""Bytes of a unit, by its name in lower case."""
MAX_BYTES = 1 << 60
"""A size above this is a slip of the pen."""
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, what: str) -> int:
    """A number of bytes: digits, a fraction if there is a unit, and B, kB, GB, GiB and so on.

    Args:
        text: such as "32GiB", "1.5 GB" or "34359738368".
        what: the flag or field, for the error.

    Raises:
        ImpError: it is no size, or above MAX_BYTES.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or ("." in match[1] and unit == 1):
        raise ImpError(f"{what} is '{text}', it must be a size such as 32GiB, 32GB or 34359738368")
    whole, _, fraction = match[1].partition(".")
    size = int(whole) * unit + int(fraction or 0) * unit // int(10 ** len(fraction))
    if size > MAX_BYTES:
        raise ImpError(f"{what} is {size} bytes, at most {MAX_BYTES} can be")
    return size


def gib(n_bytes: float) -> str:
    """9261023232 -> `8.62 GiB`."""
    return f"{n_bytes / (1 << 30):.2f} GiB"


def size(n_bytes: int) -> str:
    """1234567 -> `1.23 MB`."""
    value, unit = float(n_bytes), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, bigger
    return f"{n_bytes} B" if unit == "B" else f"{value:.3g} {unit}"


def table(rows: Iterable[tuple[str, ...]], right: frozenset[int]) -> list[str]:
    """Aligned columns; those in `right` to the right."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
