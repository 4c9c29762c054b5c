"""Stop texts, end reasons, log-probabilities: one generation, fed logits by hand."""

import numpy as np
import pytest

from imp_runtime.generation import Chunk, Generation, StopText
from imp_runtime.sampling import SamplingParams
from imp_runtime.tokenizer import Tokenizer
from tests.text_fakes import KEYS, VOCAB


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(KEYS)


def run(
    tokenizer: Tokenizer, ids: list[int], room: int = 1000, **values: object
) -> tuple[list[Chunk], Generation]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": None} | values)
    generation = Generation(tokenizer, params, [1, 2], room)
    chunks = []
    for token in ids:
        logits = np.zeros(VOCAB, np.float32)
        logits[token] = 9
        chunks.append(generation.push(logits))
        if generation.finish_reason:
            break
    return chunks, generation


def text(chunks: list[Chunk]) -> str:
    return "".join(c.text for c in chunks)


def test_until_eos(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, wörld 日本<|im_end|>never", parse_special=True)
    chunks, generation = run(tokenizer, ids)
    assert text(chunks) == "Hello, wörld 日本"
    assert chunks[-1].finish_reason == "eos" and chunks[-2].finish_reason is None
    assert generation.token_ids[-1] == tokenizer.eos_id
    assert all("\ufffd" not in c.text for c in chunks)


def test_every_end_token_ends(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.eos_ids) == 2
    for end in tokenizer.eos_ids:
        assert run(tokenizer, [40, end, 40])[0][-1].finish_reason == "eos"


def test_ignore_eos(tokenizer: Tokenizer) -> None:
    chunks, _ = run(tokenizer, [40, tokenizer.eos_id, 41], ignore_eos=True)
    assert len(chunks) == 3 and chunks[-1].finish_reason is None
    assert chunks[1].token_id not in tokenizer.eos_ids


def test_length(tokenizer: Tokenizer) -> None:
    chunks, _ = run(tokenizer, [40] * 9, max_tokens=3)
    assert (len(chunks), chunks[-1].finish_reason) == (3, "length")
    chunks, _ = run(tokenizer, [40] * 9, max_tokens=3, room=2)
    assert (len(chunks), chunks[-1].finish_reason) == (2, "length")
    assert run(tokenizer, [], max_tokens=0)[1].finish_reason == "length"


def test_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a日")
    chunks, _ = run(tokenizer, ids, max_tokens=len(ids) - 1)
    assert text(chunks) == "a\ufffd" == tokenizer.decode(ids[:-1])


def test_stop_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two STOP three")
    chunks, generation = run(tokenizer, ids, stop=["STOP", "never"])
    assert text(chunks) == "one two "
    assert generation.finish_reason == "stop"
    assert "three" not in tokenizer.decode(generation.token_ids)


def test_what_only_looks_like_a_stop_text_comes_later(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a STO b")
    chunks, _ = run(tokenizer, ids, max_tokens=len(ids), stop=["STOP"])
    assert text(chunks) == "a STO b"
    chunks, _ = run(tokenizer, tokenizer.encode("a STO"), max_tokens=None, stop=["STOP"])
    assert text(chunks) == "a "  # still open: held back
    ids = tokenizer.encode("a STO<|im_end|>", parse_special=True)
    assert text(run(tokenizer, ids, stop=["STOP"])[0]) == "a STO"


def test_stop_ids(tokenizer: Tokenizer) -> None:
    chunks, _ = run(tokenizer, [40, 41, 42], stop_token_ids=[41])
    assert (len(chunks), chunks[-1].finish_reason, chunks[-1].text) == (2, "stop", "")
    # one that is also an end token still stops when those are ignored
    end = tokenizer.eos_id
    chunks, _ = run(tokenizer, [40, end], stop_token_ids=[end], ignore_eos=True)
    assert chunks[-1].finish_reason == "stop"


def test_logprobs(tokenizer: Tokenizer) -> None:
    chunks, _ = run(tokenizer, [40, 41], logprobs=3)
    entry = chunks[0].logprob
    expected = 9 - np.log(np.exp(9) + VOCAB - 1)
    assert entry is not None and entry.token_id == 40
    assert entry.logprob == pytest.approx(expected)
    assert entry.top[0] == (40, pytest.approx(expected)) and len(entry.top) == 3
    assert run(tokenizer, [40])[0][0].logprob is None


def test_penalties_see_the_prompt(tokenizer: Tokenizer) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[1], logits[5] = 2.0, 1.9
    for penalty, expected in ((1.0, 1), (1.5, 5)):
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        assert Generation(tokenizer, params, [1, 2], 9).push(logits).token_id == expected
    near = SamplingParams(temperature=0, repetition_penalty=1.5, penalty_last_n=1)
    assert Generation(tokenizer, near, [1, 2], 9).push(logits).token_id == 1
    assert Generation(tokenizer, near, [2, 1], 9).push(logits).token_id == 5


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "hit"),
    [
        (["abc"], ["a", "b", "c"], "", True),
        (["abc"], ["xa", "b", "d"], "xabd", False),
        (["aab"], ["a", "a", "a", "b"], "a", True),  # the held text is tried again from inside
        (["b", "ab"], ["xab"], "x", True),  # the earliest wins
        (["日本"], ["x日", "本y"], "x", True),
        ([], ["abc"], "abc", False),
        (["ab", "bcd"], ["a", "c", "b", "c", "e"], "acbce", False),
    ],
)
def test_stop_text_pieces(stops: list[str], pieces: list[str], expected: str, hit: bool) -> None:
    stop = StopText(stops)
    out = ""
    for piece in pieces:
        out += stop.push(piece)
        if stop.hit:
            break
    out += stop.flush()
    assert (out, stop.hit) == (expected, hit)


def test_stop_text_is_as_searching_the_whole_text() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        letters = "".join(rng.choice(list("ab"), 12))
        stops = ["".join(rng.choice(list("ab"), int(n))) for n in rng.integers(2, 6, 2)]
        stop, out = StopText(stops), ""
        for letter in letters:
            out += stop.push(letter)
            if stop.hit:
                break
        else:
            out += stop.flush()
        ends = [(letters.find(s) + len(s), letters.find(s)) for s in stops if s in letters]
        # letter by letter, the stop text that is complete first ends it
        first = min(ends)[0] if ends else None
        starts = [at for end, at in ends if end == first]
        assert out == (letters[: min(starts)] if ends else letters)
