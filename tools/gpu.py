"""Builds the CUDA extension on a machine with a GPU, tests it against the CPU, measures, and prints
one short table.

    python tools/gpu.py [--out DIR] [--jobs 16] [--arch 90a-real] [--only build,ops,...]

Logs of every part go to DIR as files. Exit status 1 if a part failed or did not end in time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"


@dataclass
class Report:
    """Rows of the table: part, result, seconds, facts."""

    out: Path
    limit: float  # seconds of a part
    rows: list[tuple[str, bool, float, str]] = field(default_factory=list)

    def run(self, name: str, command: list[str], facts: Callable[[str], str]) -> bool:
        """Run a command with its output in a file; `facts` picks the line for the table."""
        env = dict(os.environ, PYTHONUNBUFFERED="1")
        env["PYTHONPATH"] = f"{ROOT / 'python'}{os.pathsep}{env.get('PYTHONPATH', '')}"
        begin = time.monotonic()
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            try:
                process = subprocess.run(
                    command, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=self.limit
                )
                ok = process.returncode == 0
            except subprocess.TimeoutExpired:
                file.write(f"\nnot done after {self.limit:.0f} s\n")
                ok = False
        text = log.read_text(errors="replace")
        self.rows.append((name, ok, time.monotonic() - begin, facts(text)))
        if not ok:
            print(f"---- {name} failed; the end of {log.name}:", *text.splitlines()[-60:], sep="\n")
        sys.stdout.flush()
        return ok

    def table(self) -> str:
        return "\n".join(
            f"{name:<14} {'ok' if ok else 'FAILED':<7} {seconds:6.1f} s  {facts}"
            for name, ok, seconds, facts in self.rows
        )


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][-150:] if lines else ""


def indented(text: str) -> str:
    """All lines, without the profiler's warnings."""
    return "\n".join(["", *(f"    {s}" for s in text.splitlines() if "warn" not in s.lower())])


def build(report: Report, args: argparse.Namespace) -> bool:
    configure = [
        *("cmake", "-S", ".", "-B", str(BUILD), "-G", "Ninja", "-DIMP_CUDA=ON", "-DIMP_DEV=ON"),
        "-DIMP_BENCH=ON",
        f"-DIMP_CUDA_ARCHITECTURES={args.arch}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CXX_COMPILER={args.cxx}",
        f"-DCMAKE_CUDA_HOST_COMPILER={args.cxx}",
    ]
    return report.run("configure", configure, lambda t: "") and report.run(
        "build", ["cmake", "--build", str(BUILD), "-j", str(args.jobs)], last_line
    )


