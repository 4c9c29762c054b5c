"""The shipped model: the released layout at a real size."""

from __future__ import annotations

from pathlib import Path

from imp_runtime.convert import ConvertOptions, convert, plan, schemes_seen
from tests.convert.read_back import ReadBack


def test_converts_and_verifies(prose_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "prose.gguf"
    report = convert(prose_checkpoint, out, ConvertOptions())
    assert report.verified == 39_071_456
    back = ReadBack(out)
    assert back.type("per_layer_token_embd.weight_e4m3") == "I8"
    assert back.type("blk.7.ffn_down_exps.weight") == "NVFP4"
    assert back.type("blk.8.ffn_down_exps.weight") == "BF16"
    assert back.key("qwen4exp.block_count") == 9
    assert list(back.key("imp.eos_token_ids")) == [4088, 4086]
    assert back.key("tokenizer.ggml.pre") == "qwen35"


def test_schemes(prose_checkpoint: Path) -> None:
    with plan(prose_checkpoint) as planned:
        assert schemes_seen(planned) == {
            "BF16": 216,
            "FP8 per tensor": 16,
            "NVFP4 (ModelOpt)": 8 * 64 * 3,
            "FP8 in blocks": 64 * 3,
        }
