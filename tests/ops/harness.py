"""Runs single ops of the C++ core: devices, stored weights, steps over several sequences, and
comparison with float64.

Whatever a step must not read is NaN here: state rows and cache pages of nobody, and the tokens
behind the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from imp_runtime import _core
from tests.ops import refs

Arrays = dict[str, np.ndarray]

# ---------------------------------------------------------------- devices


@dataclass(frozen=True)
class Device:
    """What runs the op: a backend, and for the CPU one of its kernel sets."""

    backend: str
    kernels: str = "auto"

    def __str__(self) -> str:
        return f"{self.backend}-{self.kernels}"

    def missing(self) -> str:
        """Why it cannot run here, or an empty string."""
        info = _core.system_info()
        if self.backend == "cuda":
            return "" if info["cuda_usable"] else f"no CUDA: {info['cuda_detail']}"
        if self.kernels in ("auto", "generic"):
            return ""
        have = info["cpu_features"].split()
        return "" if self.kernels.upper() in have else f"this processor lacks {self.kernels}"

    def run(
        self,
        name: str,
        args: dict[str, Any],
        step: dict[str, Any] | None = None,
        threads: int = 2,
        batch_invariant: bool = False,
        cublas_lt: bool = True,
    ) -> Arrays:
        """Outputs by name. Arrays of `step` that hold state and caches change in place."""
        outputs: Arrays = _core.run_op(
            name,
            args,
            step or {},
            backend=self.backend,
            kernels=self.kernels,
            n_threads=threads,
            context=8192,
            batch_invariant=batch_invariant,
            cublas_lt=cublas_lt,
        )
        return outputs


DEVICES = [*(Device("cpu", k) for k in ("generic", "avx2", "avx512")), Device("cuda")]

# ---------------------------------------------------------------- stored weights

IDS = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30, "NVFP4": 40, "F8_E4M3": 1000}
BLOCK = {"F32": 1, "F16": 1, "Q8_0": 32, "BF16": 1, "NVFP4": 64, "F8_E4M3": 1}
MATRIX_TYPES = ("F32", "F16", "BF16", "Q8_0", "NVFP4")
DECODE = {
    "F32": refs.decode_f32,
    "F16": refs.decode_f16,
    "BF16": refs.decode_bf16,
    "Q8_0": refs.decode_q8_0,
    "NVFP4": refs.decode_nvfp4,
    "F8_E4M3": refs.decode_e4m3,
}
CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0")


def cached(kind: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [..., n] as a cache stores it: (bytes [..., m], float64 [..., n]), by gguf."""
    raw = gguf.quants.quantize(f32(x), gguf.GGMLQuantizationType[kind]).view(np.uint8)
    return raw.reshape(*x.shape[:-1], -1), DECODE[kind](raw.reshape(-1)).reshape(x.shape)


