"""`describe` and `imp info`: published numbers, other architectures, odd files, output."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imp_runtime import ImpError
from imp_runtime.cli.main import main
from imp_runtime.gguf import Description, Kind, describe
from imp_runtime.gguf.sequence import MAX_LAYERS, sequence_cost
from tests.gguf.gguf_files import QUANT, Writer, small
from tests.gguf.released import write_released


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Description:
    path = tmp_path_factory.mktemp("released") / "released.gguf"
    write_released(path)
    assert path.stat().st_blocks * 512 < 1 << 20  # holes
    found = describe(path)
    path.unlink()
    return found


def parameters(d: Description, kind: Kind) -> int:
    return sum(g.parameters for g in d.groups if g.kind is kind)


def test_published_numbers(released: Description) -> None:
    assert released.parameters == 125_743_653_760 + 51_200_245_760
    assert released.active_parameters == 6_671_295_360
    assert parameters(released, Kind.NGRAM_TABLE) == 51_200_245_760
    assert parameters(released, Kind.EXPERTS) == 120_795_955_200
    assert parameters(released, Kind.SHARED_EXPERT) == 236_052_480
    assert parameters(released, Kind.ROUTER) == 62_914_560
    assert parameters(released, Kind.EMBEDDING) == 635_699_200
    assert parameters(released, Kind.OUTPUT) == 635_699_200
    assert parameters(released, Kind.OTHER) == 0
    assert (released.experts, released.experts_used) == (512, 10)
    scales = 48 * 3 * 512 * 4
    assert released.expert_bytes == 48 * 1_415_577_600 + scales
    assert released.table_bytes == 51_200_245_760 + 4
    assert released.weight_bytes == released.tensor_bytes - released.table_bytes
    embedding = 635_699_200 * 2
    assert released.dense_bytes == released.weight_bytes - released.expert_bytes - embedding
    wide = sum(g.parameters for g in released.groups if g.type == "F32")  # published for BF16
    assert released.dense_bytes == 2 * (4_947_698_560 - 635_699_200 + wide)
    assert released.support.ok, released.support.reason


def test_published_costs_of_a_sequence(released: Description) -> None:
    cost = released.sequence
    assert cost is not None and not cost.estimated
    assert cost.kv_bytes_per_token == 2 * (24_576 + 768)  # published for 16 bits, imp keeps 32
    state = 113_246_208 + 2 * 2_211_840 + 2 * 184_320
    unfinished_block = 12 * 4 * 128 * 4
    assert state <= cost.state_bytes <= state + unfinished_block
    assert cost.bytes(1000) == 1000 * cost.kv_bytes_per_token + cost.state_bytes


def test_an_mtp_layer_is_not_active(tmp_path: Path, released: Description) -> None:
    write_released(tmp_path / "f.gguf", mtp=True)
    with_mtp = describe(tmp_path / "f.gguf")
    assert parameters(with_mtp, Kind.MTP) == 2_607_150_848
    assert with_mtp.active_parameters == released.active_parameters
    assert with_mtp.dense_bytes == released.dense_bytes


def write_other(path: Path, **keys: int) -> None:
    """A dense model of another architecture, with tied embeddings."""
    defaults = {
        "block_count": 2,
        "context_length": 2048,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    with Writer(path, "other") as w:
        for key, value in {**defaults, **keys}.items():
            w.add_uint32(f"other.{key}", value)
        w.add_name("An other one")
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_chat_template("{{ messages }}")
        w.add_token_list([b"a", b"b", b"\x1b[31m"])
        w.add_tensor("token_embd.weight", np.zeros((3, 64), np.float32))
        w.add_tensor("output_norm.weight", np.zeros(64, np.float32))
        for layer in range(2):
            w.add_tensor(f"blk.{layer}.attn_q.weight", np.zeros((64, 64), np.float16))
            w.add_tensor(f"blk.{layer}.ffn_up.weight", np.zeros((8, 64), np.float16))
            w.add_tensor(
                f"blk.{layer}.ffn_down_exps.weight",
                np.zeros((4, 64, 144), np.uint8),
                raw_dtype=QUANT.Q4_K,
            )
        w.add_uint32("other.expert_count", 4)
        w.add_uint32("other.expert_used_count", 1)


def test_an_architecture_that_imp_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    write_other(path)
    d = describe(path)
    assert not d.support.ok
    assert d.support.reason == "architecture 'other' is not one imp runs"
    assert (d.name, d.context_length, d.vocab_size) == ("An other one", 2048, 3)
    assert (d.bos_token_id, d.eos_token_id, d.chat_template) == (1, 2, True)
    experts, rest = 2 * 4 * 64 * 256, 3 * 64 + 64 + 2 * (64 * 64 + 8 * 64)
    assert d.parameters == experts + rest
    assert d.active_parameters == experts // 4 + rest  # the embedding is the output, too
    assert d.expert_bytes == 2 * 4 * 64 * 144
    assert d.dense_bytes == d.weight_bytes - d.expert_bytes
    assert d.sequence is not None and d.sequence.estimated
    assert d.sequence.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2  # layers, heads, K and V, bytes
    assert d.sequence.state_bytes == 0
    assert {g.kind for g in d.groups} == {
        Kind.EMBEDDING,
        Kind.NORM,
        Kind.ATTENTION,
        Kind.FFN,
        Kind.EXPERTS,
    }


def test_estimates_of_hybrids() -> None:
    keys: dict[str, Any] = {
        "x.block_count": 4,
        "x.embedding_length": 64,
        "x.attention.head_count": 4,
        "x.attention.head_count_kv": np.array([0, 2, 0, 2]),
        "x.attention.key_length": 8,
        "x.attention.value_length": 4,
        "x.ssm.inner_size": 32,
        "x.ssm.state_size": 16,
        "x.ssm.conv_kernel": 4,
        "x.ssm.group_count": 2,
    }
    state = 4 * (32 * 16 + 3 * (32 + 2 * 2 * 16))
    cost = sequence_cost(keys, "x")
    assert cost is not None
    assert cost.kv_bytes_per_token == (2 + 2) * (8 + 4) * 2
    assert cost.state_bytes == 2 * state
    keys |= {"x.full_attention_interval": 4, "x.attention.head_count_kv": 2}
    cost = sequence_cost(keys, "x")
    assert cost is not None
    assert cost.kv_bytes_per_token == 2 * (8 + 4) * 2
    assert cost.state_bytes == 3 * state
    keys["x.attention.recurrent_layers"] = np.array([True, False, False, True])
    cost = sequence_cost(keys, "x")
    assert cost is not None and cost.state_bytes == 2 * state
    keys["x.block_count"] = MAX_LAYERS
    assert sequence_cost(keys, "x") is not None
    keys["x.block_count"] = MAX_LAYERS + 1
    assert sequence_cost(keys, "x") is None


def test_keys_of_odd_types_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    with Writer(path, "other") as w:
        for key in ("block_count", "context_length", "attention.head_count", "expert_count"):
            w.add_string(f"other.{key}", "many")
        w.add_string("tokenizer.ggml.bos_token_id", "first")
        w.add_array("tokenizer.ggml.tokens", [1, 2])
        w.add_uint32("general.name", 7)
        w.add_bool("tokenizer.chat_template", True)
    d = describe(path)
    assert (d.name, d.experts, d.context_length, d.vocab_size) == ("", 0, None, None)
    assert (d.bos_token_id, d.chat_template, d.sequence) == (None, False, None)
    assert (d.parameters, d.bits_per_weight, d.groups) == (0, 0.0, ())
    assert main(["info", str(path), "--keys", "--tensors", "--json"]) == 0
    assert main(["info", str(path), "--keys", "--tensors"]) == 0


def test_missing_tensors_are_the_reason(tmp_path: Path) -> None:
    small(tmp_path / "f.gguf", "qwen4exp")
    support = describe(tmp_path / "f.gguf").support
    assert not support.ok
    assert "qwen4exp." in support.reason
    assert str(tmp_path) not in support.reason


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["info", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.gguf"
    write_other(path)
    out = run(capsys, str(path))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "architecture other" in lines
    assert "parameters 141 k, 42.2 k active per token" in lines
    assert "experts 4, 1 per token" in lines
    assert "bos, eos 1, 2" in lines
    assert "chat template yes" in lines
    assert "experts Q4_K 2 131,072 73,728" in lines
    assert "total 8 140,544 93,184" in lines
    assert "cache 256 B per token, estimated for 16-bit keys and values" in lines
    assert "sequence 524 kB of 2048 tokens" in lines
    assert "imp does not run it: architecture 'other' is not one imp runs" in lines
    assert "tokenizer.ggml.tokens string[] [a, b, \\x1b[31m] (3)" in lines
    assert "\x1b" not in out
    assert "blk.1.attn_q.weight" not in out
    listed = run(capsys, str(path), "--tensors")
    line = next(line for line in listed.splitlines() if line.startswith("blk.1.attn_q.weight"))
    assert line.split()[1:7] == ["attention", "F16", "64", "x", "64", "8192"]


def test_long_values_are_cut_unless_all_keys_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Writer(tmp_path / "f.gguf") as w:
        w.add_array("numbers", list(range(1000)))
        w.add_string("text", "x" * 500)
    out = run(capsys, str(tmp_path / "f.gguf"))
    assert "(1000)" in out and "998" not in out
    assert "x" * 101 not in out and "(500 characters)" in out
    out = run(capsys, str(tmp_path / "f.gguf"), "--keys")
    assert "998, 999]" in out and "x" * 500 in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.gguf"
    write_other(path)
    found = json.loads(run(capsys, str(path), "--json"))
    assert found["parameters"] == 140544
    assert found["needs"]["sequence"]["kv_bytes_per_token"] == 256
    assert found["supported"] is False and "'other'" in found["reason"]
    assert found["keys"]["other.block_count"] == 2
    assert found["keys"]["tokenizer.ggml.tokens"] == ["a", "b", "\x1b[31m"]
    assert "tensors" not in found and "machine" not in found
    found = json.loads(run(capsys, str(path), "--json", "--tensors", "--device"))
    assert found["tensors"][0]["name"] == "token_embd.weight"
    assert found["machine"]["processors"] >= 1 and found["machine"]["cublas_lt"]

    with Writer(path) as w:
        w.add_array("list", list(range(17)))
        w.add_array("short", list(range(16)))
        w.add_float32("inf", float("inf"))
        w.add_array("nested", [[1.5, float("nan")], [2.0]])
    found = json.loads(run(capsys, str(path), "--json"))["keys"]
    assert found["list"] == {"type": "i32[]", "length": 17}
    assert found["short"] == list(range(16))
    assert found["inf"] == "inf"
    assert found["nested"] == [[1.5, "nan"], [2.0]]
    assert json.loads(run(capsys, str(path), "--json", "--keys"))["keys"]["list"][16] == 16


def test_split_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(tmp_path / "m", split_max_tensors=1) as w:
        w.add_tensor("a", np.zeros(8, np.float32))
        w.add_tensor("b", np.zeros(8, np.float32))
    second = tmp_path / "m-00002-of-00002.gguf"
    d = describe(second)
    assert [file.name for file in d.files] == ["m-00001-of-00002.gguf", second.name]
    assert d.file_bytes == sum(file.stat().st_size for file in d.files)
    out = run(capsys, str(second), "--tensors")
    assert "m-00001-of-00002.gguf" in out
    assert next(line for line in out.splitlines() if line.startswith("b ")).split()[5] == "2"


def test_device(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--device")
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["processor", "memory", "CUDA", "CUDA", "cuBLASLt"]
    assert "available of" in out


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.gguf").write_bytes(b"something else")
    for words, sentence in (
        ([str(tmp_path / "absent.gguf")], "No such file"),
        ([str(tmp_path / "f.gguf")], "not a GGUF file"),
        ([str(tmp_path)], "not a regular file"),
        ([], "a GGUF file or --device is needed"),
    ):
        assert main(["info", *words]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
        assert sentence in captured.err
    with pytest.raises(ImpError):
        describe(tmp_path / "f.gguf")
