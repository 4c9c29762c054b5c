"""`imp run`: generate text from a prompt or in a chat."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from imp_runtime.cli.text import read_file, unescape
from imp_runtime.cli.tokenize import model_path
from imp_runtime.conversation import Conversation
from imp_runtime.errors import ImpError
from imp_runtime.llm import LLM, Stream
from imp_runtime.sampling import SamplingParams
from imp_runtime.session import CACHE_TYPES

TYPES = f"{', '.join(CACHE_TYPES[:-1])} or {CACHE_TYPES[-1]}"
SAMPLING = "Sampling (unset: the model file's own defaults, if it has any)"


def register(app: typer.Typer) -> None:
    """Add the command to `imp`."""

    @app.command("run")
    def command(
        positional: Annotated[
            Path | None, typer.Argument(metavar="MODEL", help="GGUF file")
        ] = None,
        model: Annotated[Path | None, typer.Option("-m", "--model", help="the same")] = None,
        prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="text to go on")] = None,
        file: Annotated[
            Path | None, typer.Option("-f", "--file", help="a file with the prompt; - is stdin")
        ] = None,
        chat: Annotated[
            bool, typer.Option("--chat", help="the prompt is a user message of a chat")
        ] = False,
        interactive: Annotated[
            bool, typer.Option("-i", "--interactive", help="chat, reading messages from stdin")
        ] = False,
        system: Annotated[str | None, typer.Option("-sys", "--system", help="for a chat")] = None,
        n_predict: Annotated[
            int, typer.Option("-n", "--n-predict", help="tokens at most; -1: until the end", min=-1)
        ] = -1,
        n_ctx: Annotated[
            int, typer.Option("-c", "--ctx-size", help="context; 0: from the model", min=0)
        ] = 0,
        threads: Annotated[int, typer.Option("-t", "--threads", help="0: all", min=0)] = 0,
        device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda")] = "auto",
        cache_type_k: Annotated[
            str,
            typer.Option("-ctk", "--cache-type-k", help=f"keys in the cache: {TYPES}"),
        ] = "f32",
        cache_type_v: Annotated[
            str,
            typer.Option("-ctv", "--cache-type-v", help=f"values in the cache: {TYPES}"),
        ] = "f32",
        escape: Annotated[
            bool, typer.Option("--escape/--no-escape", "-e", help=r"\n and so on in -p")
        ] = True,
        stop: Annotated[
            list[str] | None, typer.Option("--stop", help="text that ends it; repeatable")
        ] = None,
        ignore_eos: Annotated[
            bool, typer.Option("--ignore-eos", help="never choose an end token")
        ] = False,
        temp: Annotated[
            float | None, typer.Option("--temp", "--temperature", rich_help_panel=SAMPLING)
        ] = None,
        top_k: Annotated[int | None, typer.Option("--top-k", rich_help_panel=SAMPLING)] = None,
        top_p: Annotated[float | None, typer.Option("--top-p", rich_help_panel=SAMPLING)] = None,
        min_p: Annotated[float | None, typer.Option("--min-p", rich_help_panel=SAMPLING)] = None,
        repeat_penalty: Annotated[
            float | None, typer.Option("--repeat-penalty", rich_help_panel=SAMPLING)
        ] = None,
        presence_penalty: Annotated[
            float | None, typer.Option("--presence-penalty", rich_help_panel=SAMPLING)
        ] = None,
        frequency_penalty: Annotated[
            float | None, typer.Option("--frequency-penalty", rich_help_panel=SAMPLING)
        ] = None,
        repeat_last_n: Annotated[
            int | None, typer.Option("--repeat-last-n", rich_help_panel=SAMPLING)
        ] = None,
        seed: Annotated[
            int, typer.Option("-s", "--seed", help="-1: random", rich_help_panel=SAMPLING)
        ] = -1,
    ) -> None:
        """Generate text. The text goes to stdout as it comes, everything else to stderr.

        It ends at any end token of the file, a stop text, -n tokens or a full context. Without -p
        and -f it is a chat on stdin (Ctrl-D ends it).
        """
        path = model_path(positional, model)
        text, source = _prompt(prompt, file, escape)
        if text is not None and interactive:
            raise ImpError("-i reads messages from stdin, so it goes with neither -p nor -f")
        if system is not None and text is not None and not chat:
            raise ImpError("--system needs a chat: add --chat or -i")
        values = {
            "temperature": temp,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repeat_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "penalty_last_n": repeat_last_n,
        }
        given: dict[str, Any] = {k: v for k, v in values.items() if v is not None}
        given |= {"stop": tuple(stop or ()), "ignore_eos": ignore_eos}
        given |= {"max_tokens": None if n_predict < 0 else n_predict}
        given |= {"seed": None if seed == -1 else seed}
        SamplingParams(**given)  # a bad flag is told before the model is read
        for name, value in (("-ctk", cache_type_k), ("-ctv", cache_type_v)):
            if value not in CACHE_TYPES:
                raise ImpError(f"{name} is '{value}', it must be {TYPES}")
        with _loaded(path, device, n_ctx, threads, (cache_type_k, cache_type_v)) as llm:
            params = replace(llm.defaults, **given)
            if text is None:
                _talk(llm, params, system)
            elif chat:
                _show(Conversation(llm, system).ask(text, params), source)
            else:
                _show(llm.stream(text, params), source)


def _prompt(prompt: str | None, file: Path | None, escape: bool) -> tuple[str | None, str]:
    if prompt is not None and file is not None:
        raise ImpError("-p and -f are two prompts, one is needed")
    if file is not None:
        return read_file(file), str(file)
    if prompt is not None:
        return (unescape(prompt) if escape else prompt), "-p"
    return None, "stdin"


@contextmanager
def _loaded(
    path: Path, device: str, n_ctx: int, threads: int, types: tuple[str, str]
) -> Iterator[LLM]:
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task("loading", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        llm = LLM(
            path,
            device=device,
            n_ctx=n_ctx or None,
            n_threads=threads or None,
            cache_type_k=types[0],
            cache_type_v=types[1],
            progress=report,
        )
    for note in getattr(llm.model, "notes", []):
        _log(f"note: {note}")
    chosen = getattr(llm.model, "device", None)
    if device == "auto" and chosen is not None:
        _log(f"device: {chosen}")
    with llm:
        yield llm


def _talk(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """A chat that reads one message a line."""
    _ = llm.chat_template  # refuses a file without one before the first message is typed
    conversation = Conversation(llm, system)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        try:
            _show(conversation.ask(line.rstrip("\n"), params), "stdin")
        except ImpError as error:
            _log(f"error: {error}")
            if not sys.stdin.isatty():
                raise


def _show(stream: Stream, source: str) -> None:
    """Print the text as it comes and the speed at its end, also after Ctrl-C."""
    count, reason, newline = 0, "interrupted", True
    try:
        for chunk in stream:
            count += 1
            if chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                newline = chunk.text.endswith("\n")
            reason = chunk.finish_reason or reason
        reason = reason if count else "length"
    except BrokenPipeError:  # nobody reads any more
        newline = True
        raise
    finally:
        stream.close()
        if not newline:
            sys.stdout.write("\n")
            sys.stdout.flush()
        t = stream.timings
        _log(
            f"speed: prompt {t.prompt_tokens} tokens, {t.prompt_per_second:.2f} t/s "
            f"(text: {source}); "
            f"generated {count} tokens, {t.decode_per_second:.2f} t/s; "
            f"end: {reason}; seed {stream.params.seed}"
        )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
