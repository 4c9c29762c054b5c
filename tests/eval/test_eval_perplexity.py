"""Perplexity of bigram models, whose every number can be written down independently."""

import math
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.errors import ImpError
from imp_runtime.eval import (
    EvalError,
    NotFiniteError,
    PerplexityOptions,
    numerics,
    perplexity,
    windows,
)
from imp_runtime.eval.windows import MIN_CONTEXT, limited, plan_strided, plan_windows
from tests.eval import bigram

TEXT = bigram.encode(bigram.WORDS)  # 272 tokens


def session(variant: int = 0, n_vocab: int = bigram.ODD_VOCAB) -> bigram.Session:
    return bigram.Session(bigram.Model(bigram.table(n_vocab, variant)))


def exact_nll(logits: np.ndarray, last: int, token: int) -> float:
    row = [float(value) for value in logits[last]]
    return math.log(math.fsum(math.exp(value) for value in row)) - row[token]


@pytest.mark.parametrize("n_batch", [1, 5, 16, 48, 2048])
def test_scores_second_halves(n_batch: int) -> None:
    logits = bigram.table(bigram.ODD_VOCAB, 0)
    expected = [
        exact_nll(logits, TEXT[start + k - 1], TEXT[start + k])
        for start in range(0, 15 * 17, 17)
        for k in range(9, 17)
    ]
    seen = []
    result = perplexity(session(), TEXT, PerplexityOptions(17, n_batch, chunks=15), seen.append)
    np.testing.assert_allclose(result.nll, expected, rtol=1e-6, atol=1e-6)
    mean = math.fsum(expected) / len(expected)
    spread = math.sqrt(sum((value - mean) ** 2 for value in expected) / len(expected))
    assert result.ppl == pytest.approx(math.exp(mean), rel=1e-6)
    error = math.exp(mean) * spread / math.sqrt(len(expected) - 1)
    assert result.uncertainty == pytest.approx(error, rel=1e-6)
    assert [window.index for window in seen] == list(range(15)) and seen == result.windows
    assert seen[0].ppl == pytest.approx(math.exp(sum(expected[:8]) / 8), rel=1e-6)
    assert result.n_tokens == 255


def test_windows_start_empty_and_ask_for_scored_rows_only() -> None:
    run = session()
    perplexity(run, TEXT, PerplexityOptions(n_ctx=16, n_batch=6, chunks=2))
    assert [(past, len(tokens), rows) for past, tokens, rows in run.calls] == [
        (0, 6, 0), (6, 6, 4), (12, 4, 4),
    ] * 2  # fmt: skip
    assert [token for _, tokens, _ in run.calls for token in tokens] == TEXT[:32]
    assert run.n_open == 0


def test_pieces_are_no_longer_than_a_step() -> None:
    run = session()
    run.n_ubatch = 10
    whole = perplexity(session(), TEXT, PerplexityOptions(n_ctx=32))
    pieces = perplexity(run, TEXT, PerplexityOptions(n_ctx=32))
    np.testing.assert_array_equal(pieces.nll, whole.nll)
    assert [len(tokens) for _, tokens, _ in run.calls[:6]] == [10, 10, 10, 2, 8, 10]
    assert run.steps[:5] == [1, 1, 1, 2, 1]


