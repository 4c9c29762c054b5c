"""llama.cpp-style command lines: a declarative flag table, its parser and its help.

A flag is written as in llama.cpp's help: ``"-c,--ctx-size N"``. A placeholder in brackets,
``"-fa,--flash-attn [on|off|auto]"``, may be left out; ``|`` in a placeholder lists the allowed
words. Names match exactly: no abbreviations, no ``--name=value``; a later flag wins. As in
llama.cpp, ``_`` may stand for ``-`` in long names. An appending flag collects the values of all its
uses.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

HELP_COLUMN = 40
HELP_WIDTH = 100
INT32_MAX = 2**31 - 1


class FlagError(Exception):
    """The command line cannot be used; the message is one sentence for the user."""


class Meaning(Enum):
    """What a flag does in this tool."""

    USED = "used"
    IGNORED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Flag:
    """One row of the table.

    Attributes:
        names: all spellings, the first long one (or the first) gives the key.
        placeholders: one per value the flag takes.
        type: ``str``, ``int`` (32 bits) or ``float``; of every value.
        default: value when the flag is absent; switches: False.
        help: what it does, or why it does nothing or is refused.
        meaning: used, ignored or refused.
        store: what a switch stores.
        into: key of the flag whose value it stores to, if not its own.
        append: the value is a list with one entry per use.

    """

    names: tuple[str, ...]
    placeholders: tuple[str, ...]
    type: type
    default: Any
    help: str
    meaning: Meaning
    store: Any = True
    into: str = ""
    append: bool = False

    @property
    def key(self) -> str:
        """Name of the parsed value: ``--ctx-size`` gives ``ctx_size``."""
        if self.into:
            return self.into
        name = next((name for name in self.names if name.startswith("--")), self.names[0])
        return name.lstrip("-").replace("-", "_")

    @property
    def optional(self) -> bool:
        """Whether its one value may be left out."""
        return len(self.placeholders) == 1 and self.placeholders[0].startswith("[")

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words, empty if any is."""
        if len(self.placeholders) != 1 or "|" not in self.placeholders[0]:
            return ()
        return tuple(self.placeholders[0].strip("[]").split("|"))


def flag(
    spelling: str,
    help: str,
    *,
    type: type = str,
    default: Any = None,
    store: Any = True,
    into: str = "",
    append: bool = False,
) -> Flag:
    """A flag that is used."""
    names, placeholders = _split(spelling)
    if not placeholders and default is None:
        default = False
    return Flag(names, placeholders, type, default, help, Meaning.USED, store, into, append)


def ignored(reason: str, *spellings: str) -> list[Flag]:
    """Flags of llama.cpp that change nothing here; one sentence says why."""
    return [Flag(*_split(spelling), str, None, reason, Meaning.IGNORED) for spelling in spellings]


def refused(reason: str, *spellings: str) -> list[Flag]:
    """Flags of llama.cpp that would change the result or do work that is not done here."""
    return [Flag(*_split(spelling), str, None, reason, Meaning.REFUSED) for spelling in spellings]


def without(flags: Iterable[Flag], taken: Iterable[Flag]) -> list[Flag]:
    """Those of `flags` whose names are not among `taken`."""
    names = {name for row in taken for name in row.names}
    return [row for row in flags if not names & set(row.names)]


def _split(spelling: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names, *placeholders = spelling.split(" ")
    return tuple(names.split(",")), tuple(placeholders)


@dataclass(frozen=True)
class Parsed:
    """A parsed command line.

    Attributes:
        values: value by key for every used flag, defaults included.
        given: keys of the used flags that were on the command line.
        notes: one sentence per ignored flag, in order, each once.

    """

    values: dict[str, Any]
    given: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


class FlagTable:
    """All flags of one tool."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        """Index the flags.

        Raises:
            ValueError: if two flags share a name.

        """
        self.flags = list(flags)
        self._by_name: dict[str, Flag] = {}
        for row in self.flags:
            for name in row.names:
                if self._by_name.setdefault(name, row) is not row:
                    raise ValueError(f"two flags are called {name}")

    def parse(self, arguments: Sequence[str]) -> Parsed:
        """Read a command line.

        Raises:
            FlagError: on an unknown or refused flag, a missing value or a value out of its type.

        """
        parsed = Parsed(
            {
                row.key: row.default
                for row in self.flags
                if row.meaning is Meaning.USED and not row.into
            }
        )
        noted: set[str] = set()
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            row = self._find(word)
            values = _take_values(row, word, rest)
            if row.meaning is Meaning.REFUSED:
                raise FlagError(f"{word} is not supported: {row.help}")
            if row.meaning is Meaning.IGNORED:
                if row.key not in noted:
                    parsed.notes.append(f"{word} has no effect here: {row.help}")
                noted.add(row.key)
                continue
            first_use = row.key not in parsed.given
            parsed.given.add(row.key)
            if not row.placeholders:
                parsed.values[row.key] = row.store
            elif values:
                converted = [_convert(row, word, value) for value in values]
                value = converted[0] if len(converted) == 1 else converted
                if row.append:
                    value = [value] if first_use else [*parsed.values[row.key], value]
                parsed.values[row.key] = value
        return parsed

    def _find(self, word: str) -> Flag:
        name = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
        row = self._by_name.get(name)
        if row is None:
            raise FlagError(f"invalid argument: {word}")
        return row

    def help_text(self, sections: Mapping[Meaning, str]) -> str:
        """The table as text, one section per meaning under its title."""
        lines: list[str] = []
        for meaning, title in sections.items():
            lines += ["", title]
            for row in self.flags:
                if row.meaning is meaning:
                    lines += _help_lines(row)
        return "\n".join(lines[1:])


def _take_values(row: Flag, word: str, rest: list[str]) -> list[str]:
    """Remove the flag's values from the front of ``rest``."""
    if row.optional:
        return [rest.pop(0)] if rest and rest[0] in row.choices else []
    if len(rest) < len(row.placeholders):
        raise FlagError(f"{word} expects {' '.join(row.placeholders)}, nothing follows it")
    return [rest.pop(0) for _ in row.placeholders]


def _convert(row: Flag, word: str, value: str) -> Any:
    if row.choices and value not in row.choices:
        raise FlagError(f"{word} is {value!r}, it must be one of {', '.join(row.choices)}")
    try:
        converted = row.type(value)
    except ValueError:
        kind = "a whole number" if row.type is int else "a number"
        raise FlagError(f"{word} is {value!r}, it must be {kind}") from None
    if row.type is int and not -INT32_MAX - 1 <= converted <= INT32_MAX:
        raise FlagError(f"{word} is {value}, it must fit 32 bits (at most {INT32_MAX})")
    return converted


def _help_lines(row: Flag) -> list[str]:
    left = ", ".join(row.names) + "".join(f" {word}" for word in row.placeholders)
    text = row.help
    if row.meaning is Meaning.USED and row.default not in (None, False):
        text += f" (default: {row.default})"
    right = textwrap.wrap(text, HELP_WIDTH - HELP_COLUMN)
    if len(left) < HELP_COLUMN:
        first = left.ljust(HELP_COLUMN) + right.pop(0)
    else:
        first = left
    return [first, *(" " * HELP_COLUMN + line for line in right)]
