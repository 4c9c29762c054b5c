"""Sizes as people write them."""

import pytest

from imp_runtime.errors import ImpError
from imp_runtime.units import MAX_BYTES, gib, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("32GiB", 34359738368),
        ("32GB", 32000000000),
        ("34359738368", 34359738368),
        (" 1.5 gib ", 1610612736),
        ("0.1kB", 100),
        ("7B", 7),
        ("0", 0),
        ("2TiB", 2 << 40),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text, "--vram-limit") == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "1e9", "32G", "32 GiB x", "1_000", "٣GB"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ImpError, match="--vram-limit is '.*', it must be a size such as 32GiB"):
        parse_bytes(text, "--vram-limit")


def test_the_limit() -> None:
    with pytest.raises(ImpError, match=f"{MAX_BYTES + 1} bytes, at most {MAX_BYTES} can be"):
        parse_bytes(str(MAX_BYTES + 1), "x")
    assert gib(3 << 29) == "1.50 GiB"
