"""The models of tests/models, loaded for both devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imp_runtime import _core
from imp_runtime.model import Model
from tests.models.conftest import checkpoint_folder, gguf_file

__all__ = ["checkpoint_folder", "gguf_file"]  # fixtures


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skips where no CUDA device can be used, with the reason."""
    info = _core.system_info()
    if not info["cuda_usable"]:
        pytest.skip(f"no CUDA: {info['cuda_detail']}")


@pytest.fixture(scope="session")
def pair(cuda: None, gguf_file: Callable[[str], Path]) -> Callable[[str], tuple[Model, Model]]:
    """Recipe name -> the model for the CPU and for CUDA."""
    made: dict[str, tuple[Model, Model]] = {}

    def get(name: str) -> tuple[Model, Model]:
        if name not in made:
            path = gguf_file(name)
            made[name] = (Model.load(path, device="cpu"), Model.load(path, device="cuda"))
        return made[name]

    return get
