"""What evaluation needs of a model, a session and a sequence (structural types)."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]


class SequenceLike(Protocol):
    """One conversation's state."""

    @property
    def id(self) -> int:
        """Its handle in a step."""

    def extend(self, tokens: Any, outputs: Any = "last") -> Float32:
        """Logits float32 [n_out, n_vocab] from row ``outputs`` on; valid until the next call."""

    def close(self) -> None:
        """Free the sequence."""


class ModelLike(Protocol):
    """Loaded weights."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""


class StepCore(Protocol):
    """What runs steps."""

    def step(self, requests: Any) -> Float32:
        """Logits float32 [outputs, n_vocab] of [(sequence id, int32 tokens, first output)]."""


class SessionLike(Protocol):
    """A model with room for sequences."""

    @property
    def model(self) -> ModelLike:
        """The weights the session runs."""

    @property
    def n_ubatch(self) -> int:
        """Tokens of one step at most."""

    @property
    def core(self) -> StepCore:
        """Runs steps of several sequences."""

    def open(self) -> SequenceLike:
        """A new, empty sequence."""


class ForkSequence(SequenceLike, Protocol):
    """A sequence that others can go on from."""

    def fork(self) -> "ForkSequence":
        """An independent copy."""


class ForkSession(SessionLike, Protocol):
    """A session whose sequences can be forked."""

    def open(self) -> ForkSequence:
        """A new, empty sequence."""


class TapSession(SessionLike, Protocol):
    """A session that keeps named intermediates."""

    def taps(self) -> dict[str, npt.NDArray[Any]]:
        """Those of the last step, float32 or int32 [rows, width], in order of computation."""
