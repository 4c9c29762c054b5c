"""What `imp run` prints: texts on stdout, lines about each run on stderr."""

import sys
import time
from collections.abc import Sequence

from imp_runtime.chat import Message
from imp_runtime.cli.run_stats import LiveStats
from imp_runtime.llm import LLM, Completion, Stream
from imp_runtime.sampling import SamplingParams
from imp_runtime.timings import Timings


def show_all(
    llm: LLM,
    prompts: Sequence[str | list[Message]],
    params: SamplingParams,
    source: str,
    live: LiveStats | None = None,
) -> None:
    """Print the texts in order, each as soon as those before it are there."""
    ids = [llm.prompt_ids(p) if isinstance(p, str) else llm.chat_ids(p) for p in prompts]
    ready: dict[int, Completion] = {}
    shown = 0
    began = time.perf_counter()
    write = live.write if live is not None else _write

    def on_done(index: int, done: Completion) -> None:
        nonlocal shown
        ready[index] = done
        while shown in ready:
            text = ready[shown].text
            write(f"--- {shown + 1}\n{text}" + "\n" * (not text.endswith("\n")))
            shown += 1

    on_step = live.update if live is not None else None
    done = llm.generate(ids, params, on_done=on_done, on_step=on_step)
    seconds = time.perf_counter() - began
    read = sum(c.timings.prompt_tokens for c in done)
    made = sum(len(c.token_ids) for c in done)
    if live is not None:
        log(*live.summary([c.timings.first_token_seconds for c in done]))
    log(
        f"speed: {len(done)} prompts, {read} tokens{_cached(*(c.timings for c in done))} "
        f"(text: {source}); generated {made} tokens; {seconds:.2f} s in all, "
        f"{made / seconds:.2f} t/s; seeds {' '.join(str(c.seed) for c in done)}"
    )


def _cached(*timings: Timings) -> str:
    total = sum(t.cached_tokens for t in timings)
    return f" and {total} from the cache" if total else ""


def show(stream: Stream, source: str, live: LiveStats | None = None) -> str:
    """Print the text as it comes and the speed at its end, also after Ctrl-C; returns the text."""
    count, reason, newline, parts = 0, "interrupted", True, []
    write = live.write if live is not None else _write
    try:
        for chunk in stream:
            count += 1
            parts.append(chunk.text)
            if chunk.text:
                write(chunk.text)
                newline = chunk.text.endswith("\n")
            if live is not None:
                live.update()
            reason = chunk.finish_reason or reason
        reason = reason if count else "length"
    except BrokenPipeError:  # nobody reads any more
        newline = True
        raise
    finally:
        stream.close()
        if not newline:
            write("\n")
        t = stream.timings
        if live is not None:
            log(*live.summary([t.first_token_seconds]))
        log(
            f"speed: prompt {t.prompt_tokens} tokens{_cached(t)}, {t.prompt_per_second:.2f} t/s "
            f"(text: {source}); "
            f"generated {count} tokens, {t.decode_per_second:.2f} t/s; "
            f"end: {reason}; seed {stream.params.seed}"
        )
    return "".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def log(*lines: str) -> None:
    """Print lines to stderr."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
