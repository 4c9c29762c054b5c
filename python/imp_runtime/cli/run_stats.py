"""`imp run --stats`: a line under the text that is drawn again and again, and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from rich.console import Console

from imp_runtime.stats import Stats

REFRESH_SECONDS = 0.2
# Below the cursor, which stays where it is: room for a line is made by going down and up.
_DRAW = "\x1bD\x1bM\x1b7\x1bD\r\x1b[K{}\x1b8"
_ERASE = "\x1b[J"


class LiveStats:
    """What came since the last summary. The line is drawn only if stderr is a terminal."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        """Begin now; `stats` is called between steps only."""
        self._stats = stats
        self._before = stats()
        self._console = Console(stderr=True)
        self._line = ""
        self._due = 0.0

    def update(self) -> None:
        """Draw the line if it is time."""
        now = time.monotonic()
        if not self._console.is_terminal or now < self._due:
            return
        self._due = now + REFRESH_SECONDS
        self._line = "; ".join(_parts(self._stats() - self._before))[: self._console.width - 1]
        self._draw()

    def write(self, text: str) -> None:
        """Text for stdout, which may be the same terminal."""
        self._erase()
        sys.stdout.write(text)
        sys.stdout.flush()
        self._draw()

    def summary(self, first_token_seconds: Sequence[float]) -> list[str]:
        """Take the line away; its last state with the times to the first tokens, in lines."""
        self._erase()
        self._line = ""
        now = self._stats()
        parts, self._before = _parts(now - self._before), now
        lines = [f"stats: {parts[0]}{_first_token(first_token_seconds)}; {parts[1]}"]
        return lines + [f"stats: {part}" for part in parts[2:]]

    def _draw(self) -> None:
        if self._line:
            sys.stderr.write(_DRAW.format(self._line))
            sys.stderr.flush()

    def _erase(self) -> None:
        if self._line:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


def _parts(stats: Stats) -> list[str]:
    t = stats.timings
    cached = f" and {t.cached_tokens} from the cache" if t.cached_tokens else ""
    parts = [f"prompt {t.prompt_tokens} tokens{cached}, {t.prompt_per_second:.2f} t/s"]
    step = f" ({1e3 / t.decode_per_second:.2f} ms a token)" if t.decode_per_second else ""
    parts.append(f"decode {t.decode_tokens} tokens, {t.decode_per_second:.2f} t/s{step}")
    return parts if stats.experts is None else [*parts, f"experts: {stats.experts}"]


def _first_token(seconds: Sequence[float]) -> str:
    known = [s for s in seconds if s]
    if len(known) < 2:
        return f", first token after {known[0]:.3f} s" if known else ""
    return f", first tokens after {median(known):.3f} s (median), {max(known):.3f} s at most"
