"""What `imp run` prints: texts on stdout, one line about each run on stderr."""

import sys
import time
from collections.abc import Sequence

from imp_runtime.chat import Message
from imp_runtime.llm import LLM, Completion, Stream
from imp_runtime.sampling import SamplingParams
from imp_runtime.timings import Timings


def show_all(
    llm: LLM, prompts: Sequence[str | list[Message]], params: SamplingParams, source: str
) -> None:
    """Print the texts in order, each as soon as those before it are there."""
    ids = [llm.prompt_ids(p) if isinstance(p, str) else llm.chat_ids(p) for p in prompts]
    ready: dict[int, Completion] = {}
    shown = 0
    began = time.perf_counter()

    def on_done(index: int, done: Completion) -> None:
        nonlocal shown
        ready[index] = done
        while shown in ready:
            text = ready[shown].text
            sys.stdout.write(f"--- {shown + 1}\n{text}" + "\n" * (not text.endswith("\n")))
            sys.stdout.flush()
            shown += 1

    done = llm.generate(ids, params, on_done=on_done)
    seconds = time.perf_counter() - began
    read = sum(c.timings.prompt_tokens for c in done)
    made = sum(len(c.token_ids) for c in done)
    log(
        f"speed: {len(done)} prompts, {read} tokens{_cached(*(c.timings for c in done))} "
        f"(text: {source}); generated {made} tokens; {seconds:.2f} s in all, "
        f"{made / seconds:.2f} t/s; seeds {' '.join(str(c.seed) for c in done)}"
    )


def _cached(*timings: Timings) -> str:
    total = sum(t.cached_tokens for t in timings)
    return f" and {total} from the cache" if total else ""


def show(stream: Stream, source: str) -> str:
    """Print the text as it comes and the speed at its end, also after Ctrl-C; returns the text."""
    count, reason, newline, parts = 0, "interrupted", True, []
    try:
        for chunk in stream:
            count += 1
            parts.append(chunk.text)
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
        log(
            f"speed: prompt {t.prompt_tokens} tokens{_cached(t)}, {t.prompt_per_second:.2f} t/s "
            f"(text: {source}); "
            f"generated {count} tokens, {t.decode_per_second:.2f} t/s; "
            f"end: {reason}; seed {stream.params.seed}"
        )
    return "".join(parts)


def log(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)
