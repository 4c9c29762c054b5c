"""The reader against files that the gguf package wrote, and against that package's own reader."""

import gc
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from imp_runtime import ImpError
from imp_runtime.gguf import Gguf
from tests.gguf.gguf_files import QUANT, Writer, every_type, header, small, string


def test_every_value_type(tmp_path: Path) -> None:
    expected = every_type(tmp_path / "f.gguf")
    file = Gguf.open(tmp_path / "f.gguf")
    keys, types = file.keys(), file.key_types()
    assert keys.pop("general.architecture") == "test"
    assert set(keys) == set(expected)
    for key, (kind, value) in expected.items():
        assert types[key] == kind
        found = keys[key]
        if isinstance(value, np.ndarray):
            assert isinstance(found, np.ndarray)
            assert found.dtype == value.dtype
            assert not found.flags.writeable
            np.testing.assert_array_equal(found, value)
        elif key == "v.nested":
            assert [row.tolist() for row in found] == value
        else:
            assert type(found) is type(value)
            assert found == value


def test_tensors_agree_with_the_gguf_package(tmp_path: Path) -> None:
    small(tmp_path / "f.gguf")
    file = Gguf.open(tmp_path / "f.gguf")
    other = gguf.GGUFReader(tmp_path / "f.gguf")
    assert len(file.tensors()) == len(other.tensors) == 5
    for info, expected in zip(file.tensors(), other.tensors, strict=True):
        assert info.name == expected.name
        assert info.type == expected.tensor_type.name
        assert info.dims == expected.shape.tolist()
        assert info.n_elems == expected.n_elements
        assert info.offset == expected.data_offset
        assert info.n_bytes == expected.n_bytes
        assert info.shard == 0
        data = file.data(info.name)
        assert data.dtype == np.uint8 and not data.flags.writeable
        assert data.tobytes() == expected.data.tobytes()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "NVFP4"])
def test_decode_agrees_with_the_gguf_package(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(2).standard_normal((2, 3, 128)).astype(np.float32)
    if name == "NVFP4":
        block_bytes = gguf.GGML_QUANT_SIZES[QUANT.NVFP4][1]
        data = np.random.default_rng(3).integers(0, 120, (2, 3, 2 * block_bytes), np.uint8)
    else:
        data = gguf.quants.quantize(values, QUANT[name])
    with Writer(tmp_path / "f.gguf") as w:
        w.add_tensor("t", data, raw_dtype=QUANT[name])
    expected = gguf.quants.dequantize(data, QUANT[name]).reshape(6, 128)
    file = Gguf.open(tmp_path / "f.gguf")
    found = file.decode("t", 0, 6)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(file.decode("t", 4, 2), expected[4:6])
    assert file.decode("t", 6, 0).shape == (0, 128)


def test_bytes_decode_as_fp8(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    name = "per_layer_token_embd.weight_e4m3"
    with Writer(tmp_path / "f.gguf") as w:
        w.add_tensor(name, codes.view(np.int8))
        w.add_tensor("per_layer_token_embd.scale", np.array([0.5], np.float32))
    file = Gguf.open(tmp_path / "f.gguf")
    assert file.tensors()[0].type == "I8"
    found = file.decode(name, 0, 4, as_type="F8_E4M3")
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert gguf.GGUFReader(tmp_path / "f.gguf").tensors[0].name == name  # others can read it
    for as_type, sentence in (
        (None, "is I8, which imp does not decode"),
        ("F32", "has 64 bytes, as F32 it would have 256"),
        ("X", "there is no type 'X'"),
    ):
        with pytest.raises(ImpError, match=sentence):
            file.decode(name, 0, 1, as_type=as_type)


def test_views_keep_the_file_open(tmp_path: Path) -> None:
    small(tmp_path / "f.gguf")
    file = Gguf.open(tmp_path / "f.gguf")
    data, values = file.data("norm.weight"), file.keys()["list"]
    del file
    gc.collect()
    (tmp_path / "f.gguf").unlink()
    np.testing.assert_array_equal(data.view(np.float32), np.ones(5))
    assert values.tolist() == [1, 2, 3]


def test_split_files(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full((2, 8), i, np.float32) for i in range(5)}
    with Writer(tmp_path / "m", split_max_tensors=2, small_first_shard=True) as w:
        w.add_string("general.name", "split")
        for name, values in tensors.items():
            w.add_tensor(name, values)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"m-{i:05d}-of-00004.gguf" for i in range(1, 5)]
    for name in names:
        file = Gguf.open(tmp_path / name)
        assert [p.name for p in file.files] == names
        assert file.keys()["general.name"] == "split"
        assert [t.name for t in file.tensors()] == list(tensors)
        assert [t.shard for t in file.tensors()] == [1, 1, 2, 2, 3]
        for tensor, values in tensors.items():
            np.testing.assert_array_equal(file.decode(tensor, 0, 2), values)
    (tmp_path / names[2]).unlink()
    with pytest.raises(ImpError, match="file 3 of 4 is missing") as caught:
        Gguf.open(tmp_path / names[0])
    assert caught.value.code == "io"


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(header(0, 1) + string(b"k\xff") + struct.pack("<I", 8) + string(b"\xfe"))
    assert Gguf.open(path).keys() == {"k\udcff": "\udcfe"}


def test_errors_say_what_and_where(tmp_path: Path) -> None:
    with pytest.raises(ImpError, match=r"absent\.gguf: No such file") as caught:
        Gguf.open(tmp_path / "absent.gguf")
    assert caught.value.code == "io"
    assert "mapped_file.cpp:" in caught.value.where

    path = tmp_path / "f.gguf"
    path.write_bytes(header(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**40))
    with pytest.raises(ImpError, match=r"'k' needs 1099511627776 x 4 bytes.* 0 left") as caught:
        Gguf.open(path)
    assert caught.value.code == "bad_file"

    path.write_bytes(header(0, 0, version=4))
    with pytest.raises(ImpError, match="GGUF version 4, imp reads 2 to 3") as caught:
        Gguf.open(str(path))
    assert caught.value.code == "unsupported"

    small(path)
    file = Gguf.open(path)
    with pytest.raises(ImpError, match="there is no tensor 'x'") as caught:
        file.data("x")
    assert caught.value.code == "invalid_argument"
    for row0, n_rows in ((-1, 1), (0, 2), (2, 0), (0, -1), (1, 2**63 - 1)):
        with pytest.raises(ImpError, match=r"of tensor 'norm\.weight', which has 1"):
            file.decode("norm.weight", row0, n_rows)
    with pytest.raises(ImpError, match="is Q4_K, which imp does not decode"):
        file.decode("blk.0.Q4_K.weight", 0, 1)
