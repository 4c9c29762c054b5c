"""The random choices of llama-perplexity's tasks: std::mt19937 seeded with 1, as on Linux x86-64.

The generator is numpy's `RandomState`, the same Mersenne Twister with the same seeding. Full-range
draws of 32 bits are its output as it is.
"""

import numpy as np

SEED = 1
WORD_BITS = 32
WORD_VALUES = 1 << WORD_BITS


class Words:
    """The generator's output, one 32-bit word at a time."""

    def __init__(self) -> None:
        self._state = np.random.RandomState(SEED)

    def next(self) -> int:
        """The next word, 0 to 2**32 - 1."""
        return int(self._state.randint(0, WORD_VALUES, dtype=np.uint32))

    def below(self, n: int) -> int:
        """A number below ``n`` < 2**32, as libstdc++'s uniform_int_distribution draws it.

        The high word of word * n; products whose low word falls into the uneven rest are thrown
        away (D. Lemire, Fast Random Integer Generation in an Interval, ACM TOMACS 29, 2019).
        """
        rest = (WORD_VALUES - n) % n
        while True:
            product = self.next() * n
            if product % WORD_VALUES >= rest:
                return product >> WORD_BITS


def draw_uniform(n_items: int, n_wanted: int) -> list[int]:
    """HellaSwag's choice: indices without repetition, the order of the rest kept."""
    words = Words()
    left = list(range(n_items))
    return [left.pop(words.below(len(left))) for _ in range(n_wanted)]


def draw_scaled(n_items: int, n_wanted: int) -> list[int]:
    """Winogrande's and multiple choice's choice: indices without repetition.

    The index is word / 2**32 * (items left) in float32, and the last item takes the chosen one's
    place. float32 can round up to the number of items, one behind the last, where llama.cpp reads
    outside its list; here that is the last one.
    """
    words = Words()
    left = list(range(n_items))
    drawn = []
    for _ in range(n_wanted):
        share = np.float32(words.next()) * np.float32(1 / WORD_VALUES)
        index = min(int(share * np.float32(len(left))), len(left) - 1)
        drawn.append(left[index])
        left[index] = left[-1]
        left.pop()
    return drawn
