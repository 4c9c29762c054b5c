"""The flag table: exactness of names, values, notes and refusals."""

import pytest

from imp_runtime.cli.llama_common import COMMON
from imp_runtime.cli.llama_flags import FlagError, FlagTable, Meaning, flag, ignored, refused

TABLE = FlagTable(
    [
        flag("-c,--ctx-size N", "window", type=int, default=512),
        flag("-x,--scale N", "factor", type=float),
        flag("--mode slow|fast", "pace", default="slow"),
        flag("--trace", "more"),
        flag("--no-trace", "less", store=False, into="trace"),
        flag("--range LO HI", "two", type=int),
        *ignored("it is always so", "-fa,--flash-attn [on|off]", "--mlock"),
        *refused("nothing is downloaded", "-hf,--hf-repo REPO"),
    ]
)


def test_values_and_defaults() -> None:
    parsed = TABLE.parse(["-c", "7", "--scale", "1.5", "--trace", "--range", "3", "-4"])
    assert parsed.values == {
        "ctx_size": 7, "scale": 1.5, "mode": "slow", "trace": True, "range": [3, -4],
    }  # fmt: skip
    assert parsed.given == {"ctx_size", "scale", "trace", "range"}
    defaults = TABLE.parse([])
    assert (defaults["ctx_size"], defaults["trace"], defaults["scale"]) == (512, False, None)


def test_the_last_one_wins_and_underscores_are_dashes() -> None:
    parsed = TABLE.parse(["-c", "1", "--ctx_size", "2", "--trace", "--no-trace"])
    assert parsed["ctx_size"] == 2 and parsed["trace"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ctx"], "invalid argument: --ctx"),
        (["--ctx-size=5"], "invalid argument: --ctx-size=5"),
        (["-c5"], "invalid argument: -c5"),
        (["stray"], "invalid argument: stray"),
        (["-c"], "-c expects N, nothing follows it"),
        (["--range", "1"], "--range expects LO HI, nothing follows it"),
        (["-c", "12x"], "-c is '12x', it must be a whole number"),
        (["-c", "2147483648"], "-c is 2147483648, it must fit 32 bits (at most 2147483647)"),
        (["-x", "fast"], "-x is 'fast', it must be a number"),
        (["--mode", "medium"], "--mode is 'medium', it must be one of slow, fast"),
        (["-hf", "a/b"], "-hf is not supported: nothing is downloaded"),
    ],
)
def test_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        TABLE.parse(arguments)
    assert str(caught.value) == message


def test_largest_and_smallest_number() -> None:
    assert TABLE.parse(["-c", "2147483647"])["ctx_size"] == 2**31 - 1
    assert TABLE.parse(["-c", "-2147483648"])["ctx_size"] == -(2**31)


def test_ignored_flags_are_noted_once_and_take_their_values() -> None:
    parsed = TABLE.parse(["-fa", "on", "-fa", "--mlock", "--flash-attn", "off", "-c", "3"])
    assert parsed.notes == [
        "-fa has no effect here: it is always so",
        "--mlock has no effect here: it is always so",
    ]
    assert parsed["ctx_size"] == 3 and "flash_attn" not in parsed.values


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="two flags are called -c"):
        FlagTable([flag("-c N", "one"), flag("-c,--other", "two")])
    FlagTable(COMMON)


def test_help_lists_every_flag() -> None:
    text = FlagTable([*TABLE.flags[:6], *COMMON]).help_text(dict.fromkeys(Meaning, ""))
    for row in COMMON:
        assert ", ".join(row.names) in text
    assert "window (default: 512)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
