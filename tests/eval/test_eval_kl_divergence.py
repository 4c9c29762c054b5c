"""KL divergence between bigram models against float64 sums."""

import math
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.eval import EvalError, KldBase, KldOptions, kl_divergence
from imp_runtime.eval.kld_stats import Tally, median, percentile
from tests.eval import bigram

DATA = Path(__file__).parent / "data"


def session(variant: int, n_vocab: int = bigram.ODD_VOCAB) -> bigram.Session:
    return bigram.Session(bigram.Model(bigram.table(n_vocab, variant)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("n_batch", [5, 16, 2048])
def test_against_sums_over_the_stored_values(n_batch: int) -> None:
    base = KldBase(DATA / "33.kld")
    result = kl_divergence(session(1), base, KldOptions(16, n_batch))
    expected, p_diff, same = [], [], 0
    logp = log_softmax(bigram.table(bigram.ODD_VOCAB, 1))
    for chunk, window in enumerate(base.tokens):
        rows = base.rows(chunk)
        stored = rows.scale[:, None].astype(np.float64) * rows.q + rows.min_log_prob[:, None]
        for k in range(7):
            model, target = logp[window[8 + k]], window[9 + k]
            kept = stored[k] > -16
            terms = np.exp(stored[k]) * (stored[k] - model)
            expected.append(terms[kept].sum())
            p_diff.append(math.exp(model[target]) - math.exp(stored[k][target]))
            same += stored[k].argmax() == model.argmax()
    np.testing.assert_allclose(result.kld, expected, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(result.p_diff, p_diff, atol=1e-6)
    assert result.totals.kld.value == pytest.approx(np.mean(expected), rel=1e-4)
    assert result.totals.same_top.value == same / len(expected)
    rms = math.sqrt(np.mean(np.square(p_diff)))
    assert result.totals.p_diff_rms.value == pytest.approx(rms, rel=1e-4)


def test_a_model_does_not_diverge_from_itself() -> None:
    base = KldBase(DATA / "34.kld")
    totals = kl_divergence(session(0, 34), base, KldOptions(n_ctx=13, bos_id=1)).totals
    assert abs(totals.kld.value) < 2e-5 and totals.same_top.value == 1
    assert totals.p_diff_rms.value < 1e-4


def test_the_base_must_fit() -> None:
    base = KldBase(DATA / "33.kld")
    with pytest.raises(EvalError, match="context of 16, here it is 15"):
        kl_divergence(session(0), base, KldOptions(n_ctx=15))
    with pytest.raises(EvalError, match="vocabulary of 33 entries, the model has 34"):
        kl_divergence(session(0, 34), base, KldOptions(n_ctx=16))


def test_percentiles_and_median() -> None:
    values = np.array([1, 2, 4, 8], np.float32)
    assert median(values) == 3 and median(values[:3]) == 2
    assert percentile(values, 0.5) == 3 and percentile(values, 0.9) == pytest.approx(6.8)
    assert percentile(values, 0.0) == 1 and percentile(values, 1.0) == 8


@pytest.mark.parametrize(("count", "has_error"), [(10, False), (11, True)])
def test_small_counts_have_no_error(count: int, has_error: bool) -> None:
    tally = Tally()
    nll = np.arange(1, count + 1, dtype=np.float32)
    tally.add(nll, nll + 1, nll.astype(np.float64), nll / 100, np.ones(count, bool))
    totals = tally.totals()
    assert (totals.kld.error > 0) is has_error
    if has_error:
        mean_square = np.mean(np.square(nll)) - np.mean(nll) ** 2
        assert totals.kld.error == pytest.approx(math.sqrt(mean_square / (count - 1)))
