"""Every checkpoint dialect against values decoded independently."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imp_runtime.convert import ConvertOptions, convert
from tests.convert.builder import EXPERTS, Quantised, Raw, add_vision, build, fp8, nvfp4
from tests.convert.read_back import ReadBack, compare

BF16 = 2.0**-8  # relative rounding of BF16
F32 = ConvertOptions(dense="f32", ngram="f32", experts="f32")

# Linear maps that an all-NVFP4 export quantises; routers, norms and small maps stay plain.
QUANTISED = re.compile(
    r".*(self_attn\.[qkvo]_proj|in_proj_(qkv|z)|out_proj|shared_expert\.\w+_proj)|lm_head"
)


def dense_nvfp4(rng: np.random.Generator, module: str, n: int, k: int) -> Quantised | None:
    return nvfp4(rng, n, k) if QUANTISED.fullmatch(module) else None


def dense_compressed(rng: np.random.Generator, module: str, n: int, k: int) -> Quantised | None:
    return nvfp4(rng, n, k, compressed=True) if QUANTISED.fullmatch(module) else None


def dense_fp8(rng: np.random.Generator, module: str, n: int, k: int) -> Quantised | None:
    kinds = {"self_attn": "channel", "linear_attn": "block", "shared_expert": "tensor"}
    kind = next((v for part, v in kinds.items() if part in module), None)
    return fp8(rng, n, k, kind) if kind and QUANTISED.fullmatch(module) else None


DIALECTS: dict[str, tuple[dict[str, Any], int]] = {
    "bf16 stacked": ({}, 1),
    "bf16 stacked, text only": ({"prefix": "model."}, 3),
    "bf16 one by one": ({"experts": "single", "mtp": "single"}, 3),
    "f32": ({"plain": "F32", "table": "whole"}, 2),
    "f16 one by one": ({"plain": "F16", "experts": "single", "mtp": ""}, 1),
    "modelopt mixed": ({"experts": "nvfp4", "mtp": "block", "table": "fp8"}, 3),
    "modelopt, all but an ignore list": (
        {"experts": "nvfp4", "table": "fp8", "dense": dense_nvfp4},
        2,
    ),
    "compressed-tensors": (
        {"experts": "compressed", "mtp": "compressed", "dense": dense_compressed},
        1,
    ),
    "block fp8": ({"experts": "block", "mtp": "block", "table": "fp8", "dense": dense_fp8}, 2),
    "nvfp4 table": ({"experts": "nvfp4", "table": "nvfp4"}, 1),
    "a scale per table shard": ({"table": "fp8_each"}, 1),
    "two n-gram layers": ({"ple_layer_ids": [3, 1], "table": "fp8"}, 2),
    "experts not of whole blocks": (
        {"experts": "nvfp4", "moe_intermediate_size": 48, "mtp": ""},
        1,
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_values_in_f32(dialect: str, tmp_path: Path) -> None:
    arguments, shards = DIALECTS[dialect]
    built = build(**arguments)
    src = built.write(tmp_path / "src", shards)
    out = tmp_path / "out.gguf"
    report = convert(src, out, F32)
    compared = compare(out, built)
    assert compared == set(built.values)
    assert report.verified > sum(v.size for v in built.values.values()) * 0.99


@pytest.mark.parametrize("dialect", ["bf16 stacked", "modelopt mixed", "compressed-tensors"])
def test_defaults_lose_nothing_of_a_release(dialect: str, tmp_path: Path) -> None:
    arguments, shards = DIALECTS[dialect]
    built = build(**arguments)
    out = tmp_path / "out.gguf"
    convert(built.write(tmp_path / "src", shards), out)
    rounded = {"mtp.layers.0.mlp.experts": BF16} if arguments.get("mtp") == "block" else {}
    if arguments.get("dense"):  # rows of 96 are not whole NVFP4 blocks of 64
        rounded = {"linear_attn.out_proj": BF16}
    compare(out, built, rounded)
    back = ReadBack(out)
    wanted = "BF16" if dialect == "bf16 stacked" else "NVFP4"
    assert back.type("blk.2.ffn_up_exps.weight") == wanted
    if arguments.get("table") == "fp8":
        assert back.type("per_layer_token_embd.weight_e4m3") == "I8"


def test_dense_nvfp4_is_kept_where_gguf_has_a_scale(tmp_path: Path) -> None:
    built = build(experts="nvfp4", dense=lambda r, m, n, k: nvfp4(r, n, k) if k % 64 == 0 else None)
    out = tmp_path / "out.gguf"
    report = convert(built.write(tmp_path / "src"), out)
    back = ReadBack(out)
    for name in ("blk.0.attn_qkv", "blk.3.attn_q", "blk.0.ffn_up_shexp", "output"):
        assert back.type(f"{name}.weight") == "NVFP4"
        assert f"{name}.scale" in back.tensors
    for name in ("blk.0.hc_attn_down", "blk.3.indexer.q_proj", "token_embd", "blk.1.ple_key"):
        assert back.type(f"{name}.weight") == "BF16"
    assert back.type("blk.0.ffn_gate_inp.weight") == "F32"
    assert any("NVFP4" in n and "decoded to BF16" in n for n in report.notes)
    kept = [n.removesuffix(".weight") for n in back.tensors if back.type(n) == "NVFP4"]
    got = back.modules(built.text)
    np.testing.assert_array_equal(
        got["layers.0.linear_attn.in_proj_qkv"], built.values["layers.0.linear_attn.in_proj_qkv"]
    )
    assert len(kept) > 20


def test_quantised_output_projection_moves_whole_heads(tmp_path: Path) -> None:
    """ssm_out columns are reordered without decoding; heads of 16 are one scale group each."""
    changes = {"linear_num_value_heads": 8, "linear_num_key_heads": 4}  # 8 x 16 = two blocks
    built = build(experts="nvfp4", dense=dense_nvfp4, **changes)
    out = tmp_path / "out.gguf"
    convert(built.write(tmp_path / "src"), out)
    assert ReadBack(out).type("blk.0.ssm_out.weight") == "NVFP4"
    name = "layers.0.linear_attn.out_proj"
    np.testing.assert_array_equal(ReadBack(out).modules(built.text)[name], built.values[name])


def test_experts_above_255(tmp_path: Path) -> None:
    built = build(experts="nvfp4", mtp="", num_experts=260, num_hidden_layers=1,
                  layer_types=["linear_attention"], ple_layer_ids=[])  # fmt: skip
    out = tmp_path / "out.gguf"
    convert(built.write(tmp_path / "src", 2), out)
    got = ReadBack(out).modules(built.text)["layers.0.mlp.experts.down"]
    for e in (0, 255, 256, 259):
        np.testing.assert_array_equal(got[e], built.values["layers.0.mlp.experts.down"][e])
    assert EXPERTS < 256  # the other tests do not cover this


@pytest.mark.parametrize(
    ("dense", "relative", "absolute"),
    [("bf16", 2**-8, 0), ("f16", 2**-11, 1e-7), ("q8_0", 0, 6e-3)],
)
def test_rounded_types(dense: str, relative: float, absolute: float, tmp_path: Path) -> None:
    built = build(plain="F32", experts="single")
    out = tmp_path / "out.gguf"
    options = ConvertOptions(dense=dense, ngram=dense, experts=dense)  # type: ignore[arg-type]
    convert(built.write(tmp_path / "src"), out, options)
    back = ReadBack(out)
    got = back.modules(built.text)
    for module in ("layers.0.linear_attn.in_proj_qkv", "layers.3.mlp.experts.up",
                   "layers.1.ple.ple_embedding.ngram_embedding", "lm_head"):  # fmt: skip
        wanted = built.values[module]
        np.testing.assert_allclose(got[module], wanted, rtol=relative, atol=absolute)
        assert (got[module] != wanted).any()
    np.testing.assert_array_equal(got["layers.0.mlp.gate"], built.values["layers.0.mlp.gate"])
    # Rows of 4 taps are not whole blocks of 32, so Q8_0 falls back as llama.cpp's converter does.
    kind = {"bf16": "BF16", "f16": "F16", "q8_0": "F16"}[dense]
    assert back.type("blk.1.ple_conv1d.weight") == kind


def test_keep_leaves_plain_experts_as_they_are(tmp_path: Path) -> None:
    for plain in ("F32", "F16", "BF16"):
        out = tmp_path / f"{plain}.gguf"
        convert(build(plain=plain, mtp="").write(tmp_path / plain), out)
        assert ReadBack(out).type("blk.0.ffn_gate_exps.weight") == plain


def test_experts_in_two_schemes_share_one_type(tmp_path: Path) -> None:
    """A layer whose experts are not all quantised is decoded as a whole."""
    built = build(experts="nvfp4", mtp="")
    values = np.random.default_rng(5).normal(0, 0.3, (64, 128)).astype(np.float32)
    name = "model.language_model.layers.1.mlp.experts.7.gate_proj."
    for key in ("weight_scale", "weight_scale_2", "input_scale"):
        del built.tensors[name + key]
    built.tensors[name + "weight"] = Raw("F32", (64, 128), values.tobytes())
    built.values["layers.1.mlp.experts.gate"][7] = values
    out = tmp_path / "out.gguf"
    report = convert(built.write(tmp_path / "src"), out, ConvertOptions(experts="f32"))
    assert ReadBack(out).type("blk.1.ffn_gate_exps.weight") == "F32"
    assert ReadBack(out).type("blk.1.ffn_up_exps.weight") == "NVFP4"
    compare(out, built, {})
    assert any("rounded to F32" in n for n in report.notes)


@pytest.mark.parametrize("dialect", ["block fp8", "modelopt, all but an ignore list", "f32"])
def test_small_steps_change_nothing(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that end inside heads, experts, FP8 blocks and shards; a mapping dropped often."""
    arguments, shards = DIALECTS[dialect]
    src = build(**arguments).write(tmp_path / "src", shards)
    convert(src, tmp_path / "whole.gguf")
    monkeypatch.setattr("imp_runtime.convert.write.CHUNK_VALUES", 700)
    monkeypatch.setattr("imp_runtime.convert.verify.REOPEN_BYTES", 100_000)
    convert(src, tmp_path / "steps.gguf")
    assert (tmp_path / "steps.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_vision_is_left_out_with_a_line(tmp_path: Path) -> None:
    built = build(mtp="")
    add_vision(built)
    report = convert(built.write(tmp_path / "src"), tmp_path / "out.gguf")
    assert any(n.startswith("vision left out: 2 tensors, 128 bytes") for n in report.notes)
