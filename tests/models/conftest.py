"""Fixtures shared by the model tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imp_runtime.convert import ConvertOptions, convert
from imp_runtime.model import Model
from tests.models import tiny

PROSE = Path(__file__).parents[2] / "models" / "prose-nvfp4"

# Nothing may be rounded: what the checkpoint holds in F32 stays F32.
OPTIONS: dict[str, dict[str, Any]] = {
    "base": {"dense": "bf16", "mtp": "require"},
    "experts512": {"dense": "bf16", "ngram": "fp8", "mtp": "require"},
    "options": {"dense": "f32", "ngram": "f32"},
    "dense_attention": {"dense": "bf16"},
    "prose": {"dense": "bf16", "ngram": "fp8", "mtp": "require"},
    # The stored log-probs are of a table rounded to BF16.
    "prose_bf16_table": {"dense": "bf16", "ngram": "bf16", "mtp": "require"},
}


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Recipe name -> folder of its checkpoint, written once; "prose*" is the shipped model."""
    made: dict[str, Path] = {"prose": PROSE, "prose_bf16_table": PROSE}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def gguf_file(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_folder: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Recipe name -> its GGUF, converted once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            convert(checkpoint_folder(name), made[name], ConvertOptions(**OPTIONS[name]))
        return made[name]

    return get


@pytest.fixture(scope="session")
def model(gguf_file: Callable[[str], Path]) -> Callable[[str], Model]:
    """Recipe name -> the loaded model."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            made[name] = Model.load(gguf_file(name))
        return made[name]

    return get
