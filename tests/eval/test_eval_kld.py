"""The stored-logits file against bytes that llama-perplexity wrote, and against damage."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imp_runtime.errors import ImpError
from imp_runtime.eval import EvalError, KldBase, LogitsFileError, numerics, write_kld
from imp_runtime.eval.kl_divergence import KldOptions, kl_divergence
from imp_runtime.eval.kld import encode_rows, file_bytes, row_words
from tests.eval import bigram

DATA = Path(__file__).parent / "data"
GOLDEN = (DATA / "33.kld").read_bytes()  # 17 windows of 16 tokens
N_CTX, N_VOCAB, N_CHUNKS = 16, 33, 17


def scalar_row(logits: np.ndarray) -> bytes:
    """One stored row by the definition, value by value in float32."""
    f = np.float32
    top, low = max(logits), min(logits)
    low = max(low, f(top - f(16)))
    total = sum(float(np.exp(f(x - top))) for x in logits)
    scale = f(f(top - low) / f(65535))
    minimum = f(f(low - top) - f(np.log(total)))
    q = [0] * len(logits)
    if scale > 0:
        inverse = f(f(1) / scale)
        q = [int(np.rint(f(inverse * f(x - low)))) if x > low else 0 for x in logits]
    words = struct.pack("<ff", scale, minimum) + struct.pack(f"<{len(q)}H", *q)
    return words + b"\0\0" * (len(q) % 2)


@pytest.mark.parametrize("n_vocab", [1, 2, 33, 34, 257])
def test_rows_follow_the_definition(n_vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "BLOCK_LOGITS", 2 * n_vocab)
    rng = np.random.default_rng(n_vocab)
    logits = rng.normal(0, 6, (7, n_vocab)).astype(np.float32)
    logits[3] = 2.5  # no spread at all
    logits[4, 0] = -1e30
    rows = encode_rows(logits, n_threads=3)
    assert rows.shape == (7, row_words(n_vocab)) and rows.nbytes % 4 == 0
    for row, values in zip(rows, logits, strict=True):
        expected = np.frombuffer(scalar_row(values), np.uint16)
        np.testing.assert_array_equal(row[4:], expected[4:])
        np.testing.assert_allclose(row[:4].view("<f4"), expected[:4].view("<f4"), rtol=3e-7)


def test_limits_of_the_stored_range() -> None:
    logits = np.array([[0, -16, -16.001, -8, -1e9]], np.float32)
    row = encode_rows(logits)[0, 4:9]
    assert row.tolist() == [65535, 0, 0, 32768, 0]


@pytest.mark.parametrize("n_vocab", [33, 34])
def test_writes_what_llama_perplexity_wrote(n_vocab: int, tmp_path: Path) -> None:
    golden = KldBase(DATA / f"{n_vocab}.kld")
    logits = bigram.table(n_vocab, 0)
    path = tmp_path / "mine.kld"
    with write_kld(path, np.array(golden.tokens), n_vocab) as writer:
        for window in golden.tokens:
            seen = window[golden.n_ctx // 2 : -1]
            writer.write(logits[seen[:1]])
            writer.write(logits[seen[1:]])
    assert path.stat().st_size == file_bytes(golden.n_ctx, n_vocab, golden.n_chunks)
    mine = KldBase(path)
    for chunk in range(golden.n_chunks):
        ours, theirs = mine.rows(chunk), golden.rows(chunk)
        np.testing.assert_array_equal(ours.q, theirs.q)
        np.testing.assert_array_equal(ours.scale, theirs.scale)
        np.testing.assert_allclose(ours.min_log_prob, theirs.min_log_prob, rtol=2e-7)
    head = 20 + 4 * golden.tokens.size
    assert path.read_bytes()[:head] == golden.path.read_bytes()[:head]


def test_reads_what_llama_perplexity_wrote() -> None:
    base = KldBase(DATA / "33.kld")
    assert (base.n_ctx, base.n_vocab, base.n_chunks) == (N_CTX, N_VOCAB, N_CHUNKS)
    assert base.tokens.ravel().tolist() == bigram.encode(bigram.WORDS)
    rows = base.rows(2, first=3, count=2)
    logits = bigram.table(N_VOCAB, 0)[base.tokens[2, 8 + 3 : 8 + 5]].astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    stored = rows.scale[:, None].astype(np.float64) * rows.q + rows.min_log_prob[:, None]
    clipped = np.maximum(exact, exact.max(axis=1, keepdims=True) - 16)
    np.testing.assert_allclose(stored, clipped, atol=16 / 65535)


def test_failure_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(b"old")
    tokens = np.zeros((2, 8), np.int32)
    for wrong in ("interrupted", "short", "long", "other vocabulary"):
        with pytest.raises((EvalError, KeyboardInterrupt)) as caught:  # noqa: SIM117
            with write_kld(path, tokens, 5) as writer:
                writer.write(np.zeros((3, 5), np.float32))
                if wrong == "interrupted":
                    raise KeyboardInterrupt
                if wrong == "long":
                    writer.write(np.zeros((4, 5), np.float32))
                if wrong == "other vocabulary":
                    writer.write(np.zeros((3, 6), np.float32))
        if wrong != "interrupted":
            assert "3 rows" in str(caught.value)
        assert os.listdir(tmp_path) == ["base.kld"] and path.read_bytes() == b"old"


def test_a_full_disk_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = file_bytes(8, 5, 2)
    tokens = np.zeros((2, 8), np.int32)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(needed))
    with write_kld(tmp_path / "fits", tokens, 5) as writer:
        writer.write(np.zeros((6, 5), np.float32))
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(needed - 1))
    with (
        pytest.raises(EvalError, match=f"needs {needed} bytes, the disk has {needed - 1} free"),
        write_kld(tmp_path / "full", tokens, 5),
    ):
        pytest.fail("the run started")
    assert os.listdir(tmp_path) == ["fits"]


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def damaged(offset: int, values: bytes) -> bytes:
    return GOLDEN[:offset] + values + GOLDEN[offset + len(values) :]


def int32(value: int) -> bytes:
    return struct.pack("<i", value)


ROWS_AT = 20 + 4 * N_CTX * N_CHUNKS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not start with _logits_"),
        (b"_logits\0" + GOLDEN[8:], "does not start with _logits_"),
        (GOLDEN[:12], "has 12 bytes, its header needs 20"),
        (GOLDEN[:-1], "has 10151 bytes, its header promises 10152"),
        (GOLDEN + b"\0", "has 10153 bytes, its header promises 10152"),
        (damaged(8, int32(2)), "n_ctx is 2, it must be 3 or more"),
        (damaged(8, int32(-16)), "n_ctx is -16"),
        (damaged(12, int32(0)), "n_vocab is 0"),
        (damaged(16, int32(-1)), "n_chunks is -1"),
        (damaged(8, int32(2**31 - 1) * 3), "has 10152 bytes, its header promises"),
        (damaged(20 + 4 * 7, int32(N_VOCAB)), "token 7 is 33, the vocabulary has 33 entries"),
        (damaged(20 + 4 * 7, int32(-1)), "token 7 is -1"),
    ],
)
def test_damaged_files(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.kld"
    path.write_bytes(data)
    with pytest.raises(LogitsFileError, match=message) as caught:
        KldBase(path)
    assert str(path) in str(caught.value) and caught.value.code == "bad_file"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, float("nan")),
        (0, float("inf")),
        (0, -1.0),
        (0, 1e-2),
        (4, float("nan")),
        (4, float("-inf")),
        (4, 1e-2),
        (4, -1000.1),
        (4, -4e19),
    ],
)
def test_damaged_rows(field: int, value: float, tmp_path: Path) -> None:
    path = tmp_path / "bad.kld"
    row = 7 * 3 + 2  # third row of the fourth window
    path.write_bytes(
        damaged(ROWS_AT + row * 2 * row_words(N_VOCAB) + field, struct.pack("<f", value))
    )
    base = KldBase(path)
    base.rows(3, 0, 2)
    with pytest.raises(LogitsFileError, match="row 2 of chunk 4 has scale"):
        base.rows(3, 1)


def test_the_least_minimum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "low.kld"
    row = 7 * 3 + 2
    low = struct.pack("<f", -1000.0)
    path.write_bytes(damaged(ROWS_AT + row * 2 * row_words(N_VOCAB) + 4, low))
    assert KldBase(path).rows(3).min_log_prob[2] == -1000


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_damage_is_an_error_or_readable(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 40) | st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content))) :]
    path = tmp_path / "fuzzed.kld"
    path.write_bytes(content)
    session = bigram.Session(bigram.Model(bigram.table(N_VOCAB, 1)))
    try:
        result = kl_divergence(session, KldBase(path), KldOptions(n_ctx=64))
    except ImpError:
        return
    assert result.totals.count == len(result.kld)
