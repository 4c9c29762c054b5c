"""`imp-bench`: speed of a GGUF model, with llama-batched-bench's and llama-bench's flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from .. import __version__
from ..errors import ImpError
from .bench_batched import run_batched
from .bench_flags import BATCHED, BATCHED_FLAGS, SPEED, help_text
from .bench_speed import run_speed
from .llama_flags import FlagError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: of the process); returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    batched = any(word in BATCHED_FLAGS for word in words)
    try:
        parsed = (BATCHED if batched else SPEED).parse(words)
        if parsed["help"]:
            print(help_text())
        elif parsed["version"]:
            print(f"imp-runtime {__version__}")
        else:
            return (run_batched if batched else run_speed)(parsed)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this, closing stdout fails once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except (FlagError, ImpError, MemoryError) as error:
        return _fail(error)
    return 0


def _fail(sentence: object) -> int:
    sys.stdout.flush()
    print(f"error: {sentence}", file=sys.stderr)
    return 1


def register(app: typer.Typer) -> None:
    """Add the command to ``imp``; it parses its own flags."""

    @app.command(
        "bench",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Speed, with llama-batched-bench's and llama-bench's flags (-h lists them).",
    )
    def command(context: typer.Context) -> None:
        raise typer.Exit(main(context.args))
