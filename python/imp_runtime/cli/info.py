"""`imp info`: what a GGUF file holds, what it needs to run, and whether imp runs it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from imp_runtime import _core
from imp_runtime.cli.info_json import as_json
from imp_runtime.cli.info_text import device_lines, key_lines, summary_lines, tensor_lines
from imp_runtime.errors import ImpError
from imp_runtime.gguf import describe


def register(app: typer.Typer) -> None:
    """Add the command to `imp`."""

    @app.command("info")
    def command(
        file: Annotated[
            Path | None, typer.Argument(help="GGUF file; any part of a split one")
        ] = None,
        keys: Annotated[bool, typer.Option("--keys", help="all metadata, arrays in full")] = False,
        tensors: Annotated[bool, typer.Option("--tensors", help="every tensor")] = False,
        as_json_: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
        device: Annotated[
            bool, typer.Option("--device", help="this machine: processor, memory, CUDA")
        ] = False,
    ) -> None:
        """Show what a GGUF file holds, what it needs, and whether imp runs it."""
        if file is None and not device:
            raise ImpError("a GGUF file or --device is needed")
        machine = _core.system_info() | {"cublas_lt": _core.cublas_lt()[1]} if device else None
        description = describe(file) if file is not None else None
        if as_json_:
            print(json.dumps(as_json(description, machine, keys=keys, tensors=tensors), indent=2))
            return
        if description is not None:
            lines = summary_lines(description)
            lines += key_lines(description, full=keys)
            if tensors:
                lines += tensor_lines(description)
            print("\n".join(lines))
        if machine is not None:
            if description is not None:
                print()
            print("\n".join(device_lines(machine)))
