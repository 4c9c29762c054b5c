"""The examples of the documentation run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from imp_runtime.cli import perplexity

ROOT = Path(__file__).parents[2]
FILES = ("README.md", "docs/batching.md", "docs/measuring.md", "docs/quickstart.md")


def examples(file: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text("utf-8"), re.S)


def test_every_file_with_examples_is_here() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    names = [str(f.relative_to(ROOT)) for f in texts if "```python" in f.read_text("utf-8")]
    assert sorted(names) == sorted(FILES) and [len(examples(f)) for f in FILES] == [1, 5, 1, 1]


@pytest.mark.parametrize(
    ("file", "number"), [(f, i) for f in FILES for i in range(len(examples(f)))]
)
def test_example(
    file: str, number: int, prose_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prose.gguf", "OUT.gguf"):
        shutil.copy(prose_gguf, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    if file == "docs/measuring.md":  # it compares two dumps
        text = "a few words of a text, and then again " * 4
        for name, types in (("a.npz", ()), ("b.npz", ("-ctk", "q8_0"))):
            flags = ["-m", "prose.gguf", "-p", text, "-c", "16", "--dump", name, *types]
            assert perplexity.main(flags) == 0
    exec(compile(examples(file)[number], f"{file} {number}", "exec"), {"__name__": "example"})
