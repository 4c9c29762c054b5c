"""Models of random weights, made in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from imp_runtime import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Session

SMALL = "flash-next:layers=4,experts=12,vocab=300,table=1600"


def logits(spec: str, table_file: Path | None = None) -> np.ndarray:
    """float32 [9, 300] of 9 tokens"""
    made = Model.synthetic(spec, device="cpu", table_file=table_file)
    with made as model, Session(model, n_ctx=64) as session:
        return session.open().extend(np.arange(9, dtype=np.int32), outputs="all").copy()


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = logits(SMALL), logits(SMALL), logits(SMALL + ",seed=2")
    assert np.isfinite(first).all() and 0.1 < first.std() < 10
    assert first.tobytes() == again.tobytes() and not np.array_equal(first, other)


def test_dense_weights_of_8_bits() -> None:
    bf16, q8_0 = logits(SMALL + ",dense=bf16"), logits(SMALL + ",dense=q8_0")
    assert bf16.tobytes() == logits(SMALL).tobytes() and not np.array_equal(bf16, q8_0)
    assert np.isfinite(q8_0).all() and 0.1 < q8_0.std() < 10


def test_the_table_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "table"
    want = logits(SMALL)
    for _ in range(2):  # written, then read
        assert logits(SMALL, file).tobytes() == want.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["table"]
    assert file.stat().st_size == 1600 * 160
    model = Model.synthetic(SMALL, device="cpu", table_file=file)
    assert model.notes == ["weights: synthetic", f"n-gram table: 256000 bytes of {file}"]


def test_table_files_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "table"
    logits(SMALL, file)
    for spec, path, message in (
        (SMALL + ",seed=2", file, "table holds the n-gram table of another model"),
        (SMALL.replace("1600", "1616"), file, "has 256000 bytes, the n-gram table 258560"),
        (SMALL, tmp_path / "none" / "table", "cannot write .*: No such file"),
        ("flash-next:layers=1,experts=12,vocab=300", file, "has no n-gram table for "),
    ):
        with pytest.raises(ImpError, match=message):
            Model.synthetic(spec, device="cpu", table_file=path)


def test_it_says_what_it_is() -> None:
    model = Model.synthetic(SMALL, device="cpu")
    assert model.notes == ["weights: synthetic"] and model.path == f"synthetic {SMALL}"
    assert (model.layers, model.vocab_size, model.table_bytes) == (4, 300, 1600 * 160)
    two_layers = Model.synthetic("flash-next:layers=2,experts=12,vocab=300,table=64", device="cpu")
    assert two_layers.notes == ["weights: synthetic"]  # no word of the attention it has not
    model.core.prefetch(0, model.resident_bytes)  # nothing to read


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flash", "'flash': the shapes are: flash-next"),
        ("flash-next:heads=2", "'heads=2' is not one of layers="),
        ("flash-next:layers", "'layers' is not one of"),
        ("flash-next:layers=0", "layers is '0', a number from 1 to 1024 is needed"),
        ("flash-next:layers=1025", "layers is '1025', a number from 1 to 1024"),
        ("flash-next:layers=4x", "layers is '4x'"),
        ("flash-next:layers=2,experts=", "experts is ''"),
        ("flash-next:dense=q4_0", "dense is 'q4_0', bf16 or q8_0 is needed"),
        ("flash-next:dense", "'dense' is not one of"),
        ("flash-next:table=320001537", "from 16 to 320001536"),
    ],
)
def test_specs_that_cannot_be_read(spec: str, message: str) -> None:
    with pytest.raises(ImpError, match=message):
        Model.synthetic(spec, device="cpu")


def test_too_large_for_this_machine() -> None:
    with pytest.raises(ImpError, match=r"needs \d+ bytes, \d+ are available"):
        Model.synthetic("flash-next:layers=1024,experts=65536", device="cpu")
