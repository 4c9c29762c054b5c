"""`imp tokenize`: text to token ids, with the modes and output of llama-tokenize."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from imp_runtime.cli.text import read_file, read_stdin, unescape
from imp_runtime.errors import ImpError
from imp_runtime.tokenizer import Tokenizer


def register(app: typer.Typer) -> None:
    """Add the command to `imp`."""

    @app.command("tokenize")
    def command(
        positional: Annotated[
            Path | None, typer.Argument(metavar="MODEL", help="GGUF file")
        ] = None,
        model: Annotated[Path | None, typer.Option("-m", "--model", help="the same")] = None,
        prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="the text")] = None,
        file: Annotated[
            Path | None, typer.Option("-f", "--file", help="a file with the text")
        ] = None,
        stdin: Annotated[bool, typer.Option("--stdin", help="read the text from stdin")] = False,
        ids: Annotated[bool, typer.Option("--ids", help="print only the ids: [1, 2, 3]")] = False,
        no_bos: Annotated[
            bool, typer.Option("--no-bos", help="no BOS, even if the model uses one")
        ] = False,
        no_parse_special: Annotated[
            bool, typer.Option("--no-parse-special", help="control tokens are plain text")
        ] = False,
        show_count: Annotated[
            bool, typer.Option("--show-count", help="print the number of tokens")
        ] = False,
        escape: Annotated[
            bool,
            typer.Option("--escape/--no-escape", "-e", help=r"replace \n, \t, \xHH and so on"),
        ] = True,
    ) -> None:
        """Show the tokens of a text. --stdin is taken before --file, that before --prompt."""
        path = model_path(positional, model)
        tokenizer = Tokenizer.from_gguf(path)
        text = _text(stdin, file, prompt)
        tokens = tokenizer.encode(
            unescape(text) if escape else text,
            add_special=not no_bos,
            parse_special=not no_parse_special,
        )
        out = sys.stdout.buffer
        if ids:
            out.write(f"[{', '.join(map(str, tokens))}]\n".encode())
        else:
            for token in tokens:  # the bytes as they are: a token may hold half a character
                out.write(b"%6d -> '%s'\n" % (token, tokenizer.token_bytes(token)))
        if show_count:
            out.write(f"Total number of tokens: {len(tokens)}\n".encode())
        out.flush()


def model_path(positional: Path | None, option: Path | None) -> Path:
    """The model of a command that takes MODEL or -m.

    Raises:
        ImpError: none is given, or two.
    """
    if positional is not None and option is not None:
        raise ImpError(f"two models are given, {positional} and {option}")
    path = positional or option
    if path is None:
        raise ImpError("a model is needed: MODEL or -m MODEL")
    return path


def _text(stdin: bool, file: Path | None, prompt: str | None) -> str:
    if stdin:
        return read_stdin()
    if file is not None:
        return read_file(file)
    if prompt is None:
        raise ImpError("must specify one of: --stdin, --file or --prompt")
    return prompt
