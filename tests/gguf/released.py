"""A file with the header of the released model and holes instead of weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from imp_runtime import _core
from tests.gguf.gguf_files import QUANT

TABLE_ROWS = 320001536
HEADS = 16
KEYS: dict[str, Any] = {
    "block_count": 48,
    "context_length": 262144,
    "embedding_length": 2560,
    "vocab_size": 248320,
    "attention.head_count": 24,
    "attention.head_count_kv": 2,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 64,
    "rope.freq_base": 1e7,
    "expert_count": 512,
    "expert_used_count": 10,
    "expert_feed_forward_length": 640,
    "expert_shared_feed_forward_length": 640,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 48,
    "ssm.inner_size": 6144,
    "full_attention_interval": 4,
    "attention.compress_ratios": [4 * (layer % 4 == 3) for layer in range(48)],
    "hyper_connection.count": 4,
    "hyper_connection.low_rank": 320,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
    "ple.layers": [1],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 8,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 248044,
    "embedding_length_per_layer_input": 160,
    "ple.layer_multipliers": [1, 3, 5],
    "ple.head_vocab_sizes": [TABLE_ROWS // HEADS] * HEADS,
    "ple.head_offsets": [i * (TABLE_ROWS // HEADS) for i in range(HEADS)],
}
# As stored: experts NVFP4, the table as FP8 bytes, small tensors F32, the rest BF16.
TYPES = {"experts": QUANT.NVFP4, "table": QUANT.I8, "vector": QUANT.F32, "router": QUANT.F32}


def write_released(path: Path, mtp: bool = False) -> None:
    """Writes the header and cuts the file to its full size, so that it takes no disk space."""
    keys = {f"qwen4exp.{key}": value for key, value in KEYS.items()}
    if mtp:
        keys["qwen4exp.block_count"] = 49
        keys["qwen4exp.nextn_predict_layers"] = 1
    writer = gguf.GGUFWriter(path, "qwen4exp")
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    size = 0
    for spec in _core.tensor_table("qwen4exp", keys):
        size += _add(writer, spec)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    os.truncate(path, start + size)


def _add(writer: gguf.GGUFWriter, spec: _core.TensorSpec) -> int:
    """Adds a tensor, and its scale if it has one; returns their bytes with padding."""
    kind = TYPES.get(spec.role, QUANT.BF16)
    name = spec.name + ("_e4m3" if spec.role == "table" else "")
    size = _info(writer, name, spec.dims, kind)
    if spec.role in ("experts", "table"):
        scales = spec.dims[2] if spec.role == "experts" else 1
        size += _info(writer, spec.name.removesuffix("weight") + "scale", [scales], QUANT.F32)
    return size


def _info(writer: gguf.GGUFWriter, name: str, dims: list[int], kind: Any) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    elements = int(np.prod(dims, dtype=np.int64))
    n_bytes = elements // block * block_bytes
    writer.add_tensor_info(name, dims[::-1], np.dtype(np.float32), n_bytes, raw_dtype=kind)
    return -(-n_bytes // 32) * 32
