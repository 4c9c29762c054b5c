"""Text for the commands: from a flag, a file or standard input."""

import re
import sys
from pathlib import Path

from imp_runtime.errors import ImpError

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])")
_ESCAPED = {"n": b"\n", "r": b"\r", "t": b"\t", "'": b"'", '"': b'"', "\\": b"\\"}


def unescape(text: str) -> str:
    r"""Replace \n, \r, \t, \', \", \\ and \xHH (a byte) as llama.cpp does; the rest stays.

    Raises:
        ImpError: the bytes written as \xHH make no UTF-8.
    """

    def one(match: re.Match[bytes]) -> bytes:
        code = match.group(1).decode()
        return bytes([int(code[1:], 16)]) if code[0] == "x" else _ESCAPED[code]

    raw = text.encode("utf-8", "surrogateescape")
    return _decode(re.sub(_ESCAPE.pattern.encode(), one, raw), "the text with its escapes")


def read_file(path: Path) -> str:
    """All of a UTF-8 file, line ends as they are; "-" is standard input.

    Raises:
        ImpError: it cannot be read or is not UTF-8 (with the byte position).
    """
    if str(path) == "-":
        return read_stdin()
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise ImpError(f"{path}: {error.strerror}") from error


def read_stdin() -> str:
    """All of standard input."""
    return _decode(sys.stdin.buffer.read(), "standard input")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ImpError(f"{source} is not UTF-8 at byte {error.start} of {len(data)}") from error
