"""How long generations took."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields


@dataclass
class Timings:
    """Of one generation, or of all of a session together.

    A step that several share counts in full for each of them. Of all together it counts once: as
    reading if it reads a prompt, and then the tokens that others decode in it are left out.
    """

    prompt_tokens: int = 0  # that were read; those of cached_tokens were not
    prompt_seconds: float = 0.0
    decode_tokens: int = 0  # steps of one token each, so one less than the tokens generated
    decode_seconds: float = 0.0
    cached_tokens: int = 0
    first_token_seconds: float = 0.0  # from the request to its first token; 0 = there is none

    @property
    def prompt_per_second(self) -> float:
        """Tokens per second while reading the prompt."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """Tokens per second while generating; 0 before the second token."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def add(self, prompt: bool, tokens: int, started: float) -> None:
        """Count a step that began at perf_counter() `started`."""
        seconds = time.perf_counter() - started
        if prompt:
            self.prompt_tokens += tokens
            self.prompt_seconds += seconds
        else:
            self.decode_tokens += tokens
            self.decode_seconds += seconds

    def __sub__(self, before: Timings) -> Timings:
        """What came after `before`; first_token_seconds is of no use in it."""
        names = [field.name for field in fields(self)]
        return Timings(*(getattr(self, name) - getattr(before, name) for name in names))
