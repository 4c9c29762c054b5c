"""The files: complete or absent, split, forced, planned; interruptions of every kind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from imp_runtime import _core
from imp_runtime.convert import (
    ConvertError,
    ConvertOptions,
    convert,
    output_path,
    parse_size,
    plan,
    schemes_seen,
)
from imp_runtime.convert.output import PartialOutput
from imp_runtime.convert.progress import Silent
from tests.convert.builder import Built, build
from tests.convert.read_back import compare


@pytest.fixture(scope="module")
def built() -> Built:
    return build(experts="nvfp4", mtp="block", table="fp8")


@pytest.fixture
def src(built: Built, tmp_path: Path) -> Path:
    return built.write(tmp_path / "src", 2)


class StopAt(Silent):
    """Raises in the middle of a stage."""

    def __init__(self, stage: str, error: Callable[[], BaseException]) -> None:
        self.stage, self.error, self.current = stage, error, ""

    def begin(self, stage: str, total_bytes: int) -> None:
        self.current = stage

    def advance(self, nbytes: int) -> None:
        if self.current == self.stage:
            raise self.error()


@pytest.mark.parametrize("stage", ["checking", "writing", "verifying"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, partial(OSError, 28, "No space left")])
def test_stopped_in_the_middle(src: Path, stage: str, error: Callable[[], BaseException]) -> None:
    out = src.parent / "out.gguf"
    wanted = KeyboardInterrupt if error is KeyboardInterrupt else ConvertError
    with pytest.raises(wanted, match=None if wanted is KeyboardInterrupt else "No space left"):
        convert(src, out, progress=StopAt(stage, error))
    assert list(src.parent.iterdir()) == [src]


def test_stopped_conversion_keeps_the_old_result(src: Path, built: Built) -> None:
    out = src.parent / "out.gguf"
    out.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        convert(src, out, ConvertOptions(force=True), StopAt("writing", KeyboardInterrupt))
    assert out.read_bytes() == b"old"
    convert(src, out, ConvertOptions(force=True))
    compare(out, built, {"mtp.layers.0.mlp.experts": 2**-8})


CHILD = """
import sys, time
from imp_runtime.convert import convert
from imp_runtime.convert.progress import Silent
class Slow(Silent):
    def begin(self, stage, total):
        self.stage = stage
    def advance(self, n):
        if self.stage == "writing":
            print("writing", flush=True)
            time.sleep(0.2)
try:
    convert(sys.argv[1], sys.argv[2], progress=Slow())
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_child(src: Path, out: Path) -> subprocess.Popen[str]:
    """A conversion in another process, some tensors written."""
    search = os.pathsep.join(p for p in sys.path if p)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(src), str(out)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert child.stdout is not None
    for _ in range(3):
        assert child.stdout.readline() == "writing\n"
    return child


def test_killed_process_leaves_nothing_under_the_final_name(src: Path, built: Built) -> None:
    out = src.parent / "out.gguf"
    with start_child(src, out) as child:
        with pytest.raises(ConvertError, match="another conversion is writing"):
            convert(src, out)
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    assert not out.exists()
    stale = src.parent / "out.gguf.partial"
    assert (stale / "out.gguf").exists()
    convert(src, out)  # recognises and replaces what the killed one left
    assert not stale.exists()
    compare(out, built, {"mtp.layers.0.mlp.experts": 2**-8})


def test_interrupted_process_cleans_up(src: Path) -> None:
    out = src.parent / "out.gguf"
    with start_child(src, out) as child:
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
    assert list(src.parent.iterdir()) == [src]


def test_foreign_folder_is_not_touched(src: Path) -> None:
    folder = src.parent / "out.gguf.partial"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    with pytest.raises(ConvertError, match="is not a partial conversion: it holds thesis.txt"):
        convert(src, src.parent / "out.gguf")
    assert (folder / "thesis.txt").read_text() == "precious"
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(ConvertError, match=r"out\.gguf\.partial is in the way"):
        convert(src, src.parent / "out.gguf")


def test_existing_output_needs_force(src: Path) -> None:
    out = src.parent / "out.gguf"
    out.write_bytes(b"old")
    with pytest.raises(ConvertError, match="exists already; --force replaces it"):
        convert(src, out)
    assert out.read_bytes() == b"old"
    assert not (src.parent / "out.gguf.partial").exists()


def test_output_names(src: Path, tmp_path: Path) -> None:
    assert output_path(src, tmp_path) == tmp_path / "src.gguf"
    with pytest.raises(ConvertError, match=r"ends in \.gguf"):
        output_path(src, tmp_path / "model.bin")
    with pytest.raises(ConvertError, match="is not a folder"):
        output_path(src, tmp_path / "none" / "model.gguf")