@pytest.mark.parametrize("n_ctx", [3, 8, 17, 32])
@pytest.mark.parametrize("n_ubatch", [1, 7, 16, 24, 512])
def test_windows_of_a_pass_share_steps(n_ctx: int, n_ubatch: int) -> None:
    """Steps are full, and no more is open than the plan says; every number stays."""
    serial = perplexity(session(), TEXT, PerplexityOptions(n_ctx, n_batch=1))
    for n_batch, n_parallel in ((2048, None), (100, None), (2048, 3), (2048, 1)):
        run = session()
        run.n_ubatch = n_ubatch
        options = PerplexityOptions(n_ctx, n_batch, n_parallel)
        plan = options.plan(len(TEXT))
        result = perplexity(run, TEXT, options)
        np.testing.assert_array_equal(result.nll, serial.nll)
        assert (result.ppl, result.uncertainty) == (serial.ppl, serial.uncertainty)
        assert result.logits_sha256 == serial.logits_sha256
        assert [w.ppl for w in result.windows] == [w.ppl for w in serial.windows]
        assert max(run.steps) == run.most_open <= plan.together(n_ubatch) <= plan.n_seq
        assert run.n_open == 0
        passes = [plan.n_seq] * (plan.n_chunks // plan.n_seq) + [plan.n_chunks % plan.n_seq]
        step = min(plan.n_batch, n_ubatch)
        assert len(run.steps) == sum(-(-n * n_ctx // step) for n in passes)
        if n_parallel == 1:
            assert set(run.steps) == {1}


def test_bos_replaces_the_first_token_of_every_window() -> None:
    run = session()
    perplexity(run, TEXT, PerplexityOptions(n_ctx=16, n_batch=16, chunks=2, bos_id=1))
    assert [tokens for _, tokens, _ in run.calls] == [[1, *TEXT[1:16]], [1, *TEXT[17:32]]]


def test_strided_windows_keep_their_first_token() -> None:
    run = session()
    perplexity(run, TEXT * 2, PerplexityOptions(16, 256, chunks=2, stride=8, bos_id=1))
    assert [tokens for _, tokens, _ in run.calls] == [TEXT[:256], TEXT[8:264]]


def test_result_does_not_depend_on_threads_or_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = perplexity(session(), TEXT, PerplexityOptions(n_ctx=32))
    monkeypatch.setattr(numerics, "BLOCK_LOGITS", 3 * bigram.ODD_VOCAB)
    many = perplexity(session(), TEXT, PerplexityOptions(n_ctx=32, n_threads=4))
    np.testing.assert_array_equal(one.nll, many.nll)
    assert one.logits_sha256 == many.logits_sha256 != ""
    other = perplexity(session(1), TEXT, PerplexityOptions(n_ctx=32))
    assert other.logits_sha256 != one.logits_sha256


@pytest.mark.parametrize(
    ("n_tokens", "n_ctx", "n_batch", "chunks", "expected"),
    [
        (1023, 512, 2048, -1, None),
        (1024, 512, 2048, -1, (2, 2048, 4)),
        (2100, 300, 700, 3, (3, 600, 2)),
        (2100, 300, 700, 99, (7, 600, 2)),
        (2000, 512, 128, -1, (3, 128, 1)),
        (2000, 512, 512, -2, (3, 512, 1)),
    ],
)
def test_plan(n_tokens: int, n_ctx: int, n_batch: int, chunks: int, expected: object) -> None:
    if expected is None:
        with pytest.raises(EvalError, match="1023 tokens.*at least 1024"):
            plan_windows(n_tokens, n_ctx, n_batch, chunks)
        return
    plan = plan_windows(n_tokens, n_ctx, n_batch, chunks)
    assert (plan.n_chunks, plan.n_batch, plan.n_seq) == expected
    assert plan.scored_per_window == n_ctx - 1 - n_ctx // 2


@pytest.mark.parametrize(
    ("n_ctx", "n_batch", "n_ubatch", "expected"),
    [
        (512, 2048, 512, 1),
        (128, 2048, 512, 4),
        (300, 2048, 512, 3),
        (300, 512, 512, 1),
        (512, 2048, 1, 1),
        (512, 2048, 4096, 4),
        (512, 100, 512, 1),
        (3, 2048, 512, 172),
    ],
)
def test_windows_in_a_step(n_ctx: int, n_batch: int, n_ubatch: int, expected: int) -> None:
    plan = plan_windows(100_000, n_ctx, n_batch, -1)
    assert plan.together(n_ubatch) == expected
    assert limited(plan, 2).together(n_ubatch) == min(expected, 2)


def test_strided_plan_rounds_the_window_as_llama_cpp() -> None:
    plan = plan_strided(12104, 256, 2048, 4, 128)
    assert (plan.n_ctx, plan.step, plan.first, plan.scored_per_window) == (512, 128, 383, 128)
    assert plan_strided(2048, 256, 2048, -1, 0 + 1).n_chunks == 2048 - 256


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((9, MIN_CONTEXT - 1, 8, -1), "--ctx-size is 2, it must be 3 to 2147483647"),
        ((9, 3, 0, -1), "--batch-size is 0, it must be at least 1"),
        ((9, 3, 1, 0), "--chunks is 0"),
    ],
)
def test_sizes_out_of_range(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ImpError, match=message):
        plan_windows(*sizes)
    plan_windows(9, MIN_CONTEXT, 1, 1)
    with pytest.raises(ImpError, match="--parallel is 0, it must be at least 1"):
        PerplexityOptions(n_parallel=0).plan(9999)


@pytest.mark.parametrize(("stride", "fine"), [(255, True), (256, False), (-1, False)])
def test_stride_limits(stride: int, fine: bool) -> None:
    options = PerplexityOptions(n_ctx=16, stride=stride)
    if fine:
        options.plan(1000)
    else:
        with pytest.raises(EvalError, match=f"--ppl-stride is {stride}, it must be"):
            options.plan(1000)


def test_stride_cannot_store_logits(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="cannot be combined"):
        PerplexityOptions(stride=1, save_logits=tmp_path / "x").plan(9999)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_stop_the_run(bad: float) -> None:
    run = session()
    last = TEXT[16 + 11]
    assert last not in TEXT[8:16] and last not in TEXT[24 : 16 + 11]
    run.model.logits = run.model.logits.copy()
    run.model.logits[last, 5] = bad
    seen = []
    with pytest.raises(NotFiniteError, match="chunk 2 of 17: the logits of position 11 are not"):
        perplexity(run, TEXT, PerplexityOptions(n_ctx=16, n_batch=8), seen.append)
    assert len(seen) == 1 and run.n_open == 0


def test_failed_evaluation_names_chunk_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bigram.Session.step

    def step(self: bigram.Session, requests: list) -> np.ndarray:
        if len(self.calls) == 5:
            raise ImpError("no page is left")
        return real(self, requests)

    monkeypatch.setattr(bigram.Session, "step", step)
    run = session()
    with pytest.raises(EvalError, match="chunk 3 of 17: positions 8 to 15 failed: no page is left"):
        perplexity(run, TEXT, PerplexityOptions(n_ctx=16, n_batch=8))
    assert run.n_open == 0
    run = session()
    run.n_ubatch = 40
    where = "chunks 5 to 7 of 17: positions from 0 of the first to 7 of the last failed: no page"
    with pytest.raises(EvalError, match=where):  # after 1 to 3, 3 to 4
        perplexity(run, TEXT, PerplexityOptions(n_ctx=16, n_batch=64))
    assert run.n_open == 0


@pytest.mark.parametrize("token", [-1, bigram.ODD_VOCAB])
def test_tokens_outside_the_vocabulary(token: int) -> None:
    windows.check_tokens(np.array([0, bigram.ODD_VOCAB - 1], np.int32), bigram.ODD_VOCAB)
    with pytest.raises(EvalError, match=f"token 3 is {token}, the vocabulary has 33 entries"):
        perplexity(session(), [*TEXT[:3], token, *TEXT], PerplexityOptions(n_ctx=16))


def test_extreme_models_have_finite_text() -> None:
    flat = bigram.Session(bigram.Model(np.zeros((33, 33), np.float32)))
    result = perplexity(flat, TEXT, PerplexityOptions(n_ctx=16))
    assert result.ppl == pytest.approx(33) and result.uncertainty == pytest.approx(0, abs=1e-6)
    certain_and_wrong = np.zeros((33, 33), np.float32)
    certain_and_wrong[:, 0] = 1e4
    wrong = perplexity(
        bigram.Session(bigram.Model(certain_and_wrong)), TEXT, PerplexityOptions(n_ctx=16)
    )
    assert wrong.ppl == math.inf and wrong.nll[0] == pytest.approx(1e4)
    single = perplexity(session(), TEXT, PerplexityOptions(n_ctx=3, chunks=1))
    assert len(single.nll) == 1 and math.isnan(single.uncertainty)
