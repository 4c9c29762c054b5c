"""Broken checkpoints: one error that names everything, and nothing written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.convert import ConvertError, ConvertOptions, convert, plan
from imp_runtime.convert import checkpoint as checkpoint_module
from imp_runtime.convert.errors import MAX_LISTED
from tests.convert.builder import Built, Raw, build, raw

P = "model.language_model."
Edit = Callable[[Built], None]


def refused(src: Path, options: ConvertOptions | None = None) -> ConvertError:
    """The error of a conversion, after checking that it left nothing behind."""
    before = sorted(src.parent.iterdir())
    with pytest.raises(ConvertError) as caught:
        convert(src, src.parent / "out.gguf", options)
    assert sorted(src.parent.iterdir()) == before
    return caught.value


def replace(name: str, **changes: object) -> Edit:
    def edit(b: Built) -> None:
        b.tensors[name] = Raw(**{**b.tensors[name].__dict__, **changes})  # type: ignore[arg-type]

    return edit


def bfloat(name: str, *shape: int, value: float = 1) -> Edit:
    def edit(b: Built) -> None:
        b.tensors[name] = raw(np.full(shape, value), "BF16")[0]

    return edit


def drop(*names: str) -> Edit:
    def edit(b: Built) -> None:
        for name in names:
            del b.tensors[name]

    return edit


def poke(name: str, index: int, value: int) -> Edit:
    """Changes one byte of a tensor."""

    def edit(b: Built) -> None:
        data = bytearray(b.tensors[name].data)
        data[index] = value
        b.tensors[name] = Raw(b.tensors[name].dtype, b.tensors[name].shape, bytes(data))

    return edit


E = f"{P}layers.2.mlp.experts."
T = f"{P}layers.1.ple.ple_embedding."
NAN = np.float32(np.nan).tobytes()

ONE_PROBLEM: dict[str, tuple[Edit, str]] = {
    "missing": (
        drop(f"{P}layers.0.linear_attn.in_proj_z.weight"),
        "layers.0.linear_attn.in_proj_z.weight is missing",
    ),
    "unknown": (
        bfloat(f"{P}layers.0.linear_attn.surprise.weight", 4),
        f"{P}layers.0.linear_attn.surprise.weight [4] is not a tensor of this model",
    ),
    "misshapen": (
        bfloat(f"{P}layers.3.self_attn.q_norm.weight", 33),
        f"{P}layers.3.self_attn.q_norm.weight is BF16 [33], [32] is needed",
    ),
    "transposed": (
        bfloat(f"{P}layers.0.mlp.gate.weight", 128, 12),
        f"{P}layers.0.mlp.gate.weight is BF16 [128, 12], [12, 128] is needed",
    ),
    "missing expert": (
        drop(
            *(
                f"{E}7.up_proj.{k}"
                for k in ("weight", "weight_scale", "weight_scale_2", "input_scale")
            )
        ),
        "layers.2.mlp.experts: 1 of 12 experts lack up_proj: 7",
    ),
    "expert out of range": (
        bfloat(f"{E}12.up_proj.weight", 64, 128),
        f"{E}12.up_proj.weight [64, 128] is not a tensor of this model",
    ),
    "scale missing": (
        drop(f"{E}3.gate_proj.weight_scale"),
        "layers.2.mlp.experts.3.gate_proj.weight_scale is missing beside the NVFP4 codes",
    ),
    "factor missing": (
        drop(f"{E}3.gate_proj.weight_scale_2"),
        "layers.2.mlp.experts.3.gate_proj.weight_scale_2 is missing",
    ),
    "scale of the wrong shape": (
        replace(f"{E}3.gate_proj.weight_scale", shape=(8, 64)),
        f"{E}3.gate_proj.weight_scale is F8_E4M3 [8, 64], [64, 8] F8_E4M3 is needed",
    ),
    "factor of the wrong shape": (
        replace(f"{E}3.gate_proj.weight_scale_2", shape=(2,), data=bytes(8)),
        f"{E}3.gate_proj.weight_scale_2 has shape [2], one number is needed",
    ),
    "NaN factor": (
        replace(f"{E}3.gate_proj.weight_scale_2", data=NAN),
        f"{E}3.gate_proj.weight_scale_2 holds 1 bad scales of 1, the first is not finite",
    ),
    "negative factor": (
        replace(f"{E}3.gate_proj.weight_scale_2", data=np.float32(-1).tobytes()),
        f"{E}3.gate_proj.weight_scale_2 holds 1 bad scales of 1, the first is -1.0",
    ),
    "NaN block scale": (
        poke(f"{E}3.down_proj.weight_scale", 11, 0x7F),
        f"{E}3.down_proj.weight_scale holds 1 NaN or negative scales of 512",
    ),
    "negative block scale": (
        poke(f"{E}3.down_proj.weight_scale", 11, 0x81),
        f"{E}3.down_proj.weight_scale holds 1 NaN or negative scales of 512",
    ),
    "NaN FP8 scale": (
        replace("mtp.layers.0.mlp.experts.5.up_proj.weight_scale_inv", data=b"\xc0\x7f"),
        "mtp.layers.0.mlp.experts.5.up_proj.weight_scale_inv holds 1 bad scales of 1",
    ),
    "FP8 scale that overflows": (
        replace("mtp.layers.0.mlp.experts.5.up_proj.weight_scale_inv", data=b"\x7f\x7f"),
        "blk.4.ffn_up_exps.weight would hold NaN or infinity: its source does",
    ),
    "FP8 without scale": (
        drop("mtp.layers.0.mlp.experts.5.up_proj.weight_scale_inv"),
        "mtp.layers.0.mlp.experts.5.up_proj.weight is FP8 and has no weight_scale",
    ),
    "table scale missing": (
        drop(f"{T}ngram_embedding.weight_scale"),
        "layers.1.ple.ple_embedding.ngram_embedding.weight_scale is missing",
    ),
    "table shard missing": (
        drop(f"{T}ngram_embedding.shard_5.weight"),
        "layers.1.ple.ple_embedding.ngram_embedding.shard_5.weight is missing",
    ),
    "last table shard missing": (
        drop(f"{T}ngram_embedding.shard_15.weight"),
        "ngram_embedding has 840 rows in 15 parts, its heads need 896",
    ),
    "hash constant": (
        poke(f"{T}ngram_heads_offsets", 8, 212),
        "layers.1.ple.ple_embedding.ngram_heads_offsets[1] is 212, config.json implies 211",
    ),
    "hash constants of another length": (
        replace(f"{T}layer_multipliers", shape=(2,), data=bytes(16)),
        f"{T}layer_multipliers is I64 [2], I64 [3] is needed",
    ),
    "unsupported dtype": (
        replace(f"{P}layers.0.linear_attn.A_log", dtype="I16"),
        f"{P}layers.0.linear_attn.A_log has dtype I16, which is not supported here",
    ),
    "NaN weight": (
        bfloat(f"{P}layers.0.linear_attn.in_proj_qkv.weight", 160, 128, value=np.nan),
        "blk.0.attn_qkv.weight would hold NaN or infinity: its source does",
    ),
    "NaN table row": (
        poke(f"{T}ngram_embedding.shard_3.weight", 5, 0xFF),
        "per_layer_token_embd.weight_e4m3 would hold NaN: its FP8 codes contain 0x7f or 0xff",
    ),
}


@pytest.fixture(scope="module")
def mixed() -> Built:
    return build(experts="nvfp4", mtp="block", table="fp8")


@pytest.fixture
def copy(mixed: Built) -> Built:
    return Built(dict(mixed.text), dict(mixed.tensors), {}, dict(mixed.root), mixed.prefix)


@pytest.mark.parametrize("case", ONE_PROBLEM)
def test_one_problem(case: str, copy: Built, tmp_path: Path) -> None:
    edit, sentence = ONE_PROBLEM[case]
    edit(copy)
    error = refused(copy.write(tmp_path / "src", 2))
    assert sentence in str(error)
    assert len(error.problems) <= 1, error.problems


def test_all_problems_are_listed_together(copy: Built, tmp_path: Path) -> None:
    wanted = []
    for case in ("missing", "unknown", "misshapen", "missing expert", "NaN factor",
                 "scale of the wrong shape", "hash constant"):  # fmt: skip
        edit, sentence = ONE_PROBLEM[case]
        edit(copy)
        wanted.append(sentence)
    error = refused(copy.write(tmp_path / "src", 3))
    for sentence in wanted:
        assert sentence in str(error)
    assert len(error.problems) == len(wanted)
    assert str(error).splitlines()[0].endswith(f": {len(wanted)} problems")


@pytest.mark.parametrize("extra", [0, 1])
def test_long_lists_are_cut(copy: Built, tmp_path: Path, extra: int) -> None:
    for i in range(MAX_LISTED + extra):
        bfloat(f"{P}layers.0.unknown_{i:03}.weight", 2)(copy)
    error = refused(copy.write(tmp_path / "src"))
    assert len(error.problems) == MAX_LISTED + extra
    assert ("and 1 more" in str(error)) == (extra == 1)
    assert len(str(error).splitlines()) == 1 + MAX_LISTED + extra


# --- files ---------------------------------------------------------------------------------------


def test_same_tensor_in_two_shards(copy: Built, tmp_path: Path) -> None:
    from tests.models.tiny_bytes import write_safetensors

    src = copy.write(tmp_path / "src")
    name = f"{P}embed_tokens.weight"
    other = name.replace("language_model.", "")
    write_safetensors(src / "other.safetensors", {other: copy.tensors[name]})
    error = refused(src)
    assert f"{other} is there twice: in model.safetensors as {name} and in other" in str(error)


def test_name_twice_in_a_header(copy: Built, tmp_path: Path) -> None:
    src = copy.write(tmp_path / "src")
    header = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'
    (src / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "x.safetensors: a is twice in the header" in str(refused(src))


@pytest.mark.parametrize("missing", [1, 5000])
def test_truncated_shard(copy: Built, tmp_path: Path, missing: int) -> None:
    src = copy.write(tmp_path / "src", 2)
    path = src / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.truncate(size - missing)
    error = refused(src)
    assert f"{path.name} is cut short: {size - missing} bytes" in str(error)
    assert str(size) in str(error)


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_shard_shorter_than_its_header(copy: Built, tmp_path: Path, size: int) -> None:
    src = copy.write(tmp_path / "src", 2)
    path = src / "model-00001-of-00002.safetensors"
    with path.open("r+b") as f:
        f.truncate(size)
    assert f"{path.name}: " in str(refused(src))


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"[]", "header is not a JSON object"),
        (b"{" * 100, "Expecting property name"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":1}', "a lacks dtype, shape or data_offsets"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}', "a has a bad shape"),
        (b'{"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,0]}}', "a has a bad shape"),
        (b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}', "unknown dtype X9"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}', "has 7 bytes, F32 [2] needs 8"),
        (
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
            b'"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
            "a and b overlap",
        ),
        (b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', "is cut short"),
        (b"{}", "has bytes that no tensor owns"),
    ],
)
def test_malformed_header(copy: Built, tmp_path: Path, header: bytes, sentence: str) -> None:
    src = copy.write(tmp_path / "src")
    (src / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"123")
    error = refused(src)
    assert "bad.safetensors" in str(error)
    assert sentence in str(error)


@pytest.mark.parametrize("extra", [0, 1])
def test_header_limit(
    copy: Built, tmp_path: Path, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = copy.write(tmp_path / "src")
    path = src / "model.safetensors"
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    monkeypatch.setattr(checkpoint_module, "MAX_HEADER_BYTES", length - extra)
    if extra:
        assert f"header of {length} bytes, the limit is {length - 1}" in str(refused(src))
    else:
        plan(src).close()


def index_of(src: Path) -> tuple[Path, dict[str, dict[str, str]]]:
    path = src / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


def test_index_names_a_missing_file(copy: Built, tmp_path: Path) -> None:
    src = copy.write(tmp_path / "src", 3)
    path, index = index_of(src)
    count = sum(v.startswith("model-00002") for v in index["weight_map"].values())
    (src / "model-00002-of-00003.safetensors").unlink()
    error = refused(src)
    assert f"places {count} tensors in model-00002-of-00003.safetensors" in str(error)


def test_index_and_files_disagree(copy: Built, tmp_path: Path) -> None:
    src = copy.write(tmp_path / "src", 2)
    path, index = index_of(src)
    name = f"{P}embed_tokens.weight"
    owner = index["weight_map"].pop(name)
    index["weight_map"]["ghost.weight"] = owner
    index["weight_map"]["evil.weight"] = "../evil.safetensors"
    path.write_text(json.dumps(index))
    error = refused(src)
    assert f"{owner} holds {name}, {path.name} places it in no file" in str(error)
    assert f"places ghost.weight in {owner}, which does not hold it" in str(error)
    assert "names a file outside the folder: ../evil.safetensors" in str(error)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_unreadable_index(copy: Built, tmp_path: Path, text: str) -> None:
    src = copy.write(tmp_path / "src", 2)
    (src / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json cannot be read" in str(refused(src))


def test_file_outside_the_index_is_ignored_with_a_line(copy: Built, tmp_path: Path) -> None:
    src = copy.write(tmp_path / "src", 2)
    (src / "consolidated.safetensors").write_bytes(b"not looked at")
    with plan(src) as planned:
        assert any("consolidated.safetensors" in n for n in planned.notes)


def test_no_weights_and_no_folder(copy: Built, tmp_path: Path) -> None:
    src = copy.write(tmp_path / "src")
    (src / "model.safetensors").unlink()
    assert "no *.safetensors file is there" in str(refused(src))
    with pytest.raises(ConvertError, match="is not a folder"):
        plan(tmp_path / "nowhere")


def test_source_shrinks_while_it_is_read(copy: Built, tmp_path: Path) -> None:
    src = copy.write(tmp_path / "src")

    class Shrink:
        def begin(self, stage: str, total_bytes: int) -> None:
            if stage == "writing":
                with (src / "model.safetensors").open("r+b") as f:
                    f.truncate(300_000)

        def advance(self, nbytes: int) -> None: ...
        def end(self) -> None: ...
        def note(self, line: str) -> None: ...

    with pytest.raises(ConvertError, match="ends inside .* bytes are missing"):
        convert(src, tmp_path / "out.gguf", progress=Shrink())
    assert not list(tmp_path.glob("out.gguf*"))
