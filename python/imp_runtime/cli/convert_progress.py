"""Progress of a conversion on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from imp_runtime.convert.describe import size_text
from imp_runtime.convert.progress import Progress as ConvertProgress
from imp_runtime.convert.progress import Silent

LINE_SECONDS = 5.0  # between two plain lines of one stage


def console_progress(*, quiet: bool) -> ConvertProgress:
    """What fits stderr: nothing, a bar, or lines."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


class Bar:
    """A bar with bytes, speed and remaining time per stage."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, stage: str, total_bytes: int) -> None:
        """Shows a new bar."""
        self.end()
        self._bar = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(stage, total=total_bytes)
        self._bar.start()

    def advance(self, nbytes: int) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)

    def end(self) -> None:
        """Leaves the finished bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False, highlight=False)


class Lines:
    """A line when a stage ends, and every few seconds before that."""

    def __init__(self) -> None:
        self._stage = ""
        self._total = self._done = 0
        self._started = self._shown = 0.0

    def begin(self, stage: str, total_bytes: int) -> None:
        """Starts the clock."""
        self._stage, self._total, self._done = stage, total_bytes, 0
        self._started = self._shown = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Prints a line if the last one is old enough."""
        self._done += nbytes
        if time.monotonic() - self._shown >= LINE_SECONDS:
            self._show()

    def end(self) -> None:
        """Prints the stage's last line."""
        if self._total:
            self._show()

    def note(self, line: str) -> None:
        """Prints it."""
        print(line, file=sys.stderr)

    def _show(self) -> None:
        self._shown = time.monotonic()
        speed = self._done / max(self._shown - self._started, 1e-9)
        print(
            f"{self._stage}: {size_text(self._done)} of {size_text(self._total)}, "
            f"{size_text(speed)}/s",
            file=sys.stderr,
        )
