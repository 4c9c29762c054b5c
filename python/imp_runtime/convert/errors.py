"""What a conversion refuses: one exception that lists every problem of a checkpoint."""

from __future__ import annotations

from imp_runtime.errors import ImpError

MAX_LISTED = 40  # problems printed; the rest is counted


class ConvertError(ImpError):
    """A checkpoint cannot be converted; nothing was left under the final name.

    `problems` holds every single problem, the message at most `MAX_LISTED` of them.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class Problems:
    """Collects problems so that one error can name them all."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, sentence: str) -> None:
        """Notes one problem."""
        self._found.append(sentence)

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self, subject: str) -> None:
        """Raises ConvertError if anything was noted; `subject` says what is wrong with it."""
        if not self._found:
            return
        found = tuple(dict.fromkeys(self._found))
        if len(found) == 1:
            raise ConvertError(f"{subject}: {found[0]}", found)
        lines = [f"{subject}: {len(found)} problems", *(f"  - {p}" for p in found[:MAX_LISTED])]
        if len(found) > MAX_LISTED:
            lines.append(f"  - and {len(found) - MAX_LISTED} more")
        raise ConvertError("\n".join(lines), found)
