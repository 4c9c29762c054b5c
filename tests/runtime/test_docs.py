"""The examples of the documentation run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range(4))
def test_batching(
    number: int, repository: Path, prose_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (repository / "docs" / "batching.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 4
    shutil.copy(prose_gguf, tmp_path / "prose.gguf")
    monkeypatch.chdir(tmp_path)
    exec(compile(examples[number], f"example {number}", "exec"), {"__name__": "example"})
