"""A tiny model for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imp_runtime.convert import ConvertOptions, convert
from imp_runtime.model import Model
from tests.models import tiny


@pytest.fixture(scope="session")
def bench_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "tiny.gguf"
    convert(tiny.write(folder / "checkpoint", "base"), out, ConvertOptions(dense="bf16"))
    return out


@pytest.fixture(scope="session")
def bench_model(bench_gguf: Path) -> Iterator[Model]:
    with Model.load(bench_gguf) as model:
        yield model
