"""The `imp` command: one file per sub-command, errors as one line."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import typer

from imp_runtime.errors import ImpError

COMMANDS = (
    "convert",
    "info",
    "plan",
    "run",
    "tokenize",
    "perplexity",
    "bench",
    "diff",
    "trace",
    "sim",
)

app = typer.Typer(
    name="imp",
    help="Convert, inspect, run and score GGUF models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Convert, inspect, run and score GGUF models."""


for _name in COMMANDS:
    if importlib.util.find_spec(f"imp_runtime.cli.{_name}") is not None:
        importlib.import_module(f"imp_runtime.cli.{_name}").register(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: words after `imp`; None = those of the process.

    Returns:
        Exit status: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    try:
        app(args=None if args is None else list(args), prog_name="imp")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output is gone; without this, closing stdout fails once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print("error: out of memory", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
