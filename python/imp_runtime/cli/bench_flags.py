"""imp-bench's two flag tables: llama-batched-bench's and llama-bench's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..session import CACHE_TYPES
from .llama_common import CACHE, COMMON, PLACEMENT
from .llama_flags import INT32_MAX, FlagError, FlagTable, Meaning, flag, ignored, refused, without

BATCHED_FLAGS = ("-npp", "-ntg", "-npl")
"""Any of these chooses llama-batched-bench's mode."""
MAX_VALUES = 1000
"""Values of one list; a range without end is a slip."""

# Of both modes. The last ones are imp's own.
_BOTH = [
    flag("-h,--help,--usage", "print this and exit"),
    flag("--version", "print the version and exit"),
    flag("--no-warmup", "no warm-up before the measurement"),
    flag("--text FILE", "read this text instead of random tokens"),
    flag("-s,--seed N", "of the random tokens", type=int, default=0),
    flag("--extra", "more figures: spread, clean decode speed, share of the machine, op times"),
    *PLACEMENT,
    flag("--synthetic SPEC", "random weights of a released shape, such as flash-next:layers=4"),
    flag("--routing NAME", "for --synthetic: prose (default), uniform, or recorded: trace:FILE"),
    flag("--ngram-file FILE", "n-gram table of --synthetic, written if it does not exist"),
]

_BATCHED = [
    flag("-npp N0,N1,...", "prompt tokens of each sequence", append=True),
    flag("-ntg N0,N1,...", "tokens that each sequence generates", append=True),
    flag("-npl N0,N1,...", "sequences", append=True),
    flag("-pps", "all sequences share one prompt"),
    flag("-tgs", "generate sequence after sequence"),
    flag("-kvu,--kv-unified", "count a shared prompt once; the cache is always shared"),
    flag("-no-kvu,--no-kv-unified", "the default", store=False, into="kv_unified"),
    flag("--output-format md|jsonl", "of the results", default="md"),
    flag("-m,--model FNAME", "the GGUF model"),
    flag(
        "-c,--ctx-size N", "tokens of all sequences, 0: context of the model", type=int, default=0
    ),
    flag("-b,--batch-size N", "tokens of a logical batch", type=int, default=2048),
    flag("-ub,--ubatch-size N", "tokens per forward pass", type=int, default=512),
    flag("-t,--threads N", "threads, -1 for all cores", type=int, default=-1),
    flag("-tb,--threads-batch N", "threads, goes before -t", type=int),
    flag("-dev,--device auto|cpu|cuda|none", "where to run; none is cpu", default="auto"),
    *CACHE,
    flag("--reps N", "measure every row so often and print medians", type=int, default=1),
    flag("--warmup", "the default", store=False, into="no_warmup"),
    *_BOTH,
]

BATCHED = FlagTable([*_BATCHED, *without(COMMON, _BATCHED)])

_PLACED = "the runtime places layers and experts itself, choose the device with -dev"
_MAPPED = "the file is always memory-mapped"
_THREADS = "threads are placed by the operating system, their number is set with -t"
_CACHE_HELP = f"{', '.join(CACHE_TYPES)} (default: f32)"

SPEED = FlagTable(
    [
        *_BOTH,
        flag("-m,--model FNAME", "GGUF models", append=True),
        flag("-p,--n-prompt N", "prompt tokens (default: 512)", append=True),
        flag("-n,--n-gen N", "generated tokens (default: 128)", append=True),
        flag("-pg PP,TG", "a prompt and a generation in one test", append=True),
        flag("-d,--n-depth N", "tokens before the test (default: 0)", append=True),
        flag("-b,--batch-size N", "tokens of a logical batch (default: 2048)", append=True),
        flag("-ub,--ubatch-size N", "tokens per forward pass (default: 512)", append=True),
        flag("-t,--threads N", "threads (default: all cores)", append=True),
        flag("-ctk,--cache-type-k T", f"keys: {_CACHE_HELP}", append=True),
        flag("-ctv,--cache-type-v T", f"values: {_CACHE_HELP}", append=True),
        flag("-dev,--device auto|cpu|cuda|none", "where to run; none is cpu", default="auto"),
        flag("-r,--repetitions,--reps N", "runs of every test", type=int, default=5),
        flag("-o,--output csv|json|jsonl|md|sql", "format on stdout", default="md"),
        flag("-oe,--output-err csv|json|jsonl|md|sql|none", "format on stderr", default="none"),
        flag("--delay N", "seconds before every test", type=int, default=0),
        flag("--progress", "tell on stderr what runs"),
        *ignored(
            _PLACED,
            "-ngl,--n-gpu-layers,--gpu-layers N",
            "-ncmoe,--n-cpu-moe N",
            "-sm,--split-mode MODE",
            "-mg,--main-gpu I",
            "-nkvo,--no-kv-offload 0|1",
            "-ts,--tensor-split TS0/TS1/...",
            "-ot,--override-tensor PATTERN=TYPE;...",
            "-nopo,--no-op-offload 0|1",
            "--no-host 0|1",
            "--repack 0|1",
            "-fitt,--fit-target MiB",
            "-fitc,--fit-ctx N",
        ),
        *ignored("attention has one implementation per device", "-fa,--flash-attn VALUE"),
        *ignored(
            _MAPPED,
            "-lm,--load-mode MODE",
            "-lzm,--lazy-mode MODE",
            "-mmp,--mmap 0|1",
            "--no-mmap",
            "--mlock",
            "-dio,--direct-io 0|1",
        ),
        *ignored(
            _THREADS,
            "-C,--cpu-mask HEX",
            "--cpu-strict 0|1",
            "--poll N",
            "--prio N",
            "--numa MODE",
        ),
        *ignored("logs go to stderr without levels", "-v,--verbose"),
        *ignored("the network is never used", "--offline"),
        *refused("embeddings are not computed", "-embd,--embeddings 0|1"),
        *refused("nothing is downloaded, give a file with -m", "-hf,-hfr,--hf-repo REPO"),
        *refused("nothing is downloaded, give a file with -m", "-hff,--hf-file FILE"),
        *refused("nothing is downloaded, give a file with -m", "-hft,--hf-token TOKEN"),
        *refused("everything runs on this machine", "-rpc,--rpc SERVERS"),
        *refused("use 'imp info'", "--list-devices"),
    ]
)

