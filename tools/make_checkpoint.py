"""Writes a checkpoint in the released mixed-precision layout with random weights, of any size.

Per-layer shapes are those of Qwen3.8-Flash-Next: NVFP4 experts, FP8 n-gram table and MTP experts,
BF16 for the rest. For measuring the converter: 4 layers and a table of base 1,000,000 are 11.8 GB.

    python tools/make_checkpoint.py OUT --layers 4 --ngram-base 1000000
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, STREAMS, LOW_RANK = 2560, 4, 320
EXPERTS, WIDTH = 512, 640
KEY_HEADS, VALUE_HEADS, DELTA_DIM = 16, 48, 128
HEADS, KV_HEADS, HEAD_DIM = 24, 2, 256
INDEX_HEADS, INDEX_DIM = 4, 128
NGRAM_SIZE, HEADS_PER_NGRAM, ROW, SHARDS = 3, 8, 160, 128
CHUNK = 16 << 20  # bytes made at a time
ITEM = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
PREFIX = "model.language_model."


@dataclass(frozen=True)
class Spec:
    """A tensor to write. kind: codes, scales, fp8, bf16, positive, or the bytes themselves."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str | bytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM[self.dtype]


def linear(name: str, *shape: int) -> Spec:
    return Spec(name, "BF16", shape, "bf16")


def number(name: str, value: float, dtype: str = "F32") -> Spec:
    bits = np.float32(value).tobytes()
    return Spec(name, dtype, () if dtype == "F32" else (1,), bits if dtype == "F32" else bits[2:])


def hyper(p: str, *, inject: bool = True) -> Iterator[Spec]:
    wide = STREAMS * HIDDEN
    yield linear(p + "hc_norm.weight", wide)
    yield linear(p + "input_mix_weight_down.weight", LOW_RANK, wide)
    yield linear(p + "input_mix_weight_up.weight", wide, LOW_RANK)
    if inject:
        yield linear(p + "block_inject_weight.weight", STREAMS, wide)


def delta(p: str) -> Iterator[Spec]:
    inner = VALUE_HEADS * DELTA_DIM
    channels = 2 * KEY_HEADS * DELTA_DIM + inner
    yield linear(p + "in_proj_qkv.weight", channels, HIDDEN)
    yield linear(p + "in_proj_z.weight", inner, HIDDEN)
    yield linear(p + "in_proj_a.weight", VALUE_HEADS, HIDDEN)
    yield linear(p + "in_proj_b.weight", VALUE_HEADS, HIDDEN)
    yield linear(p + "conv1d.weight", channels, 1, 4)
    yield linear(p + "A_log", VALUE_HEADS)
    yield linear(p + "dt_bias", VALUE_HEADS)
    yield linear(p + "norm.weight", DELTA_DIM)
    yield linear(p + "out_proj.weight", HIDDEN, inner)


