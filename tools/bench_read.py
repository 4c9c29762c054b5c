"""How fast a file's bytes reach memory: what filling the store of experts from a GGUF can cost.

    python tools/bench_read.py FILE [--gib 8] [--threads 16]

Blocks of an expert's size are read in order by a team of threads, as cuda/expert_store.cpp does:
copied out of a mapping, with the file outside and inside the page cache, and read with O_DIRECT. A
file that does not exist is written first.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK = 2764800  # bytes of an expert of the released shape; whole pages, as O_DIRECT asks


def write(path: Path, size: int) -> None:
    part = np.random.RandomState(1).bytes(64 << 20)
    with path.open("wb") as file:
        while (at := file.tell()) < size:
            file.write(part[: size - at])
        file.flush()
        os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Team:
    """Threads with a buffer each."""

    def __init__(self, threads: int):
        self.pool = ThreadPoolExecutor(threads)
        self.local = threading.local()

    def buffer(self) -> mmap.mmap:
        if not hasattr(self.local, "buffer"):
            self.local.buffer = mmap.mmap(-1, BLOCK)  # pages, as O_DIRECT asks
        buffer: mmap.mmap = self.local.buffer
        return buffer

    def seconds(self, blocks: int, read: Callable[[int], int]) -> float:
        """Of reading every block. Raises OSError if one comes short."""
        begin = time.perf_counter()
        for got in self.pool.map(read, range(blocks)):
            if got != BLOCK:
                raise OSError(f"a block of {BLOCK} bytes gave {got}")
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--gib", type=float, default=8, help="of a file that is written")
    parser.add_argument("--threads", type=int, default=16)
    args = parser.parse_args()
    if not args.file.exists():
        write(args.file, int(args.gib * 2**30))
    blocks = args.file.stat().st_size // BLOCK
    team = Team(args.threads)
    fd = os.open(args.file, os.O_RDONLY)
    mapping = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)

    def mapped(i: int) -> int:
        to = np.frombuffer(team.buffer(), np.uint8)
        to[:] = mapping[i * BLOCK : (i + 1) * BLOCK]
        return BLOCK

    def direct(i: int) -> int:
        return os.preadv(direct_fd, [team.buffer()], i * BLOCK)

    def show(name: str, read: Callable[[int], int]) -> None:
        rate = blocks * BLOCK / team.seconds(blocks, read) * 1e-9
        print(f"{name:<28} {rate:6.2f} GB/s, {args.threads} threads", flush=True)

    print(f"{args.file}: {blocks} blocks of {BLOCK} bytes")
    drop(args.file)
    show("mapped, from the disk", mapped)
    show("mapped, in the page cache", mapped)
    drop(args.file)
    try:
        direct_fd = os.open(args.file, os.O_RDONLY | os.O_DIRECT)
        show("O_DIRECT", direct)
    except OSError as error:
        print(f"O_DIRECT: {error}")


if __name__ == "__main__":
    main()
