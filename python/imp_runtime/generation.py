"""One generation: logits or tokens in, pieces of text out, until it ends.

A Generation knows nothing about sessions, so one loop can drive one of them or many.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from imp_runtime._core import Draw, log_probs
from imp_runtime.sampling import SamplingParams
from imp_runtime.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length", "eos"]


@dataclass(frozen=True)
class TokenLogProb:
    """Natural log-probabilities, of the model's own distribution (before penalties and filters).

    Attributes:
        token_id: the chosen token.
        logprob: its log-probability.
        top: the most probable tokens and theirs, falling.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Chunk:
    """What one step adds.

    Attributes:
        text: new text; may be empty, never ends inside a character or inside a stop text.
        token_id: the token that was chosen.
        logprob: if asked for.
        finish_reason: set on the last one: "stop" (a stop text or id), "eos" (a token of the file
            that ends text), "length" (max_tokens, or the context is full).
    """

    text: str
    token_id: int
    logprob: TokenLogProb | None = None
    finish_reason: FinishReason | None = None


class Generation:
    """The state of one generation between two steps of the model."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt: Iterable[int], room: int
    ) -> None:
        """Start after `prompt`.

        Args:
            tokenizer: of the model.
            params: see SamplingParams.
            prompt: ids of the sequence so far, which the penalties look at.
            room: tokens that may be generated before the context is full, at least 1.
        """
        self._params = params
        self._eos = tokenizer.eos_ids
        suppress = sorted(self._eos - set(params.stop_token_ids)) if params.ignore_eos else []
        self._sampler = params.sampler(suppress)
        self._history = array("i", prompt)
        self._prompt_size = len(self._history)
        self._limit = room if params.max_tokens is None else min(room, params.max_tokens)
        self._decoder = StreamDecoder(tokenizer)
        self._stop = StopText(params.stop)
        self.finish_reason: FinishReason | None = "length" if self._limit == 0 else None

    @property
    def token_ids(self) -> list[int]:
        """Tokens chosen so far, the one that ended the text included."""
        return self._history[self._prompt_size :].tolist()

    def draw(self) -> Draw | None:
        """How the step itself can choose the next token; None = push() needs the logits."""
        return None if self._params.logprobs is not None else self._sampler.next()

    def push(self, choice: int | npt.NDArray[np.float32]) -> Chunk:
        """Take the next token: as a step chose it by draw(), or from float32 [vocab] logits.

        Raises:
            ImpError: a logit is not finite.
        """
        logprob = None
        if isinstance(choice, int):
            token = choice
            self._sampler.chosen()
        else:
            row = np.ascontiguousarray(choice, np.float32)
            history = np.frombuffer(self._history, np.int32)
            token = self._sampler.sample(row, self._params.window(history))
            del history  # an exported buffer cannot grow
        self._history.append(token)
        if self._params.logprobs is not None:
            own, top = log_probs(row, token, min(self._params.logprobs, len(row)))
            logprob = TokenLogProb(token, own, top)
        return Chunk(self._text(token), token, logprob, self.finish_reason)

    def _text(self, token: int) -> str:
        """The text that `token` lets out; sets finish_reason."""
        if token in self._params.stop_token_ids:
            self.finish_reason = "stop"
            return self._rest()
        if token in self._eos:
            self.finish_reason = "eos"
            return self._rest()
        text = self._stop.push(self._decoder.push(token))
        if self._stop.hit:
            self.finish_reason = "stop"
        elif len(self._history) - self._prompt_size >= self._limit:
            text += self._rest()
            self.finish_reason = self.finish_reason or "length"
        return text

    def _rest(self) -> str:
        text = self._stop.push(self._decoder.flush())
        if self._stop.hit:
            self.finish_reason = "stop"
            return text
        return text + self._stop.flush()


class StopText:
    """Finds stop texts in text that comes in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """The text that is certainly not part of a stop text; sets `hit` if one is complete."""
        self._held += text
        found = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if found:
            self.hit = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