def attention(p: str) -> Iterator[Spec]:
    yield linear(p + "q_proj.weight", 2 * HEADS * HEAD_DIM, HIDDEN)
    yield linear(p + "k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
    yield linear(p + "v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
    yield linear(p + "o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
    yield linear(p + "q_norm.weight", HEAD_DIM)
    yield linear(p + "k_norm.weight", HEAD_DIM)
    yield linear(p + "indexer.index_qk_proj.weight", (INDEX_HEADS + 1) * INDEX_DIM, HIDDEN)
    yield linear(p + "indexer.q_layernorm.weight", INDEX_DIM)
    yield linear(p + "indexer.k_layernorm.weight", INDEX_DIM)


def experts(p: str, *, nvfp4: bool) -> Iterator[Spec]:
    for e in range(EXPERTS):
        for part, n, k in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            q = f"{p}{e}.{part}_proj."
            if nvfp4:
                yield Spec(q + "weight", "U8", (n, k // 2), "codes")
                yield Spec(q + "weight_scale", "F8_E4M3", (n, k // 16), "scales")
                yield number(q + "weight_scale_2", 2e-5 * (1 + e / EXPERTS))
                yield number(q + "input_scale", 1e-3 * (1 + e / EXPERTS))
            else:
                grid = (-(-n // 128), -(-k // 128))
                yield Spec(q + "weight", "F8_E4M3", (n, k), "fp8")
                yield Spec(q + "weight_scale_inv", "BF16", grid, "positive")


def layer(p: str, *, full: bool, nvfp4: bool) -> Iterator[Spec]:
    yield from hyper(p + "attn_hyper_connection.")
    yield from hyper(p + "mlp_hyper_connection.")
    yield from attention(p + "self_attn.") if full else delta(p + "linear_attn.")
    yield linear(p + "mlp.gate.weight", EXPERTS, HIDDEN)
    for part, n, k in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        yield linear(f"{p}mlp.shared_expert.{part}_proj.weight", n, k)
    yield linear(p + "mlp.shared_expert_gate.weight", 1, HIDDEN)
    yield from experts(p + "mlp.experts.", nvfp4=nvfp4)


def ngram(p: str) -> Iterator[Spec]:
    yield linear(p + "key_proj.weight", STREAMS * HIDDEN, HIDDEN)
    yield linear(p + "value_proj.weight", HIDDEN, HIDDEN)
    for part in ("norm_key", "norm_query", "norm_conv"):
        yield linear(f"{p}{part}.weight", STREAMS * HIDDEN)
    yield linear(p + "conv1d.weight", STREAMS * HIDDEN, 1, 4)


def table_rows(base: int) -> int:
    """Padded rows: the primes from `base` on, one per head, summed."""
    primes: list[int] = []
    n = base
    while len(primes) < (NGRAM_SIZE - 1) * HEADS_PER_NGRAM:
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            primes.append(n)
        n += 1
    return -(-sum(primes) // SHARDS) * SHARDS


def files(args: argparse.Namespace) -> Iterator[list[Spec]]:
    """The shards: one per layer, one for the rest, one for the MTP head and the table."""
    for i in range(args.layers):
        p = f"{PREFIX}layers.{i}."
        specs = list(layer(p, full=i % 4 == 3, nvfp4=True))
        yield specs + (list(ngram(p + "ple.")) if i == 1 else [])
    yield [
        linear(PREFIX + "embed_tokens.weight", args.vocab, HIDDEN),
        linear("lm_head.weight", args.vocab, HIDDEN),
        *hyper(PREFIX + "hyper_connection_mixer.", inject=False),
    ]
    table = f"{PREFIX}layers.1.ple.ple_embedding.ngram_embedding."
    rows = table_rows(args.ngram_base) // SHARDS
    specs = [Spec(f"{table}shard_{s}.weight", "F8_E4M3", (rows, ROW), "fp8") for s in range(SHARDS)]
    specs.append(number(table + "weight_scale", 2.0**-12, "BF16"))
    if args.mtp:
        specs += [
            linear("mtp.fc_embedding.weight", HIDDEN, HIDDEN),
            linear("mtp.fc_hidden.weight", HIDDEN, HIDDEN),
            linear("mtp.pre_fc_norm_embedding.weight", HIDDEN),
            linear("mtp.pre_fc_norm_hidden.weight", STREAMS * HIDDEN),
            *layer("mtp.layers.0.", full=True, nvfp4=False),
            *hyper("mtp.hyper_connection_mixer.", inject=False),
        ]
    yield specs


def random_bytes(rng: np.random.Generator, kind: str, count: int) -> bytes:
    """Valid bytes: no NaN, BF16 of moderate size."""
    data = np.frombuffer(rng.bytes(count), np.uint8)
    if kind == "scales":  # 2^-3 .. 448
        return (0x20 + data % 0x5F).astype(np.uint8).tobytes()
    if kind == "fp8":
        return np.where(data & 0x7F == 0x7F, data - 1, data).astype(np.uint8).tobytes()
    if kind == "positive":  # a scale of 2^-9 .. 2^-5
        return (data.view(np.uint16) & 0x01FF | 0x3B00).astype(np.uint16).tobytes()
    if kind == "bf16":  # sign, exponent 118..121, mantissa
        return (data.view(np.uint16) & 0x81FF | 0x3B00).astype(np.uint16).tobytes()
    return data.tobytes()


def write_file(path: Path, specs: list[Spec], rng: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(specs, key=lambda s: (-ITEM[s.dtype], s.name))  # as safetensors does
    at = 0
    for s in ordered:
        offsets = [at, at + s.nbytes]
        header[s.name] = {"dtype": s.dtype, "shape": list(s.shape), "data_offsets": offsets}
        at += s.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for s in ordered:
            if isinstance(s.kind, bytes):
                f.write(s.kind)
                continue
            for start in range(0, s.nbytes, CHUNK):
                f.write(random_bytes(rng, s.kind, min(CHUNK, s.nbytes - start)))


def config(args: argparse.Namespace) -> dict[str, Any]:
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(args.layers)]
    text = {
        "model_type": "qwen4_exp_text",
        "vocab_size": args.vocab,
        "hidden_size": HIDDEN,
        "num_hidden_layers": args.layers,
        "layer_types": kinds,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": DELTA_DIM,
        "linear_value_head_dim": DELTA_DIM,
        "output_gate_type": "sigmoid",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": WIDTH,
        "shared_expert_intermediate_size": WIDTH,
        "hc_count": STREAMS,
        "hc_lowrank": LOW_RANK,
        "ple_layer_ids": [2],
        "ple_embed_dim": HIDDEN,
        "ngram_size": NGRAM_SIZE,
        "heads_per_ngram": HEADS_PER_NGRAM,
        "ngram_vocab_size_base": args.ngram_base,
        "split_ngram_parts": SHARDS,
        "indexer_n_heads": INDEX_HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": INDEX_DIM,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "mtp_num_hidden_layers": 1 if args.mtp else 0,
        "eos_token_id": 0,
    }
    return {"model_type": "qwen4_exp", "text_config": text, "tie_word_embeddings": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="at least 2 (default 4)")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--ngram-base", type=int, default=1_000_000, help="released: 20000000")
    parser.add_argument("--no-mtp", dest="mtp", action="store_false")
    tokenizer = Path(__file__).parent.parent / "models" / "prose-nvfp4"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer, help="folder to copy it from")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.out / name)
    (args.out / "config.json").write_text(json.dumps(config(args), indent=1))
    rng = np.random.default_rng(0)
    shards = list(files(args))
    weight_map = {}
    for i, specs in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_file(args.out / name, specs, rng)
        weight_map.update({s.name: name for s in specs})
        print(f"{name}: {sum(s.nbytes for s in specs)} bytes", flush=True)
    total = sum(s.nbytes for specs in shards for s in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
