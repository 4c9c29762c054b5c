"""Run as a script: measures memory bandwidth and float32 speed, prints them as JSON.

Arguments: number of threads, bytes of free memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MAX_READ_BYTES = 1 << 30  # larger than any last-level cache
MIN_READ_BYTES = 1 << 26
READ_SHARE = 4  # of the free memory at most a quarter
READ_SECONDS = 1.0
MATRIX = 1024
PRODUCT_SECONDS = 0.5
MIN_RUNS = 3


def best(run: Callable[[], object], seconds: float) -> float:
    """Shortest time of a run, over `seconds` and three runs at least."""
    run()
    shortest, end, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < MIN_RUNS or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - begin)
        runs += 1
    return shortest


def read_bandwidth(n_threads: int, n_bytes: int) -> float:
    """GB/s of n_threads that reduce a buffer; the maximum needs no arithmetic that would limit."""
    buffer = np.full(n_bytes // 4, 1, np.int32)  # written, or all pages would be the zero page
    parts = np.array_split(buffer, n_threads)
    with ThreadPoolExecutor(n_threads) as pool:
        shortest = best(lambda: list(pool.map(np.max, parts)), READ_SECONDS)
    return buffer.nbytes / shortest / 1e9


def product_speed() -> float:
    """GFLOP/s of a square float32 product; BLAS takes its threads from the environment."""
    a = np.full((MATRIX, MATRIX), 0.5, np.float32)
    out = np.empty_like(a)
    return 2.0 * MATRIX**3 / best(lambda: np.matmul(a, a, out=out), PRODUCT_SECONDS) / 1e9


def main() -> None:
    """Measure and print."""
    n_threads, free = int(sys.argv[1]), int(sys.argv[2])
    n_bytes = max(MIN_READ_BYTES, min(MAX_READ_BYTES, free // READ_SHARE))
    bandwidth = read_bandwidth(n_threads, n_bytes)
    print(
        json.dumps(
            {
                "read_gb_per_s": bandwidth,
                "read_bytes": n_bytes,
                "gflop_per_s": product_speed(),
            }
        )
    )


if __name__ == "__main__":
    main()
