"""What imp-perplexity evaluates: the text of -p, -f or -bf."""

from pathlib import Path

from .llama_flags import FlagError, Parsed
from .text import unescape


def input_source(parsed: Parsed) -> str:
    """Key of the one flag that gives the text.

    Raises:
        FlagError: if none or several do.
    """
    sources = [key for key in ("prompt", "file", "binary_file") if key in parsed.given]
    if len(sources) != 1:
        given = " and ".join("--" + key.replace("_", "-") for key in sources) or "nothing"
        raise FlagError(f"one text is needed (-f, -bf or -p), {given} is given")
    return sources[0]


def read_text(parsed: Parsed) -> str:
    """The text, one newline at the end of a file of -f dropped, escapes replaced with -e.

    Raises:
        FlagError: if none or several are given, or it is not UTF-8.
        OSError: if the file cannot be read.
    """
    source = input_source(parsed)
    if source == "prompt":
        text: str = parsed["prompt"]
    else:
        path = parsed[source]
        data = Path(path).read_bytes()
        if source == "file":
            data = data.removesuffix(b"\n")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FlagError(f"{path} is not UTF-8 at byte {error.start} of {len(data)}") from None
    return unescape(text) if parsed["escape"] else text


def read_binary(parsed: Parsed) -> bytes:
    """Every byte of the file of -f or -bf.

    Raises:
        FlagError: if no file or several are given, or -e, which is for texts.
        OSError: if it cannot be read.
    """
    source = input_source(parsed)
    if source == "prompt" or parsed["escape"]:
        word = "--prompt" if source == "prompt" else "--escape"
        raise FlagError(f"--multiple-choice reads a binary file, {word} is for texts")
    return Path(parsed[source]).read_bytes()
