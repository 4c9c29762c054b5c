"""Fixtures shared by the model tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import tiny


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Recipe name -> folder of its checkpoint, written once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get
