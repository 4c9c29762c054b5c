"""The default type of the n-gram table is the one it is stored in."""

from pathlib import Path

import pytest

from imp_runtime import _core
from imp_runtime.convert import ConvertOptions, convert
from tests.models import tiny


@pytest.mark.parametrize(
    ("recipe", "name", "kind"),
    [
        ("options", "per_layer_token_embd.weight", "F32"),
        ("base", "per_layer_token_embd.weight", "BF16"),
        ("experts512", "per_layer_token_embd.weight_e4m3", "I8"),
    ],
)
def test_table_keeps_its_type(recipe: str, name: str, kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out.gguf"
    tiny.write(folder, recipe)
    convert(folder, out, ConvertOptions(verify=False))
    types = {t.name: t.type for t in _core.Gguf.open(out).tensors()}
    assert types[name] == kind
