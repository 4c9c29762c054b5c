"""The machine that a benchmark runs on, and what it can do at best."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from imp_runtime import _core
from imp_runtime.errors import ImpError

PROBE = Path(__file__).with_name("ceiling_probe.py")
PROBE_SECONDS = 120
# Variables by which BLAS libraries take their number of threads.
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Ceiling:
    """Measured limits of the machine with a number of threads."""

    n_threads: int
    read_gb_per_s: float
    """Reading a buffer from memory, best pass, GB = 1e9 bytes."""
    read_bytes: int
    """Size of that buffer."""
    gflop_per_s: float
    """Float32 matrix product of numpy's BLAS, best run."""

    def describe(self) -> str:
        """One line that says how it was measured."""
        return (
            f"measured ceiling, threads = {self.n_threads}: {self.read_gb_per_s:.1f} GB/s "
            f"reading {self.read_bytes >> 20} MiB of memory (numpy maximum, best pass), "
            f"{self.gflop_per_s:.0f} GFLOP/s in a float32 matrix product (numpy's BLAS, best run)"
        )


def measure_ceiling(n_threads: int) -> Ceiling:
    """Measure in a process of its own: its memory and BLAS threads are not the benchmark's.

    Raises:
        ImpError: the process failed.
    """
    threads = {name: str(n_threads) for name in BLAS_THREADS}
    available = _core.system_info()["memory_available_bytes"]
    try:
        done = subprocess.run(
            [sys.executable, str(PROBE), str(n_threads), str(available)],
            env=os.environ | threads,
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_SECONDS,
        )
        return Ceiling(n_threads, **json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ImpError(f"the machine's ceiling cannot be measured: {last}") from error
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        raise ImpError(f"the machine's ceiling cannot be measured: {error}") from error


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor, empty if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


def gpu_name(device: str) -> str:
    """What runs a model on `device`; empty on the CPU."""
    return str(_core.system_info()["cuda_detail"]) if device == "cuda" else ""


def peak_rss_bytes() -> int:
    """Most memory that this process ever held, mapped weights included."""
    return int(_core.system_info()["peak_rss_bytes"])
