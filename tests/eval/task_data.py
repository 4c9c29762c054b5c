"""Task files of letters and spaces for the bigram model, always the same ones."""

import random
import struct

from tests.eval.bigram import WORDS

VOCABULARY = WORDS.split()


def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(rng.randint(low, high)))


def endings(rng: random.Random, n: int) -> list[str]:
    """None begins with another: llama.cpp reads beyond the end of such a one."""
    while True:
        texts = [words(rng, 1, 4) for _ in range(n)]
        if sum(a.startswith(b) for a in texts for b in texts) == n:
            return texts


def hellaswag(n_tasks: int) -> str:
    rng = random.Random(1)
    lines = []
    for _ in range(n_tasks):
        lines += [words(rng, 1, 6), str(rng.randrange(4)), *endings(rng, 4)]
    return "\n".join(lines) + "\n"


def winogrande(n_tasks: int) -> str:
    """Every third sentence ends at most two letters after the gap, every fifth is quoted."""
    rng = random.Random(2)
    lines = []
    for i in range(n_tasks):
        tail = ["", " a", " it"][i % 9 // 3] if i % 3 == 0 else " " + words(rng, 1, 3)
        choices = rng.sample("abcxyz" if i % 3 == 0 else VOCABULARY, 2)
        sentence = f"{words(rng, 1, 5)} _{tail}"
        quote = '"' * (i % 5 == 0)
        lines.append(f"{i},{quote}{sentence}{quote},{choices[0]},{choices[1]},{rng.randint(1, 2)}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def answers(texts: list[str], labels: list[int]) -> bytes:
    data = struct.pack("<I", len(texts)) + b"".join(map(_text, texts))
    return data + struct.pack(f"<{len(labels)}i", *labels)


def multiple_choice_file(tasks: list[tuple[str, list[str], list[int]]]) -> bytes:
    bodies = [
        _text(question) + answers(texts, labels) + answers(texts[:1], [1])
        for question, texts, labels in tasks
    ]
    at = 4 * (1 + len(tasks))
    positions = []
    for body in bodies:
        positions.append(at)
        at += len(body)
    return struct.pack(f"<{1 + len(tasks)}I", len(tasks), *positions) + b"".join(bodies)


def multiple_choice(n_tasks: int) -> bytes:
    rng = random.Random(3)
    tasks = []
    for _ in range(n_tasks):
        n = rng.randint(2, 4)
        right = rng.randrange(n)
        texts = endings(rng, n)
        tasks.append((words(rng, 1, 6), texts, [int(i == right) for i in range(n)]))
    return multiple_choice_file(tasks)