def test_disk_space(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plan(src) as planned:
        from imp_runtime.convert.check import disk_needed

        needed = disk_needed(planned.data_bytes, 1)
    usage = shutil.disk_usage(src)
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if free == needed:
            convert(src, src.parent / "fits.gguf")
            continue
        sentence = f"has {free} bytes free, the result needs {needed}"
        with pytest.raises(ConvertError, match=sentence):
            convert(src, src.parent / "out.gguf")
        assert not list(src.parent.glob("out*"))


@pytest.mark.parametrize("limit", [200_000, 1_000_000])
def test_split(src: Path, built: Built, limit: int) -> None:
    whole = src.parent / "whole.gguf"
    convert(src, whole)
    out = src.parent / "part.gguf"
    report = convert(src, out, ConvertOptions(split_max_bytes=limit))
    count = len(report.files)
    assert count > 1
    assert [p.name for p in report.files] == [
        f"part-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)
    ]
    assert not out.exists()
    a, b = _core.Gguf.open(whole), _core.Gguf.open(report.files[0])
    assert [t.name for t in a.tensors()] == [t.name for t in b.tensors()]
    for t in a.tensors():
        assert bytes(a.data(t.name)) == bytes(b.data(t.name))
    ours = {k for k in b.keys() if not k.startswith("split.")}
    assert ours == set(a.keys())
    sizes: dict[int, list[int]] = {}
    for t in b.tensors():
        sizes.setdefault(t.shard, []).append(t.n_bytes)
    for n_bytes in sizes.values():
        assert sum(n_bytes) <= limit or len(n_bytes) == 1
    with pytest.raises(ConvertError, match="exists already"):
        convert(src, out, ConvertOptions(split_max_bytes=limit))


def test_conversions_are_equal_byte_by_byte(src: Path) -> None:
    names = [src.parent / "a.gguf", src.parent / "b.gguf"]
    for name in names:
        convert(src, name)
    assert names[0].read_bytes() == names[1].read_bytes()


def test_plan_changes_nothing(src: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in src.parent.rglob("*")}
    with plan(src) as planned:
        nbytes = planned.data_bytes
        schemes = schemes_seen(planned)
    assert {p: p.stat().st_mtime_ns for p in src.parent.rglob("*")} == before
    assert schemes["NVFP4 (ModelOpt)"] == 4 * 12 * 3
    assert schemes["FP8 in blocks"] == 12 * 3
    assert schemes["FP8 per tensor"] == 16
    out = src.parent / "out.gguf"
    convert(src, out)
    assert 0 < out.stat().st_size - nbytes < 40_000  # keys and tensor infos


def test_partial_output_gives_the_first_shard_its_name_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    partial = PartialOutput(tmp_path / "m.gguf", names, force=False)
    for path in partial.files:
        path.write_bytes(b"x")
    order: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    partial.commit()
    assert order == names[::-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("text", "nbytes"), [("500M", 500_000_000), ("2G", 2_000_000_000), ("1M", 1_000_000)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0M", "2", "2T", "-1G", "1.5G", "G", "2GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConvertError, match="--split-max-size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("option", "value"),
    [("dense", "q4_0"), ("ngram", "fp4"), ("experts", "nvfp4"), ("mtp", "yes")],
)
def test_bad_options(option: str, value: str) -> None:
    with pytest.raises(ConvertError, match=f"--{option} {value}: one of "):
        ConvertOptions(**{option: value})  # type: ignore[arg-type]


def test_fp8_table_is_refused_where_the_source_has_none(tmp_path: Path) -> None:
    folder = build(mtp="").write(tmp_path / "src")
    with pytest.raises(ConvertError, match="--ngram fp8: the table of .* is BF16, not F8_E4M3"):
        plan(folder, ConvertOptions(ngram="fp8"))
    each = build(mtp="", table="fp8_each").write(tmp_path / "each")
    with pytest.raises(ConvertError, match="its shards have different scales .* choose --ngram bf"):
        plan(each)


def test_too_large_for_f16(tmp_path: Path) -> None:
    built = build(plain="F32", mtp="")
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    from tests.convert.builder import raw

    values = built.values["layers.0.linear_attn.in_proj_qkv"].copy()
    for largest, good in ((65504.0, True), (65520.0, False)):
        values[3, 4] = largest
        built.tensors[name] = raw(values, "F32")[0]
        folder = built.write(tmp_path / str(good))
        out = tmp_path / f"{good}.gguf"
        if good:
            convert(folder, out, ConvertOptions(dense="f16"))
            continue
        with pytest.raises(ConvertError, match="attn_qkv.weight holds 65520, F16 reaches 65504"):
            convert(folder, out, ConvertOptions(dense="f16"))
        assert not out.exists()


def test_time_is_measured(src: Path) -> None:
    started = time.monotonic()
    report = convert(src, src.parent / "out.gguf")
    assert 0 < report.write_seconds + report.verify_seconds < time.monotonic() - started
    assert report.nbytes == report.files[0].stat().st_size
