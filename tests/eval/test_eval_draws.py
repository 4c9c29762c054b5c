"""Random choices against std::mt19937(1) with libstdc++'s distributions (g++ 12, x86-64)."""

import numpy as np
import pytest

from imp_runtime.eval import draws

WORDS = [1791095845, 4282876139, 3093770124, 4005303368, 491263, 550290313, 1298508491, 4290846341]
BELOW = {
    1: [0, 0, 0, 0, 0, 0, 0, 0],
    2: [0, 1, 1, 1, 0, 0, 0, 1],
    3: [1, 2, 2, 2, 0, 0, 0, 2],
    7: [2, 6, 5, 6, 0, 0, 2, 6],
    400: [166, 398, 288, 373, 0, 51, 120, 399],
    10042: [4187, 10013, 7233, 9364, 1, 1286, 3036, 10032],
    1000000007: [417022001, 997184815, 720324494, 932557367, 114381, 128124448, 302332569,
                 999040522],
    # A third of the words are thrown away here: the fifth draw is not the fifth word.
    3000000000: [1251065995, 2991554424, 2160973467, 2797672083, 384373343, 440267677, 708266928,
                 277015786],
    4294967295: [1791095844, 4282876138, 3093770123, 4005303367, 491262, 550290312, 1298508490,
                 4290846340],
}  # fmt: skip
UNIFORM = {
    5: [2, 4, 3, 1, 0],
    10: [4, 9, 6, 8, 0, 1, 3, 7, 2, 5],
    10042: [4187, 10013, 7233, 9363, 1, 1286, 3036, 10032, 1474, 2371, 927, 3984],
}
SCALED = {
    3: [1, 2, 0],
    10: [4, 8, 5, 6, 0, 7, 1, 2, 9, 3],
    1267: [528, 1262, 911, 1178, 0, 161, 381, 1258, 184, 296, 116, 498],
}


def test_words_are_the_generators() -> None:
    words = draws.Words()
    assert [words.next() for _ in WORDS] == WORDS


@pytest.mark.parametrize("n", BELOW)
def test_uniform_numbers(n: int) -> None:
    words = draws.Words()
    assert [words.below(n) for _ in BELOW[n]] == BELOW[n]


@pytest.mark.parametrize("n", UNIFORM)
def test_uniform_choice(n: int) -> None:
    assert draws.draw_uniform(n, len(UNIFORM[n])) == UNIFORM[n]


@pytest.mark.parametrize("n", SCALED)
def test_scaled_choice(n: int) -> None:
    assert draws.draw_scaled(n, len(SCALED[n])) == SCALED[n]


def test_all_items_are_drawn_once() -> None:
    assert sorted(draws.draw_uniform(500, 500)) == sorted(draws.draw_scaled(500, 500))
    assert sorted(draws.draw_uniform(500, 500)) == list(range(500))


def test_the_largest_word_draws_the_last_item(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.float32(2**32 - 1) * np.float32(1 / 2**32) == 1  # an index behind the end
    monkeypatch.setattr(draws.Words, "next", lambda _: 2**32 - 1)
    assert draws.draw_scaled(4, 3) == [3, 2, 1]