def stored(
    rng: np.random.RandomState, kind: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Random weights of magnitude about 1: (bytes [n], float64 values `shape`)"""
    n = int(np.prod(shape))
    if kind == "F32":
        raw = rng.uniform(-1, 1, n).astype("<f4").view(np.uint8)
    elif kind == "F16":
        raw = rng.uniform(-1, 1, n).astype("<f2").view(np.uint8)
    elif kind == "BF16":
        bits = rng.uniform(-1, 1, n).astype("<f4").view("<u4") >> 16
        raw = bits.astype("<u2").view(np.uint8)
    elif kind == "Q8_0":
        blocks = rng.randint(0, 256, (n // 32, 34)).astype(np.uint8)
        scales = rng.uniform(-1 / 127, 1 / 127, n // 32).astype("<f2")
        blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
        raw = blocks.reshape(-1)
    elif kind == "NVFP4":
        blocks = rng.randint(0, 256, (n // 64, 36)).astype(np.uint8)
        blocks[:, :4] = rng.randint(0, 0x38, (n // 64, 4))
        raw = blocks.reshape(-1)
    else:  # F8_E4M3 below 1
        raw = (rng.randint(0, 0x38, n) | (rng.randint(0, 2, n) << 7)).astype(np.uint8)
    raw = np.ascontiguousarray(raw)
    return raw, DECODE[kind](raw).reshape(shape)


def weight(
    rng: np.random.RandomState, kind: str, rows: int, cols: int, scale: float = 1.0
) -> tuple[tuple[Any, ...], np.ndarray]:
    """(the op's argument, float64 [rows, cols] with the scale applied)"""
    raw, values = stored(rng, kind, (rows, cols))
    return (IDS[kind], raw, rows, cols, scale), values * float(np.float32(scale))


def bank(
    rng: np.random.RandomState, kind: str, experts: int, rows: int, cols: int
) -> tuple[tuple[Any, ...], np.ndarray]:
    """(the op's argument, float64 [experts, rows, cols] with each expert's scale applied)"""
    raw, values = stored(rng, kind, (experts, rows, cols))
    scales = rng.uniform(0.5, 2, experts).astype(np.float32)
    return (IDS[kind], raw, experts, rows, cols, scales), values * f64(scales)[:, None, None]


# ---------------------------------------------------------------- numbers


def f32(x: Any) -> np.ndarray:
    """C-contiguous float32, as the ops take it."""
    return np.ascontiguousarray(x, dtype=np.float32)


def f64(x: Any) -> np.ndarray:
    """What a reference takes: the same values in float64."""
    return np.asarray(x, np.float64)


def normal(rng: np.random.RandomState, *shape: int) -> np.ndarray:
    """float32 `shape`, standard normal"""
    return f32(rng.standard_normal(shape))


def close(got: np.ndarray, want: np.ndarray, tolerance: float, *terms: np.ndarray) -> None:
    """|got - want| at most `tolerance` times the largest |want|, and no NaN. `terms`: summands of
    want, whose size counts where they cancel."""
    assert got.shape == want.shape
    if got.size == 0:
        return
    largest = max(np.abs(x).max() for x in (want, *terms))
    worst = np.abs(got - want).max() / max(largest, 1e-30)
    assert worst <= tolerance, f"{worst:.2e} of the largest value"  # false for NaN as well


def same(got: np.ndarray, want: np.ndarray) -> None:
    """The same bits, NaN included."""
    assert got.shape == want.shape and got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class Steps:
    """A step over several sequences: chunk i brings tokens positions[i] .. positions[i] + rows[i].
    State rows and pages are shuffled, and some belong to nobody."""

    positions: tuple[int, ...]
    rows: tuple[int, ...]
    state_rows: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    n_state_rows: int
    n_pages: int
    page_tokens: int

    @property
    def total(self) -> int:
        """Rows of the step."""
        return sum(self.rows)

    def first(self, i: int) -> int:
        """First row of chunk i."""
        return sum(self.rows[:i])

    def part(self, i: int) -> slice:
        """Rows of chunk i."""
        return slice(self.first(i), self.first(i) + self.rows[i])

    def token_positions(self) -> list[int]:
        """[rows]"""
        return [p + j for p, n in zip(self.positions, self.rows, strict=True) for j in range(n)]

    def inputs(self, **more: Any) -> dict[str, Any]:
        """The `step` argument of an op; `more`: state, kv."""
        chunks = [
            (self.first(i), n, self.positions[i], self.state_rows[i], list(self.pages[i]))
            for i, n in enumerate(self.rows)
        ]
        return {
            "chunks": chunks,
            "positions": self.token_positions(),
            "page_tokens": self.page_tokens,
        } | more

    def split(self, most: int) -> Iterator[tuple[Steps, slice]]:
        """The same tokens in steps of one sequence and at most `most` tokens, and their rows."""
        for i, n in enumerate(self.rows):
            for j in range(0, n, most):
                size = min(most, n - j)
                yield (
                    Steps(
                        (self.positions[i] + j,),
                        (size,),
                        (self.state_rows[i],),
                        (self.pages[i],),
                        self.n_state_rows,
                        self.n_pages,
                        self.page_tokens,
                    ),
                    slice(self.first(i) + j, self.first(i) + j + size),
                )

    def state(self, floats: int) -> np.ndarray:
        """float32 [state rows, floats], NaN"""
        return np.full((self.n_state_rows, floats), np.nan, np.float32)

    def cache(self, *per_page: int) -> np.ndarray:
        """float32 [pages, *per_page], NaN"""
        return np.full((self.n_pages, *per_page), np.nan, np.float32)

    def stored(self, kind: str, width: int) -> np.ndarray:
        """uint8 [pages, page tokens, bytes of `width` elements], NaN"""
        size = width // BLOCK[kind] * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        return np.full((self.n_pages, self.page_tokens, size), 255, np.uint8)

    def slots(self, i: int, n: int, per_page: int) -> tuple[list[int], list[int]]:
        """(page, slot) of entries 0..n of sequence i in a cache of `per_page` entries a page"""
        pages = [self.pages[i][j // per_page] for j in range(n)]
        return pages, [j % per_page for j in range(n)]


def steps(
    rng: np.random.RandomState,
    chunks: Sequence[tuple[int, int]],  # (position, rows)
    page_tokens: int = 16,
) -> Steps:
    """Lays the chunks out over shuffled state rows and pages."""
    n = len(chunks)
    n_state_rows = 2 * n + 1
    needed = [-(-(p + r) // page_tokens) for p, r in chunks]
    n_pages = sum(needed) + 3
    free = [int(p) for p in rng.permutation(n_pages)]
    pages = []
    for k in needed:
        pages.append(tuple(free[:k]))
        free = free[k:]
    return Steps(
        tuple(p for p, _ in chunks),
        tuple(r for _, r in chunks),
        tuple(int(r) for r in rng.permutation(n_state_rows)[:n]),
        tuple(pages),
        n_state_rows,
        n_pages,
        page_tokens,
    )
