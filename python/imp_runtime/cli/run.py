"""`imp run`: generate text from a prompt or in a chat."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from imp_runtime._core import USUAL_EXPERT_POLICY, USUAL_STEP_TIMEOUT
from imp_runtime.chat import Message
from imp_runtime.cli.llama_common import limits_of
from imp_runtime.cli.run_output import log, show, show_all
from imp_runtime.cli.run_stats import LiveStats
from imp_runtime.cli.text import read_file, unescape
from imp_runtime.cli.tokenize import model_path
from imp_runtime.conversation import Conversation
from imp_runtime.errors import ImpError
from imp_runtime.llm import LLM
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
        prompt: Annotated[
            list[str] | None, typer.Option("-p", "--prompt", help="text to go on; repeatable")
        ] = None,
        file: Annotated[
            Path | None, typer.Option("-f", "--file", help="a file with the prompt; - is stdin")
        ] = None,
        prompts: Annotated[
            Path | None, typer.Option("--prompts", help="a file with a prompt a line; - is stdin")
        ] = None,
        chat: Annotated[
            bool, typer.Option("--chat", help="each prompt is a user message of a chat")
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
        vram_limit: Annotated[
            str | None, typer.Option("--vram-limit", help="device memory to use, such as 32GiB")
        ] = None,
        ram_limit: Annotated[
            str | None, typer.Option("--ram-limit", help="host memory for experts")
        ] = None,
        expert_policy: Annotated[
            str, typer.Option("--expert-policy", help="lru, pool, lrfu[:n] or pool-lrfu[:n]")
        ] = USUAL_EXPERT_POLICY,
        batch_invariant: Annotated[
            bool,
            typer.Option("--batch-invariant", help="CUDA: the same bits alone and in a batch"),
        ] = False,
        parallel: Annotated[
            int, typer.Option("-np", "--parallel", help="prompts that run together", min=1)
        ] = 4,
        cache_dir: Annotated[
            Path | None,
            typer.Option("--cache-dir", help="folder of states: a known beginning is not read"),
        ] = None,
        cache_size: Annotated[
            int, typer.Option("--cache-size", help="MiB of states in memory", min=1)
        ] = 1024,
        verify: Annotated[
            bool, typer.Option("--verify-experts", help="compare them with their checksums; slow")
        ] = False,
        step_timeout: Annotated[
            float, typer.Option("--step-timeout", help="seconds of a step on CUDA at most")
        ] = USUAL_STEP_TIMEOUT,
        stats: Annotated[
            bool,
            typer.Option("--stats", help="speed and the expert cache, live and at the end"),
        ] = False,
        escape: Annotated[
            bool, typer.Option("--escape/--no-escape", "-e", help=r"\n and so on in -p, --prompts")
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

        It ends at any end token of the file, a stop text, -n tokens or a full context. Several
        prompts run together, each as it would alone; their texts come in order under a line with
        the number. Without a prompt it is a chat on stdin (Ctrl-D ends it).
        """
        path = model_path(positional, model)
        texts, source = _prompts(prompt, file, prompts, escape)
        if texts and interactive:
            raise ImpError("-i reads messages from stdin, so it goes with no prompt")
        if system is not None and texts and not chat:
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
        options: dict[str, Any] = {
            "device": device,
            "n_ctx": n_ctx or None,
            "n_threads": threads or None,
            "n_parallel": min(parallel, max(1, len(texts))),
            "cache_type_k": cache_type_k,
            "cache_type_v": cache_type_v,
            "batch_invariant": batch_invariant,
            "limits": limits_of(vram_limit, ram_limit, expert_policy),
            "verify_experts": verify,
            "step_timeout": step_timeout,
        }
        if cache_dir is not None:
            options |= {"cache_dir": cache_dir, "prefix_cache": cache_size << 20}
        with _loaded(path, options) as llm:
            params = replace(llm.defaults, **given)
            live = LiveStats(llm.stats) if stats else None
            if not texts:
                _talk(llm, params, system, live)
            elif len(texts) > 1:
                asked = [_messages(system, t) if chat else t for t in texts]
                show_all(llm, asked, params, source, live)
            elif chat:
                show(llm.stream_chat(_messages(system, texts[0]), params), source, live)
            else:
                show(llm.stream(texts[0], params), source, live)
            if verify:
                _verify(llm)


def _verify(llm: LLM) -> None:
    check = llm.session.verify_experts()
    if check.damaged:
        raise ImpError(str(check))
    log(f"verified: {check}")


def _prompts(
    given: list[str] | None, file: Path | None, lines: Path | None, escape: bool
) -> tuple[list[str], str]:
    """The prompts and where they are from; none for a chat on stdin."""
    sources = {"-p": given, "-f": file, "--prompts": lines}
    names = [name for name, value in sources.items() if value is not None and value != []]
    if len(names) > 1:
        raise ImpError(f"{' and '.join(names)} are two sources of prompts, one is needed")
    texts = list(given or [])
    if file is not None:
        return [read_file(file)], str(file)
    if lines is not None:
        texts = [t for line in read_file(lines).split("\n") if (t := line.removesuffix("\r"))]
        if not texts:
            raise ImpError(f"{lines} has no line with a prompt")
        names = [str(lines)]
    return [unescape(t) if escape else t for t in texts], (names or ["stdin"])[0]


def _messages(system: str | None, text: str) -> list[Message]:
    before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


@contextmanager
def _loaded(path: Path, options: dict[str, Any]) -> Iterator[LLM]:
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task("loading", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        llm = LLM(path, progress=report, **options)
    for note in llm.notes:
        log(f"note: {note}")
    chosen = getattr(llm.model, "device", None)
    if options["device"] == "auto" and chosen is not None:
        log(f"device: {chosen}")
    if (plan := getattr(llm.session, "plan", None)) is not None:
        log(f"plan: {plan.tier}, {plan.slots} of {plan.experts} experts in VRAM")
    cache = llm.engine.cache if llm.engine is not None else None
    try:
        with llm:
            yield llm
    finally:
        for refusal in cache.refusals if cache is not None else []:
            log(f"note: {refusal}; it was removed")


def _talk(llm: LLM, params: SamplingParams, system: str | None, live: LiveStats | None) -> None:
    """A chat that reads one message a line."""
    _ = llm.chat_template  # refuses a file without one before the first message is typed
    ask = _asker(llm, params, system, live)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        try:
            ask(line.rstrip("\n"))
        except ImpError as error:
            log(f"error: {error}")
            if not sys.stdin.isatty():
                raise


def _asker(
    llm: LLM, params: SamplingParams, system: str | None, live: LiveStats | None
) -> Callable[[str], None]:
    """What answers one message after the other."""
    if llm.engine is None:
        conversation = Conversation(llm, system)

        def talk(text: str) -> None:
            show(conversation.ask(text, params), "stdin", live)

        return talk
    messages = _messages(system, "")[:-1]

    def ask(text: str) -> None:
        """With a prefix cache: every turn is a request that finds the state of the one before."""
        asked: list[Message] = [*messages, {"role": "user", "content": text}]
        answer = show(llm.stream_chat(asked, params), "stdin", live)
        messages[:] = [*asked, {"role": "assistant", "content": answer}]

    return ask
