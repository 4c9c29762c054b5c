"""A session of forkable sequences whose logits are any function of the tokens so far."""

from collections.abc import Callable

import numpy as np


class Sequence:
    def __init__(self, session: "Session", tokens: list[int]) -> None:
        self.session = session
        self.tokens = list(tokens)
        self.id = session.next_id
        session.next_id += 1
        session.open_sequences[self.id] = self
        session.most_open = max(session.most_open, len(session.open_sequences))

    def fork(self) -> "Sequence":
        return Sequence(self.session, self.tokens)

    def close(self) -> None:
        del self.session.open_sequences[self.id]


class Session:
    """Records its steps."""

    def __init__(self, logits: Callable[[list[int]], np.ndarray], n_ubatch: int = 512) -> None:
        self.logits = logits
        self.n_ubatch = n_ubatch
        self.next_id = 0
        self.open_sequences: dict[int, Sequence] = {}
        self.most_open = 0
        self.steps: list[int] = []  # tokens of each

    @property
    def core(self) -> "Session":
        return self

    def open(self) -> Sequence:
        return Sequence(self, [])

    def step(self, requests) -> np.ndarray:
        assert len({id for id, _, _ in requests}) == len(requests)
        self.steps.append(sum(len(tokens) for _, tokens, _ in requests))
        assert 0 < self.steps[-1] <= self.n_ubatch
        rows = []
        for id, tokens, first in requests:
            assert tokens.dtype == np.int32 and 0 <= first <= len(tokens) > 0
            history = self.open_sequences[id].tokens
            for i, token in enumerate(tokens.tolist()):
                history.append(token)
                if i >= first:
                    rows.append(self.logits(history))
        return np.array(rows, np.float32)
