"""The one exception type of the package."""


class ImpError(RuntimeError):
    """What a caller can act on: one sentence that names the file, key, tensor or flag."""

    code: str = "invalid_argument"
    """Or bad_file, unsupported, out_of_memory, io, numeric, timeout, internal."""
    where: str = ""  # source line, if the C++ core raised it
