"""`imp convert SRC OUT`: a Hugging Face checkpoint to GGUF."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from imp_runtime.cli.convert_progress import console_progress
from imp_runtime.convert import ConvertError, ConvertOptions, convert, output_path, parse_size, plan
from imp_runtime.convert.describe import size_text, tensor_lines, total_lines
from imp_runtime.convert.options import Dense, ExpertsChoice, MtpChoice, NgramChoice


def _choices(kind: object) -> str:
    return ", ".join(get_args(kind))


def register(app: typer.Typer) -> None:
    """Adds the command to ``imp``."""

    @app.command("convert")
    def command(
        src: Annotated[Path, typer.Argument(help="checkpoint folder in Hugging Face layout")],
        out: Annotated[
            Path | None, typer.Argument(help="the GGUF, or a folder for <name of SRC>.gguf")
        ] = None,
        dense: Annotated[
            str, typer.Option(help=f"type of everything but routed experts: {_choices(Dense)}")
        ] = "bf16",
        ngram: Annotated[
            str,
            typer.Option(
                help=f"type of the n-gram table: {_choices(NgramChoice)}; auto keeps FP8 exactly, "
                "llama.cpp reads the others only"
            ),
        ] = "auto",
        experts: Annotated[
            str,
            typer.Option(
                help=f"type of routed experts that are not NVFP4: {_choices(ExpertsChoice)}; "
                "keep rounds FP8 to BF16; NVFP4 always moves bit for bit"
            ),
        ] = "keep",
        mtp: Annotated[
            str,
            typer.Option(
                help=f"MTP head: {_choices(MtpChoice)}; auto leaves an incomplete one out, "
                "llama.cpp may need drop"
            ),
        ] = "auto",
        pre: Annotated[
            str | None, typer.Option(help="pre-tokenizer name, if it is not recognised")
        ] = None,
        split_max_size: Annotated[
            str | None, typer.Option(help="largest shard: 500M, 2G; a single file if left out")
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="replace an existing OUT")] = False,
        verify: Annotated[
            bool, typer.Option(help="compare every value of the result with the source")
        ] = True,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="print what would be written and needed")
        ] = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print nothing")] = False,
    ) -> None:
        """Convert a checkpoint to GGUF; what is missing or broken is listed before any writing."""
        options = ConvertOptions(
            dense=dense,  # type: ignore[arg-type]  # checked by ConvertOptions
            ngram=ngram,  # type: ignore[arg-type]
            experts=experts,  # type: ignore[arg-type]
            mtp=mtp,  # type: ignore[arg-type]
            pre=pre,
            split_max_bytes=parse_size(split_max_size) if split_max_size else 0,
            force=force,
            verify=verify,
        )
        if dry_run:
            _dry_run(src, out, options)
            return
        if out is None:
            raise ConvertError("OUT is missing: the GGUF to write, or a folder for it")
        report = convert(src, out, options, console_progress(quiet=quiet))
        if not quiet:
            speed = size_text(report.nbytes / max(report.write_seconds, 1e-9))
            compared = f", {report.verified} values verified" if options.verify else ""
            typer.echo(
                f"{report.files[0]}: {report.tensors} tensors, {size_text(report.nbytes)} "
                f"in {report.write_seconds:.1f} s ({speed}/s){compared}"
            )


def _dry_run(src: Path, out: Path | None, options: ConvertOptions) -> None:
    target = output_path(src, out) if out is not None else None
    with plan(src, options) as planned:
        for line in tensor_lines(planned):
            typer.echo(line)
        typer.echo()
        for line in [*total_lines(planned, target), *(f"note     {n}" for n in planned.notes)]:
            typer.echo(line)
