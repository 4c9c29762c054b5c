"""The fields of llama-bench's records, in its order."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gguf import LlamaFileType

from imp_runtime import __version__
from imp_runtime.bench.machine import cpu_name, gpu_name
from imp_runtime.bench.speed import SpeedRow
from imp_runtime.gguf.describe import Description

Value = str | int | float | bool

# Name -> SQL type, in order.
FIELDS = {
    "build_commit": "TEXT",
    "build_number": "INTEGER",
    "cpu_info": "TEXT",
    "gpu_info": "TEXT",
    "backends": "TEXT",
    "model_filename": "TEXT",
    "model_type": "TEXT",
    "model_size": "INTEGER",
    "model_n_params": "INTEGER",
    "n_batch": "INTEGER",
    "n_ubatch": "INTEGER",
    "n_threads": "INTEGER",
    "cpu_mask": "TEXT",
    "cpu_strict": "INTEGER",
    "poll": "INTEGER",
    "type_k": "TEXT",
    "type_v": "TEXT",
    "n_gpu_layers": "INTEGER",
    "n_cpu_moe": "INTEGER",
    "split_mode": "TEXT",
    "main_gpu": "INTEGER",
    "no_kv_offload": "INTEGER",
    "flash_attn": "INTEGER",
    "devices": "TEXT",
    "tensor_split": "TEXT",
    "tensor_buft_overrides": "TEXT",
    "load_mode": "TEXT",
    "lazy_mode": "TEXT",
    "embeddings": "INTEGER",
    "no_op_offload": "INTEGER",
    "no_host": "INTEGER",
    "repack": "INTEGER",
    "fit_target": "INTEGER",
    "fit_min_ctx": "INTEGER",
    "n_prompt": "INTEGER",
    "n_gen": "INTEGER",
    "n_depth": "INTEGER",
    "test_time": "TEXT",
    "avg_ns": "INTEGER",
    "stddev_ns": "INTEGER",
    "avg_ts": "REAL",
    "stddev_ts": "REAL",
}
# Settings of llama.cpp that imp does not have, at llama.cpp's defaults.
_ABSENT: dict[str, Value] = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_gpu_layers": -1,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": -1,
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": True,
    "fit_target": 0,
    "fit_min_ctx": 0,
}


@dataclass(frozen=True)
class ModelFacts:
    """What a record says about the model and its place."""

    filename: str
    type: str
    """Architecture, size and quantisation in words."""
    size: int
    """Bytes of all tensors."""
    n_params: int
    device: str
    """cpu or cuda."""
    device_flag: str = "auto"
    """As it was asked for."""

    @classmethod
    def of(cls, filename: str, about: Description, device: str, device_flag: str) -> ModelFacts:
        """From a summed-up file."""
        size = about.keys.get("general.size_label") or "?B"
        kind = f"{about.architecture} {size} {_file_type(about)}"
        return cls(filename, kind, about.tensor_bytes, about.parameters, device, device_flag)

    @property
    def backend(self) -> str:
        """CPU or CUDA."""
        return self.device.upper()


def _file_type(about: Description) -> str:
    """llama.cpp's name of the quantisation: NVFP4, BF16, Q4_K_M, ..."""
    try:
        name = LlamaFileType(about.keys.get("general.file_type", -1)).name
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "?"


def build_commit() -> str:
    """What stands where llama.cpp writes its commit."""
    return f"imp-{__version__}"


def build_number() -> int:
    """The version as one number: 0.1.0 is 100, 1.2.3 is 10203; 0 in a source tree."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", __version__)
    if match is None:
        return 0
    major, minor, patch = (int(part) for part in match.groups())
    return major * 10000 + minor * 100 + patch


def fields(row: SpeedRow, model: ModelFacts) -> dict[str, Value]:
    """Name -> value; booleans where llama-bench has them, floats for tokens per second."""
    setup = row.case.setup
    values = _ABSENT | {
        "build_commit": build_commit(),
        "build_number": build_number(),
        "cpu_info": cpu_name(),
        "gpu_info": gpu_name(model.device),
        "backends": model.backend,
        "model_filename": model.filename,
        "model_type": model.type,
        "model_size": model.size,
        "model_n_params": model.n_params,
        "n_batch": setup.n_batch,
        "n_ubatch": setup.n_ubatch,
        "n_threads": setup.n_threads,
        "type_k": setup.type_k,
        "type_v": setup.type_v,
        "devices": model.device_flag,
        "n_prompt": row.case.n_prompt,
        "n_gen": row.case.n_gen,
        "n_depth": setup.n_depth,
        "test_time": row.test_time,
        "avg_ns": row.avg_ns,
        "stddev_ns": row.stddev_ns,
        "avg_ts": row.avg_ts,
        "stddev_ts": row.stddev_ts,
    }
    return {name: values[name] for name in FIELDS}
