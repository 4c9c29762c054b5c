"""Types of the C++ core (python/bindings)."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imp_runtime.errors import ImpError

Error = ImpError

class TensorInfo:
    """Where a tensor of a GGUF file is and what it holds."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str:
        """Name in ggml: 'F32', 'NVFP4', ..."""

    @property
    def dims(self) -> list[int]:
        """Fastest-varying first (ggml's ne)."""

    @property
    def n_bytes(self) -> int: ...
    @property
    def n_elems(self) -> int: ...
    @property
    def shard(self) -> int:
        """Index into Gguf.files."""

    @property
    def offset(self) -> int:
        """Bytes from the start of that file."""

class Gguf:
    """A GGUF file, mapped read-only; all shards of a split one."""

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Gguf:
        """Opens a file, or all shards of a split one, given any of them.

        Raises Error: io, bad_file, or unsupported (version, byte order, unknown type).
        """

    @property
    def path(self) -> pathlib.Path: ...
    @property
    def files(self) -> list[pathlib.Path]:
        """Paths, one per shard."""

    @property
    def version(self) -> int: ...
    def keys(self) -> dict[str, Any]:
        """All metadata: int, float, bool, str, lists, or read-only numpy arrays."""

    def key_types(self) -> dict[str, str]:
        """Stored types: 'u32', 'string', 'i32[]', 'array[]', ..."""

    def tensors(self) -> list[TensorInfo]:
        """In file order."""

    def data(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes, uint8 [n_bytes]: a read-only view that keeps the file open.

        Raises Error (invalid_argument) if there is no such tensor.
        """

    def decode(
        self, name: str, row0: int, n_rows: int, as_type: str | None = None
    ) -> NDArray[np.float32]:
        """Rows row0 .. row0 + n_rows as float32 [n_rows, dims[0]], read as `as_type` if given.

        Raises Error: unsupported (imp does not compute with the type), invalid_argument.
        """

class TensorSpec:
    """One tensor that an architecture needs."""

    @property
    def name(self) -> str:
        """GGUF name."""

    @property
    def dims(self) -> list[int]:
        """Fastest-varying first."""

    @property
    def role(self) -> str:
        """One of: vector, filter, matrix, router, embedding, experts, table."""

    @property
    def required(self) -> bool: ...

class Model:
    """A mapped, checked model file."""

    @staticmethod
    def load(path: str | os.PathLike[str], ngram_scale: float = 0.0) -> Model: ...
    @staticmethod
    def synthetic(
        spec: str, on_host: bool, table_file: str | os.PathLike[str] | None = None
    ) -> Model:
        """Random weights of a released shape, such as flash-next:layers=4,experts=64."""

    @property
    def path(self) -> str: ...
    @property
    def gguf(self) -> Gguf:
        """The file, or the header of a synthetic model."""

    @property
    def arch(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def mtp_layers(self) -> int: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def table_bytes(self) -> int: ...
    def prefetch(self, begin: int, end: int) -> None:
        """Reads bytes [begin, end) of resident_bytes into the page cache."""

USUAL_EXPERT_POLICY: str
"""Of sessions that name none."""
USUAL_STEP_TIMEOUT: float
"""Seconds."""

class DeviceWeights:
    """Weights on the device while sessions use them."""

    def __init__(self) -> None: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int:
        """Of experts on the host."""

class Session:
    """Sequences over one model. One thread at a time."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        max_seqs: int = 1,
        n_ubatch: int = 512,
        n_threads: int = 0,
        kernels: str = "auto",
        taps: Sequence[str] = [],
        poison: bool = False,
        profile: bool = False,
        device: str = "cpu",
        graphs: bool = True,
        batch_invariant: bool = False,
        cache_tokens: int = 0,
        rollback_tokens: int = 0,
        max_outputs: int = 0,
        cache_type_k: str = "f32",
        cache_type_v: str = "f32",
        routing: str = "model",
        routing_ids: NDArray[np.uint16] | None = None,
        expert_slots: int = -1,
        expert_policy: str = "lrfu",
        ram_limit: int = 0,
        weights: DeviceWeights | None = None,
        verify_experts: bool = False,
        step_timeout: float = 60.0,
        overlap_gathers: bool = True,
    ) -> None: ...
    def expert_stats(self) -> dict[str, Any]: ...
    def verify_experts(self) -> tuple[int, int, list[tuple[int, int, int]]]:
        """(slots compared, experts of the store compared, [(layer, expert, slot)] that differ).

        Slot -1 = in the store.
        """

    def damage_slot(self, slot: int) -> None:
        """Flips a bit of a cached expert, for tests."""

    def close(self) -> None: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def compiled(self) -> int:
        """Shapes of steps compiled so far."""

    @property
    def free_pages(self) -> int: ...
    @property
    def free_rows(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def cache_types(self) -> tuple[str, str]: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...
    def sequence_pages(self, seq: int) -> list[int]:
        """Ids of its cache pages, in order; forks share them."""

    def pages_held_by(self, seqs: Sequence[int]) -> int:
        """Pages that closing all of these sequences would free."""

    def truncate(self, seq: int, length: int) -> None: ...
    def oldest_length(self, seq: int) -> int:
        """The shortest length that truncate() takes now."""

    def save(self, seq: int) -> bytes:
        """The sequence as bytes that restore() takes."""

    def restore(self, snapshot: bytes, name: str = "the snapshot") -> int:
        """A new sequence from what save() gave; errors begin with `name`."""

    @property
    def model_hash(self) -> int:
        """Of the model's keys and tensors, as in its snapshots."""

    def open(self) -> int: ...
    def fork(self, seq: int) -> int: ...
    def close_sequence(self, seq: int) -> None: ...
    def tokens(self, seq: int) -> list[int]: ...
    def length(self, seq: int) -> int: ...
    def step(self, requests: Sequence[tuple[int, NDArray[np.int32], int]]) -> NDArray[np.float32]:
        """Runs [(sequence, int32 tokens, first output)] in one step.

        Returns float32 [outputs, vocab], a read-only view that is valid until the next step.
        """

    def choose(
        self,
        requests: Sequence[tuple[int, NDArray[np.int32], int]],
        draws: Sequence[Draw | None],
    ) -> list[int | NDArray[np.float32]]:
        """As step(), with a Draw or None for each output.

        Returns for each output its token, or where the host has to choose its logits, float32
        [vocab], a read-only view that is valid until the next step.
        """

    def op_times(self) -> dict[str, tuple[float, int]]:
        """Op name -> (seconds, calls) since the session was opened with profile=True."""

    def taps(self) -> dict[str, NDArray[np.float32] | NDArray[np.int32]]: ...

class Scheduler:
    """Which tokens of which requests run in the next step."""

    def __init__(
        self,
        *,
        step_tokens: int,
        prefill_tokens: int,
        n_ctx: int,
        page_tokens: int,
        pages: int,
        running: int,
    ) -> None: ...
    def submit(self, id: int, prompt: int, stops: Sequence[int]) -> None: ...
    def change(self, rows: int, pages: int) -> tuple[str, int]:
        """One change to carry out, given what is free.

        ("preempt", "resume", "start" or "", id).
        """

    def preempt(self) -> tuple[str, int]: ...
    def cached(self, id: int, tokens: int) -> None: ...
    def put_back(self, id: int) -> None: ...
    def step(self) -> list[tuple[int, int, int, bool]]:
        """[(id, first token, tokens, whether a token is chosen after them)].

        Nothing has changed until commit().
        """

    def commit(self, pieces: Sequence[tuple[int, int, int, bool]]) -> None: ...
    def token(self, id: int) -> None: ...
    def shared(self, id: int) -> None: ...
    def finish(self, id: int) -> None: ...
    @property
    def needed(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...

class Draw:
    """How a step chooses a token by itself."""

class Sampler:
    """Logits of one sequence in, one token out."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        penalty_last_n: int,
        seed: int,
        suppress: Sequence[int],
    ) -> None: ...
    def sample(self, logits: NDArray[np.float32], recent: NDArray[np.int32]) -> int:
        """Takes logits float32 [vocab] and the sequence so far, int32 [n], oldest first."""

    def next(self) -> Draw | None:
        """For Session.choose(): what sample() would do; None if that takes more than the logits."""

    def chosen(self) -> None:
        """A step chose a token by next()."""

    def candidates(self) -> list[int]:
        """Ids that the last call of sample() could have chosen."""

    def fork(self) -> Sampler:
        """The same parameters and random state, independent from here on."""

    @property
    def rng_state(self) -> int: ...

def architectures() -> list[str]: ...
def tensor_table(arch: str, keys: dict[str, Any]) -> list[TensorSpec]:
    """Tensors that a file with these metadata keys must have.

    Raises Error naming the key and both values.
    """

def memory_cost(
    arch: str, keys: dict[str, Any], cache_type_k: str = "f32", cache_type_v: str = "f32"
) -> dict[str, int]:
    """page_bytes per page_tokens tokens of cache, and row_bytes of fixed state, per sequence."""

def system_info() -> dict[str, Any]:
    """Processor, memory and CUDA facts of this machine."""

def cublas_lt(file: str = "") -> tuple[bool, str]:
    """Whether cuBLASLt is found, and one line: its version and place, or why there is none.

    `file`: a library's name instead of the usual one.
    """

def snapshot_info(snapshot: bytes, name: str = "the snapshot") -> tuple[int, list[int]]:
    """Checks the bytes and returns (model hash, tokens)."""

def token_nll(
    logits: NDArray[np.float32], targets: NDArray[np.int32], n_threads: int = 0
) -> NDArray[np.float64]:
    """-log softmax(logits)[target] per row: float32 [n, vocab], int32 [n] -> float64 [n].

    Raises Error (numeric) naming the first row that is not finite.
    """

def log_probs(
    logits: NDArray[np.float32], token: int, top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Natural log-probability of `token`, and the `top` likeliest (id, log-probability) pairs."""

def op_names() -> list[str]: ...
def run_op(
    name: str,
    args: dict[str, Any],
    step: dict[str, Any],
    *,
    backend: str = "cpu",
    kernels: str = "auto",
    n_threads: int = 2,
    context: int = 65536,
    batch_invariant: bool = False,
    cublas_lt: bool = True,
) -> dict[str, Any]:
    """Runs one op and returns its outputs by name; changes state and caches of `step` in place."""

class PlantedRouting:
    """Expert ids that follow a hit curve."""

    def __init__(self, *, layers: int, experts: int, k: int, curve: str, seed: int) -> None:
        """curve: "prose" or "uniform". Raises Error for others, or k > experts."""

    def next(self, rows: int) -> NDArray[np.uint16]:
        """The next tokens' experts: uint16 [rows, layers, k], most wanted first."""

def staging_slots(*, layers: int, experts: int, slots: int, policy: str) -> int:
    """Places for experts that the device's cache needs beside its slots."""

def simulate_experts(
    ids: NDArray[np.uint16],
    step_rows: Sequence[int],
    *,
    experts: int,
    slots: int,
    policy: str,
    first_counted: int,
) -> dict[str, Any]:
    """Runs ids [tokens, layers, k] through a cache of `slots` in all.

    Returns counts of distinct experts from step first_counted on: wanted, hits, kept (misses that
    entered), uncached (layer steps with more experts than slots), layer_wanted, layer_hits.
    """