SECTIONS = {
    Meaning.IGNORED: "Flags of llama.cpp without effect here:\n",
    Meaning.REFUSED: "Flags of llama.cpp that are refused:\n",
}


def help_text() -> str:
    """Both tables."""
    speed = "usage: imp-bench -m MODEL [flags]     one sequence, with llama-bench's flags\n"
    batched = (
        "usage: imp-bench -m MODEL -npp N -ntg N -npl N [flags]     several sequences, with "
        "llama-batched-bench's flags\n"
    )
    lists = (
        "Several values are given with commas or by repeating the flag; ranges as first-last, "
        "first-last+step or first-last*factor.\n"
    )
    return "\n".join(
        [
            SPEED.help_text({Meaning.USED: speed} | SECTIONS),
            "",
            lists,
            BATCHED.help_text({Meaning.USED: batched} | SECTIONS),
        ]
    )


_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10})(?:([+*])(\d{1,10}))?)?")


def numbers(name: str, given: Sequence[str], least: int, *, ranges: bool = True) -> list[int]:
    """The whole numbers of a list flag.

    Args:
        name: of the flag, for errors.
        given: what follows each use of it.
        least: smallest allowed value.
        ranges: whether `first-last*factor` is understood.

    Raises:
        FlagError: not a list of such numbers, a value out of range, or more than MAX_VALUES.
    """
    out: list[int] = []
    for word in ",".join(given).split(","):
        match = _RANGE.fullmatch(word)
        if match is None or (match[2] is not None and not ranges):
            kinds = "whole numbers, or ranges like 16-64*2" if ranges else "whole numbers"
            raise FlagError(f"{name} is {','.join(given)!r}, it must be a list of {kinds}")
        value, last = int(match[1]), int(match[2] or match[1])
        factor, step = match[3] == "*", int(match[4] or 1)
        if last < value:
            raise FlagError(f"{name} has the range {word}, which ends before it begins")
        if step < 1 or (factor and (step < 2 or value < 1)):
            raise FlagError(f"{name} has the range {word}, which never ends")
        while value <= last:
            if not least <= value <= INT32_MAX:
                raise FlagError(f"{name} has {value}, it must be {least} to {INT32_MAX}")
            if len(out) == MAX_VALUES:
                raise FlagError(f"{name} has more than {MAX_VALUES} values")
            out.append(value)
            value = value * step if factor else value + step
    return out


def cache_types(name: str, given: Sequence[str]) -> list[str]:
    """The storage types of a list flag. Raises FlagError for one that is not there."""
    out = ",".join(given).split(",")
    for word in out:
        if word not in CACHE_TYPES:
            raise FlagError(f"{name} is {word!r}, it must be one of {', '.join(CACHE_TYPES)}")
    return out


def pairs(name: str, given: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of -pg. Raises FlagError for anything but two whole numbers."""
    out = []
    for word in given:
        values = numbers(name, [word], 0, ranges=False)
        if len(values) != 2:
            raise FlagError(f"{name} is {word!r}, it must be two whole numbers: PP,TG")
        if values == [0, 0]:
            raise FlagError(f"{name} is {word}, one of the two must be at least 1")
        out.append((values[0], values[1]))
    return out
