"""What evaluation raises: one sentence that names the file or value and both numbers."""

from ..errors import ImpError


class EvalError(ImpError):
    """A run cannot start or go on."""


class LogitsFileError(EvalError):
    """A stored run is damaged or is no such file."""

    code = "bad_file"


class NotFiniteError(EvalError):
    """The model produced a NaN or an infinity."""

    code = "numeric"
