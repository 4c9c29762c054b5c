"""What llama.cpp-style command lines share: flags, exit status, place under ``imp``.

The flags are those of the cache, and those that do nothing or are refused.
"""

import os
import sys
from collections.abc import Callable, Sequence

import typer

from ..errors import ImpError
from ..placement import Limits, check_policy
from ..session import CACHE_TYPES
from ..units import parse_bytes
from .llama_flags import Flag, FlagError, Parsed, flag, ignored, refused

_NO_OFFLOAD = "layers and experts are placed by the runtime, the device is chosen with --device"
_NO_SAMPLING = "nothing is sampled"
_MAPPED = "the file is always memory-mapped"
_THREADS = "threads are placed by the operating system, their number is set with -t"
_ONE_CACHE = "every sequence has its own state"
_OWN_SCALING = "it would change the model, whose position encoding comes from the file"
_OTHER_WEIGHTS = "it would change the model, only the weights of the file are run"
_NO_DOWNLOAD = "nothing is downloaded, give a file with -m"
_LOGS = "logs go to stderr without colours or levels"

CACHE: list[Flag] = [
    flag(f"-ctk,--cache-type-k {'|'.join(CACHE_TYPES)}", "how keys are stored", default="f32"),
    flag(f"-ctv,--cache-type-v {'|'.join(CACHE_TYPES)}", "how values are stored", default="f32"),
]
PLACEMENT: list[Flag] = [
    flag("--vram-limit SIZE", "device memory that may be used, such as 32GiB"),
    flag("--ram-limit SIZE", "host memory for experts that do not fit there"),
    flag("--expert-policy NAME", "of their cache: lru, pool, lrfu[:n], pool-lrfu[:n]"),
]
COMMON: list[Flag] = [
    *ignored(
        _NO_OFFLOAD,
        "-ngl,--gpu-layers,--n-gpu-layers N",
        "-ot,--override-tensor PATTERN=TYPE",
        "-cmoe,--cpu-moe",
        "-ncmoe,--n-cpu-moe N",
        "-ncffn,--n-cpu-ffn N",
        "-sm,--split-mode MODE",
        "-ts,--tensor-split N0,N1,...",
        "-mg,--main-gpu INDEX",
        "-kvo,--kv-offload",
        "-nkvo,--no-kv-offload",
        "--op-offload",
        "--no-op-offload",
        "--repack",
        "-nr,--no-repack",
        "--no-host",
        "-fit,--fit [on|off]",
        "-fitt,--fit-target MiB",
        "-fitc,--fit-ctx N",
    ),
    *ignored(
        "attention has one implementation per device",
        "-fa,--flash-attn [on|off|auto|1|0|enabled|disabled|true|false|-1]",
    ),
    *ignored(
        _MAPPED,
        "-lm,--load-mode MODE",
        "-lzm,--lazy-mode MODE",
        "--mmap",
        "--no-mmap",
        "--mlock",
        "-dio,--direct-io",
        "-ndio,--no-direct-io",
    ),
    *ignored(
        _THREADS,
        "-C,--cpu-mask M",
        "-Cr,--cpu-range LO-HI",
        "--cpu-strict N",
        "--prio N",
        "--poll N",
        "-Cb,--cpu-mask-batch M",
        "-Crb,--cpu-range-batch LO-HI",
        "--cpu-strict-batch N",
        "--prio-batch N",
        "--poll-batch N",
        "--numa TYPE",
    ),
    *ignored(
        _ONE_CACHE,
        "-np,--parallel N",
        "-kvu,--kv-unified",
        "-no-kvu,--no-kv-unified",
        "--swa-full",
        "-dt,--defrag-thold N",
        "--context-shift",
        "--no-context-shift",
        "--keep N",
    ),
    *ignored(
        _NO_SAMPLING,
        "-n,--predict,--n-predict N",
        "--samplers SAMPLERS",
        "-s,--seed SEED",
        "--sampler-seq,--sampling-seq SEQUENCE",
        "--ignore-eos",
        "--temp,--temperature N",
        "--top-k N",
        "--top-p N",
        "--min-p N",
        "--top-nsigma,--top-n-sigma N",
        "--xtc-probability N",
        "--xtc-threshold N",
        "--typical,--typical-p N",
        "--repeat-last-n N",
        "--repeat-penalty N",
        "--presence-penalty N",
        "--frequency-penalty N",
        "--dry-multiplier N",
        "--dry-base N",
        "--dry-allowed-length N",
        "--dry-penalty-last-n N",
        "--dry-sequence-breaker STRING",
        "--adaptive-target N",
        "--adaptive-decay N",
        "--dynatemp-range N",
        "--dynatemp-exp N",
        "--mirostat N",
        "--mirostat-lr N",
        "--mirostat-ent N",
        "-l,--logit-bias TOKEN_ID(+/-)BIAS",
        "--grammar GRAMMAR",
        "--grammar-file FNAME",
        "-j,--json-schema SCHEMA",
        "-jf,--json-schema-file FILE",
        "-bs,--backend-sampling",
        "--spec-draft-type-k,-ctkd,--cache-type-k-draft TYPE",
        "--spec-draft-type-v,-ctvd,--cache-type-v-draft TYPE",
    ),
    *ignored("timings are always printed", "--perf", "--no-perf"),
    *ignored("there is no warm-up run", "--warmup", "--no-warmup"),
    *ignored("non-finite results always stop the run", "--check-tensors"),
    *ignored(
        _LOGS,
        "--log-disable",
        "--log-jsonl",
        "--no-log-jsonl",
        "--log-colors [on|off|auto]",
        "-v,--verbose,--log-verbose",
        "-lv,--verbosity,--log-verbosity N",
        "--log-prefix",
        "--no-log-prefix",
        "--log-timestamps",
        "--no-log-timestamps",
    ),
    *ignored("the network is never used", "--offline"),
    *refused("redirect stderr instead", "--log-file FNAME"),
    *refused(
        _OWN_SCALING,
        "--rope-scaling TYPE",
        "--rope-scale N",
        "--rope-freq-base N",
        "--rope-freq-scale N",
        "--yarn-orig-ctx N",
        "--yarn-ext-factor N",
        "--yarn-attn-factor N",
        "--yarn-beta-slow N",
        "--yarn-beta-fast N",
    ),
    *refused(
        _OTHER_WEIGHTS,
        "--override-kv KEY=TYPE:VALUE",
        "--lora FNAME",
        "--lora-scaled FNAME:SCALE",
        "--control-vector FNAME",
        "--control-vector-scaled FNAME:SCALE",
        "--control-vector-layer-range START END",
    ),
    *refused(
        _NO_DOWNLOAD,
        "-mu,--model-url URL",
        "-dr,--docker-repo REPO",
        "-hf,-hfr,--hf-repo REPO",
        "-hff,--hf-file FILE",
        "-hft,--hf-token TOKEN",
        "-cl,--cache-list",
    ),
    *refused("everything runs on this machine", "-rpc,--rpc SERVERS"),
    *refused("use 'imp info'", "--list-devices"),
    *refused("use 'imp --install-completion'", "--completion-bash"),
]


