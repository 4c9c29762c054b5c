"""imp: run Qwen3.8-Flash-Next (GGUF) on machines whose GPU cannot hold it."""

from importlib.metadata import PackageNotFoundError, version

from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Sequence, Session

try:
    __version__ = version("imp-runtime")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0+source"

__all__ = ["ImpError", "Model", "Sequence", "Session", "__version__"]
