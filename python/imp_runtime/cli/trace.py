"""`imp trace`: which experts a real run chose, in a file for `imp sim`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from imp_runtime import trace
from imp_runtime.cli.text import read_file
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.tokenizer import Tokenizer


def register(app: typer.Typer) -> None:
    """Add the command to `imp`."""

    @app.command("trace")
    def command(
        model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file")],
        file: Annotated[Path, typer.Option("-f", "--file", help="the text; - is stdin")],
        out: Annotated[Path, typer.Option("-o", "--output", help="trace file, .npz")],
        n_prompt: Annotated[
            int, typer.Option("-n", "--tokens", help="of the text at most; 0: all", min=0)
        ] = 0,
        step: Annotated[
            int, typer.Option("-ub", "--ubatch-size", help="tokens of a prefill step", min=1)
        ] = 512,
        decode: Annotated[
            bool, typer.Option("--decode", help="the text one token a step, as when decoding")
        ] = False,
        generate: Annotated[
            int, typer.Option("-g", "--generate", help="tokens chosen greedily after it", min=0)
        ] = 0,
        threads: Annotated[int, typer.Option("-t", "--threads", help="0: all", min=0)] = 0,
        device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda")] = "auto",
    ) -> None:
        """Record the expert ids of every token and layer of a run."""
        tokens = Tokenizer.from_gguf(model).encode(read_file(file), add_special=True)
        tokens = tokens[:n_prompt] if n_prompt else tokens
        with Model.load(model, device=device) as loaded:
            if len(tokens) + generate > loaded.context_length:
                raise ImpError(
                    f"{len(tokens) + generate} tokens, the model's context has "
                    f"{loaded.context_length}: -n takes fewer of {file}"
                )
            console = Console(stderr=True)
            with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
                task = bar.add_task("recording", total=len(tokens) + generate)
                made = trace.record(
                    loaded,
                    tokens,
                    text=file.name,
                    step=step,
                    decode=decode,
                    generate=generate,
                    n_threads=threads or None,
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
        trace.save(made, out)
        print(
            f"{out}: {len(made.ids)} tokens of {file.name} in {len(made.step_rows)} steps, "
            f"{made.layers} layers, {made.k} of {made.experts} experts",
            file=sys.stderr,
        )
