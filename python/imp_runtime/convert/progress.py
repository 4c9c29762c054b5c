"""How a conversion reports what it does; the library itself prints nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What `convert` calls; every method returns quickly and may raise KeyboardInterrupt."""

    def begin(self, stage: str, total_bytes: int) -> None:
        """A stage starts: `checking`, `writing` or `verifying`."""

    def advance(self, nbytes: int) -> None:
        """`nbytes` more of the stage are done."""

    def end(self) -> None:
        """The stage is over."""

    def note(self, line: str) -> None:
        """A decision that the caller may want to see."""


class Silent:
    """Reports nothing."""

    def begin(self, stage: str, total_bytes: int) -> None:
        """Ignored."""

    def advance(self, nbytes: int) -> None:
        """Ignored."""

    def end(self) -> None:
        """Ignored."""

    def note(self, line: str) -> None:
        """Ignored."""
