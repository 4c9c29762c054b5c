"""imp: run Qwen3.8-Flash-Next (GGUF) on machines whose GPU cannot hold it."""

from importlib.metadata import PackageNotFoundError, version

from imp_runtime.async_llm import AsyncLLM
from imp_runtime.errors import ImpError
from imp_runtime.generation import Chunk
from imp_runtime.llm import LLM, Completion
from imp_runtime.model import Model
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import Sequence, Session
from imp_runtime.snapshot import Snapshot
from imp_runtime.tokenizer import Tokenizer

try:
    __version__ = version("imp-runtime")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0+source"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "ImpError",
    "Model",
    "SamplingParams",
    "Sequence",
    "Session",
    "Snapshot",
    "Tokenizer",
    "__version__",
]
