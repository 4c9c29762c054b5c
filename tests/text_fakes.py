"""A model and session that follow a script, so that text code is tested without weights."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from imp_runtime.errors import ImpError
from tests.tokenizer.prose_keys import keys_of

KEYS = keys_of(Path(__file__).parents[1] / "models" / "prose-nvfp4")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = len(KEYS["tokenizer.ggml.tokens"]) + 8  # more rows than tokens, as in padded models


class FakeModel(SimpleNamespace):
    """Attributes of Model that LLM uses."""

    def __init__(self, **keys: object) -> None:
        super().__init__(
            keys=KEYS | {"tokenizer.chat_template": TEMPLATE} | keys,
            vocab_size=VOCAB,
            context_length=1000,
            notes=[],
            closed=False,
        )

    def close(self) -> None:
        self.closed = True


class FakeSession:
    """Gives the tokens of `script` one after the other, whatever it is fed."""

    def __init__(self, script: list[int], n_ctx: int = 1000) -> None:
        self.script, self.n_ctx = list(script), n_ctx
        self.fed: list[list[int]] = []  # one entry per extend
        self.n_open, self.closed = 0, False
        self.interrupt_at: int | None = None  # the extend that raises KeyboardInterrupt
        self.slots = 0  # of a cache of experts that misses one expert of four

    def open(self) -> "FakeSequence":
        if self.n_open:
            raise ImpError("sequences: 1 needed, 0 available")
        self.n_open += 1
        return FakeSequence(self)

    def expert_stats(self) -> dict[str, object]:
        steps = len(self.fed)
        counts = {"wanted": [4 * steps, 8 * steps], "hits": [4 * steps, 5 * steps]}
        counts["fetch_ns"] = [0, 10**6 * steps]
        return {"slots": self.slots, "blob_bytes": 1_000_000} | counts

    def close(self) -> None:
        self.closed = True


class FakeSequence:
    def __init__(self, session: FakeSession) -> None:
        self.session, self.tokens, self.closed = session, [], False
        self.n_ubatch = 512

    @property
    def length(self) -> int:
        return len(self.tokens)

    def extend(self, tokens, outputs="last"):
        session = self.session
        assert not self.closed and outputs in ("last", "none") and len(tokens) > 0
        if len(session.fed) == session.interrupt_at:
            session.interrupt_at = None
            raise KeyboardInterrupt
        assert self.length + len(tokens) <= session.n_ctx
        self.tokens.extend(int(t) for t in tokens)
        session.fed.append([int(t) for t in tokens])
        logits = np.zeros((1, VOCAB), np.float32)
        if outputs == "last":
            logits[0, session.script.pop(0)] = 20.0
        return logits

    def choose(self, tokens, draw):
        return self.extend(tokens)[-1]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.session.n_open -= 1

    def __enter__(self) -> "FakeSequence":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