def limits(parsed: Parsed) -> Limits:
    """What PLACEMENT says. Raises ImpError for a size or a policy that is none."""
    return limits_of(parsed["vram_limit"], parsed["ram_limit"], parsed["expert_policy"])


def limits_of(vram: str | None, ram: str | None, policy: str | None) -> Limits:
    """Limits from the text of flags. Raises ImpError for a size or a policy that is none."""
    usual = Limits()
    name = usual.expert_policy if policy is None else policy
    check_policy(name)
    return Limits(
        None if vram is None else parse_bytes(vram, "--vram-limit"),
        None if ram is None else parse_bytes(ram, "--ram-limit"),
        name,
    )


def exit_status(run: Callable[[], int]) -> int:
    """What ``run`` returns; errors become one sentence on stderr and a status that is not 0."""
    try:
        return run()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this, closing stdout fails once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except (FlagError, ImpError, MemoryError) as error:
        return _fail(error)


def _fail(sentence: object) -> int:
    sys.stdout.flush()
    print(f"error: {sentence}", file=sys.stderr)
    return 1


def add_command(
    app: typer.Typer, name: str, main: Callable[[Sequence[str]], int], help: str
) -> None:
    """Add a command to ``imp`` that parses its own flags."""

    @app.command(
        name,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help=help,
    )
    def command(context: typer.Context) -> None:
        raise typer.Exit(main(context.args))
