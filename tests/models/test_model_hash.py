"""What tells models apart: their keys, tensors, contents and scales."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from imp_runtime import _core
from imp_runtime.errors import ImpError
from imp_runtime.model import Model
from imp_runtime.prefix_cache import SUFFIX, PrefixCache
from imp_runtime.session import Session
from imp_runtime.snapshot import Snapshot

WHOLE, RUN, PLACES = 16 << 10, 512, 8  # as cpp/model/model_hash.h has them
TOKENS = list(range(40))


def hash_of(path: Path | str, scale: float | None = None) -> int:
    with Model.load(path, device="cpu", ngram_scale=scale) as model, open_session(model) as session:
        return session.core.model_hash


def open_session(model: Model) -> Session:
    return Session(model, n_ctx=64, max_seqs=3, n_threads=1)


def flipped(path: Path, at: int) -> None:
    """Change the lowest bit of one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["base", "experts512", "prose"])
def test_every_tensor_counts(name: str, gguf_file: Callable[[str], Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf_file(name), copy)
    want = hash_of(gguf_file(name))
    assert hash_of(copy) == want
    tensors = _core.Gguf.open(copy).tensors()
    large = [t for t in tensors if t.n_bytes > WHOLE]
    assert len(large) < len(tensors) and (large or name != "experts512")
    for t in tensors:
        places = [t.n_bytes // 2]
        if t.n_bytes > WHOLE:
            step = (t.n_bytes - RUN) // (PLACES - 1)
            places = [3 * step, 5 * step + RUN - 1]
        for at in (0, *places, t.n_bytes - 1):
            flipped(copy, t.offset + at)
            assert hash_of(copy) != want, (t.name, at)
            flipped(copy, t.offset + at)
    assert hash_of(copy) == want


def test_the_scale_of_the_table_counts(gguf_file: Callable[[str], Path]) -> None:
    path = gguf_file("experts512")
    own = float(_core.Gguf.open(path).decode("per_layer_token_embd.scale", 0, 1)[0, 0])
    hashes = {hash_of(path), hash_of(path, own * 2), hash_of(path, own * 3)}
    assert len(hashes) == 3 and hash_of(path, own) in hashes


def test_synthetic_models_differ_by_their_recipe() -> None:
    def of(spec: str) -> int:
        with Model.synthetic(f"flash-next:{spec}", device="cpu") as model:
            with Session(model, n_ctx=32) as session:
                return session.core.model_hash

    base = "layers=2,experts=12,vocab=64,table=64"
    want = of(base)
    assert want == of(f"{base},seed=1")
    assert len({want, of(f"{base},seed=2"), of(f"{base},experts=13")}) == 3


@pytest.mark.parametrize("what", ["weights", "scale"])
def test_states_of_the_like_are_refused(
    what: str, gguf_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """A model of the same shapes and keys takes neither a snapshot nor the files of a cache."""
    path = gguf_file("experts512")
    other = tmp_path / "other.gguf"
    shutil.copy(path, other)
    scale = None
    if what == "scale":
        scale = 2.0
    else:
        weights = next(t for t in _core.Gguf.open(other).tensors() if "ffn_down_exps" in t.name)
        flipped(other, weights.offset)
    folder = tmp_path / "states"

    def kept(session: Session) -> PrefixCache:
        return PrefixCache(session, 1 << 30, folder=folder)

    with Model.load(path, device="cpu") as model, open_session(model) as session:
        seq = session.open()
        seq.extend(TOKENS)
        snapshot = seq.save()
        cache = kept(session)
        cache.put(session.core.fork(seq.id), TOKENS)
        cache.clear()
        (file,) = folder.glob("*" + SUFFIX)
        assert kept(session).touch([*TOKENS, 1]) == len(TOKENS)
    with (
        Model.load(other, device="cpu", ngram_scale=scale) as model,
        open_session(model) as session,
    ):
        with pytest.raises(ImpError, match="^x: a snapshot of another model$"):
            session.restore(Snapshot(snapshot.data, "x"))
        cache = kept(session)
        assert cache.touch([*TOKENS, 1]) == 0 and cache.take([*TOKENS, 1]) is None
        mine = folder / file.name.replace(file.name[:16], f"{session.core.model_hash:016x}")
        assert mine != file
        shutil.copy(file, mine)  # under a name of this model
        cache = kept(session)
        assert cache.touch([*TOKENS, 1]) == len(TOKENS)
        assert cache.take([*TOKENS, 1]) is None
        assert cache.refusals == [f"{mine}: a snapshot of another model"]
        assert file.exists() and not mine.exists()
