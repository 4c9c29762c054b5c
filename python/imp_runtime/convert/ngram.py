"""Hash constants of the n-gram block, derived from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class HashConstants:
    """Constants of one n-gram layer.

    multipliers: one odd number per position of the window.
    vocab_sizes, offsets: rows and first row of each head in the table.
    """

    multipliers: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Table rows that the heads use."""
        return self.offsets[-1] + self.vocab_sizes[-1]


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_prime(n: int) -> bool:
    return n >= 2 and all(n % d for d in range(2, isqrt(n) + 1))


def derive(
    *, vocab_size: int, seed: int, ngram_size: int, heads_per_ngram: int, base: int, index: int
) -> HashConstants:
    """Constants of the `index`-th n-gram layer, as the model's authors derive them.

    `base` is the smallest head size: heads take the following primes, each layer its own.
    """
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    start = seed + 10007 * index
    multipliers = tuple(
        2 * (_splitmix64((start + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(ngram_size)
    )
    heads = (ngram_size - 1) * heads_per_ngram
    primes: list[int] = []
    candidate = base
    while len(primes) < (index + 1) * heads:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    sizes = tuple(primes[index * heads :])
    offsets = tuple(sum(sizes[:h]) for h in range(heads))
    return HashConstants(multipliers, sizes, offsets)