def tests(*what: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--maxfail=20", *what]


Test = tuple[str, list[str], Callable[[str], str]]
BUDGET = ROOT / "tests" / "gpu" / "test_gpu_budget.py"
"""Measures the device's memory: nothing may run beside it."""


def side_by_side(report: Report, found: Sequence[Test], workers: int = 12) -> bool:
    """A process each: a device error in one leaves the others their device."""
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return all(list(pool.map(lambda test: report.run(*test), found)))


def of_files(files: Sequence[Path], *options: str) -> list[Test]:
    return [
        (file.stem.removeprefix("test_"), tests(str(file), *options), last_line) for file in files
    ]


def info(report: Report, _: argparse.Namespace) -> bool:
    code = "from imp_runtime import _core; print(_core.system_info()['cuda_detail'])"
    return report.run("device", [sys.executable, "-c", code], last_line)


def op_tests() -> list[Test]:
    return of_files(sorted(ROOT.glob("tests/ops/test_op_*.py")), "-k", "cuda or coverage")


def model_tests() -> list[Test]:
    """All but the gates."""
    files = sorted(ROOT.glob("tests/gpu/test_gpu_*.py"))
    return of_files([f for f in files if f != BUDGET and f.stem != "test_gpu_gates"])


def gate_tests() -> list[Test]:
    """What must not be exceeded, with what was measured."""

    def measured(text: str) -> str:
        lines = [f"    {gate}" for gate in re.findall(r"gate .*", text)]
        return "\n".join(["", *lines, last_line(text)])

    return [("gates", tests("tests/gpu/test_gpu_gates.py", "-s"), measured)]


def ops(report: Report, _: argparse.Namespace) -> bool:
    return side_by_side(report, op_tests())


def models(report: Report, _: argparse.Namespace) -> bool:
    done = [side_by_side(report, model_tests()), side_by_side(report, of_files([BUDGET]))]
    return all(done)


def gates(report: Report, _: argparse.Namespace) -> bool:
    return side_by_side(report, gate_tests())


def checks(report: Report, _: argparse.Namespace) -> bool:
    """Ops, models and gates at once."""
    every = [*gate_tests(), *model_tests(), *op_tests()]
    done = [side_by_side(report, every), side_by_side(report, of_files([BUDGET]))]
    return all(done)


def sanitize(report: Report, _: argparse.Namespace) -> bool:
    """compute-sanitizer over a whole small model, eagerly and replayed."""
    ok = True
    for tool, chosen in (("memcheck", "taps or (replay and base)"), ("racecheck", "taps")):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
        command += ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu", "-k", chosen]

        def errors(text: str) -> str:
            return " ".join(re.findall(r"(?:ERROR|RACECHECK) SUMMARY.*", text))

        ok = report.run(tool, command, errors) and ok
    return ok


def bench(report: Report, _: argparse.Namespace) -> bool:
    return report.run(
        "bench",
        [sys.executable, str(ROOT / "tools" / "gpu_bench.py")],
        lambda t: "\n".join([""] + [f"    {line}" for line in t.splitlines() if ": " in line]),
    )


def kernels(report: Report, _: argparse.Namespace) -> bool:
    return report.run("kernels", [str(BUILD / "imp_bench_cuda")], indented)


def decode(report: Report, _: argparse.Namespace) -> bool:
    """Decode of the full shape with everything in device memory; dense weights of 8 bits too."""
    script = [sys.executable, str(ROOT / "tools" / "gpu_decode.py")]
    runs = {
        "decode": ["--batch", "1,8,16,32,64,128", "--kernels", "24"],
        "decode_q8": ["--synthetic", "flash-next:dense=q8_0", "--batch", "1,8"],
        "invariant": ["--batch", "1", "--batch-invariant"],
    }
    done = [report.run(name, script + args, indented) for name, args in runs.items()]
    return all(done)


def host(report: Report, _: argparse.Namespace) -> bool:
    """Decode with the experts on the host, held to the memory of smaller cards."""
    script = [sys.executable, str(ROOT / "tools" / "gpu_decode.py"), "--routing", "prose"]
    table = Path(tempfile.gettempdir()) / "imp-ngram-table"
    script += ["--context", "256", "--ngram-file", str(table), "--kernels", "8"]
    short = ["--batch", "1", "--tokens", "64"]
    runs = {
        "32GiB": ["--vram-limit", "32GiB", "--batch", "1", "--tokens", "512", "--repeat", "5"],
        "batch_8": ["--vram-limit", "32GiB", "--batch", "8", "--tokens", "128", "--repeat", "3"],
        "no_overlap": ["--vram-limit", "32GiB", "--no-overlap", *short],
        "q8_0": ["--vram-limit", "32GiB", "--synthetic", "flash-next:dense=q8_0", *short],
        "24GiB": ["--vram-limit", "24GiB", *short],
        "16GiB": ["--vram-limit", "16GiB", *short],
        "12GiB": ["--vram-limit", "12GiB", *short],
    }
    done = [report.run(f"host_{name}", script + args, indented) for name, args in runs.items()]
    return all(done)


def simulator(report: Report, _: argparse.Namespace) -> bool:
    """The cache of a run at released shape hits as often as `imp sim` says."""
    return report.run("simulator", [sys.executable, str(ROOT / "tools" / "gpu_trace.py")], indented)


def experts(report: Report, _: argparse.Namespace) -> bool:
    """Victims of the device's cache against the host reference, and the speed of its kernels."""
    return report.run("experts", [str(BUILD / "imp_bench_experts"), "100000"], indented)


PARTS: dict[str, Callable[[Report, argparse.Namespace], bool]] = {
    "build": build,
    "device": info,
    "checks": checks,
    "ops": ops,
    "models": models,
    "gates": gates,
    "sanitize": sanitize,
    "bench": bench,
    "kernels": kernels,
    "experts": experts,
    "decode": decode,
    "host": host,
    "simulator": simulator,
}

USUALLY_LEFT_OUT = ("sanitize", "ops", "models", "gates")  # the last three are in checks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-logs")))
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--arch", default="90a-real")
    parser.add_argument("--cxx", default=shutil.which("g++") or "g++")  # whatever $CXX says
    parser.add_argument("--only", default=",".join(p for p in PARTS if p not in USUALLY_LEFT_OUT))
    parser.add_argument("--limit", type=float, default=180, help="seconds that a part may take")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out, args.limit)
    ok = True
    for name in args.only.split(","):
        done = PARTS[name](report, args)
        ok = ok and done
        if name == "build" and not done:
            break
    print(report.table())
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
