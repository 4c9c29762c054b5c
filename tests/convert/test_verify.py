"""The verification finds what it is there for: every kind of damage to a written file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from imp_runtime import _core
from imp_runtime.convert import ConvertError, ConvertOptions, convert, plan
from imp_runtime.convert.plan import ConvertPlan
from imp_runtime.convert.progress import Silent
from imp_runtime.convert.verify import verify
from imp_runtime.convert.verify_compare import allowed, difference
from imp_runtime.convert.verify_places import Place, weight_modules
from tests.convert.builder import build


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ConvertPlan, Path]]:
    """A converted checkpoint of many schemes and its plan."""
    folder = tmp_path_factory.mktemp("verify")
    src = build(experts="nvfp4", mtp="block", table="fp8").write(folder / "src")
    out = folder / "out.gguf"
    convert(src, out, ConvertOptions(verify=False))
    with plan(src) as planned:
        yield planned, out


def damage(path: Path, target: Path, tensor: str, byte: int, mask: int) -> Path:
    """A copy of the file with some bits of one byte of a tensor flipped."""
    file = _core.Gguf.open(path)
    info = next(t for t in file.tensors() if t.name == tensor)
    data = bytearray(path.read_bytes())
    data[info.offset + byte] ^= mask
    target.write_bytes(data)
    return target


def test_an_intact_file_passes(written: tuple[ConvertPlan, Path]) -> None:
    planned, out = written
    total = sum(int(np.prod(o.dims)) for o in planned.outputs if o.role != "scale")
    assert verify(planned, out, Silent()) == total


@pytest.mark.parametrize(
    ("tensor", "byte", "mask"),
    [
        ("blk.2.ffn_up_exps.weight", 36 * 100 + 5, 0x20),  # an E2M1 code
        ("blk.2.ffn_up_exps.weight", 36 * 100 + 1, 0x01),  # a block scale
        ("blk.2.ffn_up_exps.scale", 4 * 7, 0x01),  # an expert's factor
        ("blk.2.ffn_up_exps.input_scale", 4 * 7, 0x01),
        ("blk.0.attn_qkv.weight", 2 * 12345, 0x01),  # BF16, its last bit
        ("blk.3.attn_q_norm.weight", 8, 0x01),  # F32
        ("blk.0.ssm_a", 3, 0x80),  # a sign
        ("blk.4.ffn_down_exps.weight", 2 * 777 + 1, 0x80),  # FP8 rounded to BF16
        ("blk.4.nextn.eh_proj.weight", 2 * 200, 0x01),
        ("per_layer_token_embd.weight_e4m3", 500, 0x01),
        ("per_layer_token_embd.scale", 2, 0x01),
    ],
)
def test_one_flipped_bit_is_found(
    written: tuple[ConvertPlan, Path], tmp_path: Path, tensor: str, byte: int, mask: int
) -> None:
    planned, out = written
    broken = damage(out, tmp_path / "broken.gguf", tensor, byte, mask)
    with pytest.raises(ConvertError) as caught:
        verify(planned, broken, Silent())
    assert tensor.rsplit(".", 1)[0] in str(caught.value)
    assert len(caught.value.problems) == 1


def test_wrong_hash_constant_is_found(written: tuple[ConvertPlan, Path], tmp_path: Path) -> None:
    planned, out = written
    data = out.read_bytes()
    multiplier = planned.constants[0].multipliers[1]
    wrong = data.replace(multiplier.to_bytes(8, "little"), (multiplier + 2).to_bytes(8, "little"))
    assert wrong != data
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(wrong)
    with pytest.raises(ConvertError, match=r"ple\.layer_multipliers is \[.*, the checkpoint has"):
        verify(planned, broken, Silent())


def test_swapped_experts_are_found(written: tuple[ConvertPlan, Path], tmp_path: Path) -> None:
    planned, out = written
    info = next(t for t in _core.Gguf.open(out).tensors() if t.name == "blk.1.ffn_gate_exps.weight")
    data = bytearray(out.read_bytes())
    each = info.n_bytes // 12
    a, b = (slice(info.offset + e * each, info.offset + (e + 1) * each) for e in (4, 9))
    data[a], data[b] = data[b], data[a]
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(ConvertError, match=r"blk\.1\.ffn_gate_exps\.weight row 256 column"):
        verify(planned, broken, Silent())


def test_file_of_another_plan_is_refused(written: tuple[ConvertPlan, Path]) -> None:
    planned, out = written
    with plan(planned.source, ConvertOptions(dense="f16")) as other:
        with pytest.raises(ConvertError, match="differs from its plan: "):
            verify(other, out, Silent())


def test_a_module_that_is_not_compared_is_noticed(
    written: tuple[ConvertPlan, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, out = written
    skipped = "layers.2.mlp.experts.5.up_proj"
    monkeypatch.setattr(
        "imp_runtime.convert.verify.weight_modules",
        lambda p: [m for m in weight_modules(p) if m[0] != skipped],
    )
    with pytest.raises(ConvertError) as caught:
        verify(planned, out, Silent())
    wanted = f"blk.2.ffn_up_exps.weight: {11 * 64 * 128} of {12 * 64 * 128} values compared"
    assert wanted in str(caught.value)


def test_failed_verification_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = build(mtp="").write(tmp_path / "src")
    from imp_runtime.convert import views

    right = views.tiled_heads
    monkeypatch.setattr("imp_runtime.convert.mapping.tiled_heads", lambda k, v: right(v // k, v))
    with pytest.raises(ConvertError) as caught:
        convert(src, tmp_path / "out.gguf")
    for name in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_conv1d", "ssm_a", "ssm_out"):
        assert f"blk.0.{name}" in str(caught.value)
    assert list(tmp_path.iterdir()) == [src]


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [("F16", np.float16, 1.0 + 2.0**-11), ("F16", np.float16, 3e-8), ("BF16", None, 1 + 2.0**-8)],
)
def test_rounding_is_allowed_and_no_more(
    kind: str, dtype: type[np.float16] | None, value: float
) -> None:
    wanted = np.array([[value]], np.float32)
    got = wanted.astype(dtype).astype(np.float32) if dtype else np.array([[1.0]], np.float32)
    place = Place(0, 1, "t", 0)
    assert difference(place, kind, wanted, got, exact=False) is None
    off = got + 2 * allowed(kind, wanted)
    assert difference(place, kind, wanted, off, exact=False) is not None
    assert difference(place, kind, wanted, got * np.float32(np.nan), exact=False) is not None
    assert (difference(place, kind, wanted, got, exact=True) is None) == bool((got == wanted).all())
