"""How the next token is chosen, and when a generation ends."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from imp_runtime._core import Sampler
from imp_runtime.errors import ImpError

MAX_LOGPROBS = 100  # alternatives that are reported for each token
MAX_SEED = (1 << 64) - 1

# Keys of a GGUF file with the model's own defaults.
_FILE_DEFAULTS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "penalty_last_n": "general.sampling.penalty_last_n",
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one generation; checked when made.

    Applied in this order: penalties, top_k, top_p, min_p, temperature, draw. top_p and min_p look
    at the probabilities before temperature.

    Attributes:
        temperature: 0 = always the most probable token.
        top_k: keep the k most probable tokens; 0 = all.
        top_p: keep the most probable tokens that together reach this probability; 1 = all.
        min_p: drop tokens less probable than this fraction of the most probable one; 0 = none.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred.
        presence_penalty: subtracted from the logit of a token that occurred.
        frequency_penalty: subtracted once for each time it occurred.
        penalty_last_n: tokens, prompt included, that the penalties look back; -1 = all, 0 = none.
        seed: of the random draws, 0 to 2^64 - 1; None = a new one each time.
        max_tokens: tokens to generate at most; None = until the context is full.
        stop: texts that end the generation; they are not part of the result.
        stop_token_ids: tokens that end the generation, besides those of the file.
        ignore_eos: never choose a token that ends the text.
        logprobs: report log-probabilities, with this many alternatives; None = none.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    max_tokens: int | None = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ImpError: a value is out of range; names it and the range.
        """
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ImpError("stop has an entry that is empty or not text")
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("top_k", "penalty_last_n"):
            _check_int(name, getattr(self, name), -1 if name == "penalty_last_n" else 0, 2**31 - 1)
        self.sampler()  # checks the ranges of the rest

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], **values: Any) -> "SamplingParams":
        """The defaults of a model file (general.sampling.*), changed by `values`.

        Raises:
            ImpError: a value is out of range.
        """
        stored = {name: _number(keys[key]) for name, key in _FILE_DEFAULTS.items() if key in keys}
        return cls(**{**stored, **values})

    def with_seed(self) -> "SamplingParams":
        """The same, with a random seed chosen if there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def sampler(self, suppress: Sequence[int] = ()) -> Sampler:
        """The C++ sampler; seed None counts as 0.

        Args:
            suppress: ids that are never chosen.
        """
        try:
            return Sampler(
                temperature=float(self.temperature),
                top_k=int(self.top_k),
                top_p=float(self.top_p),
                min_p=float(self.min_p),
                repetition_penalty=float(self.repetition_penalty),
                presence_penalty=float(self.presence_penalty),
                frequency_penalty=float(self.frequency_penalty),
                penalty_last_n=int(self.penalty_last_n),
                seed=self.seed or 0,
                suppress=[int(i) for i in suppress],
            )
        except (TypeError, ValueError) as error:
            raise ImpError(f"a sampling parameter is not a number: {error}") from error

    def window(self, history: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The end of int32 [n] `history` that the penalties look at; empty if none is on."""
        off = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        if off or self.penalty_last_n == 0:
            return history[:0]
        return history if self.penalty_last_n < 0 else history[-self.penalty_last_n :]


def _number(value: Any) -> Any:
    """A float32 of a file as the shortest decimal that means it: 0.95, not 0.949999988."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_int(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, int | np.integer):
        raise ImpError(f"{name} is {value!r}, which is not a whole number")
    if value < low or (high is not None and value > high):
        limit = f"[{low}, {high}]" if high is not None else f"[{low}, ...]"
        raise ImpError(f"{name} is {value}, outside {limit}")
