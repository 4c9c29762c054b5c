"""Fixtures shared by all tests: the shipped model, converted once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that the tests run from."""
    return ROOT


@pytest.fixture(scope="session")
def prose_checkpoint() -> Path:
    """The shipped model in its released checkpoint layout."""
    return ROOT / "models" / "prose-nvfp4"


@pytest.fixture(scope="session")
def prose_gguf(prose_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as `imp convert` writes it with default options."""
    from imp_runtime.convert import ConvertOptions, convert

    out = tmp_path_factory.mktemp("prose") / "prose.gguf"
    convert(prose_checkpoint, out, ConvertOptions())
    return out
