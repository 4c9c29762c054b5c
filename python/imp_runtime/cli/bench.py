"""`imp-bench`: speed of a GGUF model, with llama-batched-bench's and llama-bench's flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from .. import __version__
from .bench_batched import run_batched
from .bench_flags import BATCHED, BATCHED_FLAGS, SPEED, help_text
from .bench_speed import run_speed
from .llama_common import add_command, exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: of the process); returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    batched = any(word in BATCHED_FLAGS for word in words)
    parsed = (BATCHED if batched else SPEED).parse(words)
    if parsed["help"]:
        print(help_text())
    elif parsed["version"]:
        print(f"imp-runtime {__version__}")
    else:
        return (run_batched if batched else run_speed)(parsed)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command to ``imp``; it parses its own flags."""
    help = "Speed, with llama-batched-bench's and llama-bench's flags (-h lists them)."
    add_command(app, "bench", main, help)
