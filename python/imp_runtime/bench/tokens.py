"""What a benchmark reads: a real text, or random tokens that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from imp_runtime.errors import ImpError

Int32 = npt.NDArray[np.int32]


class TokenSource(Protocol):
    """Tokens for any number of sequences."""

    @property
    def label(self) -> str:
        """Where the tokens come from, for the report."""

    def take(self, count: int, length: int) -> Int32:
        """int32 [count, length], the same for the same numbers."""


@dataclass(frozen=True)
class RandomTokens:
    """Uniform over the vocabulary, as llama.cpp's benchmarks use them.

    Random tokens route to experts and look n-grams up unlike any text does.
    """

    vocab_size: int
    seed: int = 0
    bos_id: int | None = None
    """First token of every sequence, if the model uses one."""

    @property
    def label(self) -> str:
        """Named as what they are."""
        return f"random (seed {self.seed})"

    def take(self, count: int, length: int) -> Int32:
        """int32 [count, length]."""
        random = np.random.default_rng(self.seed)
        out = random.integers(0, self.vocab_size, (count, length), dtype=np.int32)
        if self.bos_id is not None:
            out[:, :1] = self.bos_id
        return out


@dataclass(frozen=True)
class TextTokens:
    """A text, cut into consecutive sequences; it starts again at its end."""

    ids: Int32
    name: str

    @classmethod
    def of(cls, ids: Sequence[int], name: str) -> TextTokens:
        """From token ids. Raises ImpError if there are none."""
        if not len(ids):
            raise ImpError(f"{name} holds no tokens, at least 1 is needed")
        return cls(np.asarray(ids, np.int32), name)

    @property
    def label(self) -> str:
        """File and length, so that a reader sees when it had to repeat."""
        return f"text {self.name} ({len(self.ids)} tokens)"

    def take(self, count: int, length: int) -> Int32:
        """int32 [count, length]."""
        return np.resize(self.ids, (count, length))
