"""Evaluation windows that share steps score as they do one at a time, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime.eval import KldBase, KldOptions, PerplexityOptions, kl_divergence, perplexity
from imp_runtime.model import Model
from imp_runtime.session import Session
from tests.models.golden import MODELS, Golden
from tests.runtime.traffic import nothing_held

Load = Callable[[str], Model]
N_CTX = 30


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_equals_its_windows(name: str, model: Load, tmp_path: Path) -> None:
    text = Golden(name).tokens("long")
    alone_kld, base = tmp_path / "alone", tmp_path / "base"
    with Session(model(name), n_ctx=N_CTX, n_threads=1, n_ubatch=64) as session:
        one = PerplexityOptions(N_CTX, n_batch=N_CTX, save_logits=alone_kld)
        want = perplexity(session, text, one)
        stored = KldBase(alone_kld)
        want_kld = kl_divergence(session, stored, KldOptions(N_CTX, n_batch=N_CTX))
    for n_ubatch, n_batch in ((64, 2048), (70, 100), (512, 2048), (11, 2048)):
        options = PerplexityOptions(N_CTX, n_batch, save_logits=base)
        rows = options.plan(len(text)).together(n_ubatch)
        with Session(
            model(name), n_ctx=N_CTX, max_seqs=rows, n_threads=1, n_ubatch=n_ubatch, poison=True
        ) as session:
            got = perplexity(session, text, options)
            kld = kl_divergence(session, stored, KldOptions(N_CTX, n_batch))
            assert nothing_held(session)
        np.testing.assert_array_equal(got.nll, want.nll)
        assert (got.ppl, got.uncertainty) == (want.ppl, want.uncertainty)
        assert got.logits_sha256 == want.logits_sha256
        assert base.read_bytes() == alone_kld.read_bytes()
        np.testing.assert_array_equal(kld.kld, want_kld.kld)
        assert kld.totals == want_kld.totals and kld.logits_sha256 == want_kld.logits_sha256
