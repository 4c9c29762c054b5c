"""GGUF files: what is in them, and what they need to run.

Reading tensors and keys is `Gguf`; `describe` sums a file up.
"""

from imp_runtime._core import Gguf
from imp_runtime.gguf.describe import Description, Group, Support, Tensor, describe, describe_open
from imp_runtime.gguf.kinds import Kind
from imp_runtime.gguf.sequence import SequenceCost

__all__ = [
    "Description",
    "Gguf",
    "Group",
    "Kind",
    "SequenceCost",
    "Support",
    "Tensor",
    "describe",
    "describe_open",
]
