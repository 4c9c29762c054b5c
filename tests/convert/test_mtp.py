"""The MTP head: kept, left out with a line, required, dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from imp_runtime.convert import ConvertError, ConvertOptions, convert, plan
from tests.convert.builder import build, raw
from tests.convert.read_back import ReadBack, compare


def test_fake_head_is_left_out_with_a_line(tmp_path: Path) -> None:
    built = build(mtp="")
    built.text["mtp_num_hidden_layers"] = 1
    built.tensors["mtp.fc.weight"] = raw(np.ones((128, 256)), "BF16")[0]
    built.tensors["mtp.layers.0.mlp.gate.weight"] = raw(np.ones((4, 128)), "BF16")[0]
    src = built.write(tmp_path / "src")
    out = tmp_path / "out.gguf"
    report = convert(src, out)
    lines = [n for n in report.notes if "MTP" in n]
    assert len(lines) == 1
    assert lines[0].startswith("MTP left out: the checkpoint lacks mtp.layers.0.attn_hyper")
    assert "more" in lines[0]
    assert ReadBack(out).key("qwen4exp.block_count") == 4
    assert "qwen4exp.nextn_predict_layers" not in ReadBack(out).reader.fields
    compare(out, built)
    with pytest.raises(ConvertError, match="--mtp require: the MTP head lacks mtp.layers.0.attn"):
        plan(src, ConvertOptions(mtp="require"))


def test_one_missing_tensor_is_named(tmp_path: Path) -> None:
    built = build(mtp="block")
    del built.tensors["mtp.layers.0.mlp.experts.11.down_proj.weight"]
    src = built.write(tmp_path / "src")
    with plan(src) as planned:
        wanted = "MTP left out: the checkpoint lacks mtp.layers.0.mlp.experts.11.down_proj"
        assert wanted in planned.notes
        assert not planned.mtp


def test_drop(tmp_path: Path) -> None:
    built = build()
    out = tmp_path / "out.gguf"
    report = convert(built.write(tmp_path / "src"), out, ConvertOptions(mtp="drop"))
    assert any(n.startswith("MTP left out: ") for n in report.notes)
    assert not any("nextn" in n or n.startswith("blk.4.") for n in ReadBack(out).tensors)
    assert list(ReadBack(out).key("qwen4exp.attention.recurrent_layers")) == [True] * 3 + [False]


@pytest.mark.parametrize(("layers", "good"), [(1, True), (0, False), (2, False)])
def test_require(tmp_path: Path, layers: int, good: bool) -> None:
    built = build()
    built.text["mtp_num_hidden_layers"] = layers
    src = built.write(tmp_path / "src")
    if good:
        plan(src, ConvertOptions(mtp="require")).close()
        return
    sentence = f"--mtp require: mtp_num_hidden_layers is {layers}, 1 is needed"
    with pytest.raises(ConvertError, match=sentence):
        plan(src, ConvertOptions(mtp="require"))
    with plan(src) as planned:
        assert not planned.mtp
        assert any("MTP left out" in n for n in planned.notes)


def test_misshapen_head_is_an_error(tmp_path: Path) -> None:
    built = build()
    built.tensors["mtp.fc_hidden.weight"] = raw(np.ones((128, 64)), "BF16")[0]
    with pytest.raises(ConvertError, match=r"mtp.fc_hidden.weight is BF16 \[128, 64\]"):
        plan(built.write(tmp_path / "src"))
