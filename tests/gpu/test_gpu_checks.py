"""What goes wrong beside the model is told: damaged experts, files that shrink, endless steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from imp_runtime import ImpError
from imp_runtime.model import Model
from imp_runtime.session import Session

LAYERS, EXPERTS, K = 3, 40, 10
PAIRS = LAYERS * EXPERTS
SPEC = f"flash-next:layers={LAYERS},experts={EXPERTS},vocab=1000,table=512"


@pytest.fixture(scope="module")
def model(cuda: None) -> Model:
    return Model.synthetic(SPEC, device="cuda")


def ids(*firsts: int) -> np.ndarray:
    """Recorded routing: token t of every layer uses experts firsts[t] to firsts[t] + 9."""
    return np.array([[range(f, f + K)] * LAYERS for f in firsts], np.uint16)


def checked(model: Model, routing: np.ndarray | None = None) -> Session:
    return Session(model, n_ctx=512, expert_slots=PAIRS, verify_experts=True, routing=routing)


def test_nothing_is_damaged(model: Model) -> None:
    tokens = np.random.RandomState(1).randint(0, 1000, 150)
    with checked(model) as session, session.open() as seq:
        logits = seq.extend(tokens).copy()
        for _ in range(3):
            last = seq.extend([1]).copy()
        check = session.verify_experts()
        assert (check.slots, check.stored, check.damaged) == (PAIRS, PAIRS, [])
        assert str(check).endswith("all are as they were read")
    with Session(model, n_ctx=512) as session, session.open() as seq:
        assert np.array_equal(seq.extend(tokens), logits)
        for _ in range(3):
            again = seq.extend([1])
        assert np.array_equal(again, last)


def test_a_damaged_slot_is_found_and_filled_again(model: Model) -> None:
    with checked(model, ids(0, 10, 20, 30)) as session, session.open() as seq:
        for token in range(4):
            seq.extend([token])
        session.core.damage_slot(0)
        check = session.verify_experts()
        assert check.damaged == [(0, 0, 0)] and check.slots == PAIRS
        assert "1 differ from what was read, first: layer 0, expert 0, slot 0" in str(check)
        check = session.verify_experts()
        assert check.damaged == [] and check.slots == PAIRS - 1
        before = session.expert_stats()
        seq.extend([4])
        after = session.expert_stats()
        assert sum(after["wanted"]) - sum(before["wanted"]) == LAYERS * K
        assert sum(after["hits"]) - sum(before["hits"]) == LAYERS * K - 1
        assert session.verify_experts().slots == PAIRS


def test_a_step_that_used_a_damaged_slot_fails(model: Model) -> None:
    """One that did not goes on; afterwards the slot is empty either way."""
    with checked(model, ids(0, 10, 20, 30, 10, 0, 0, 0)) as session:
        seq, other = session.open(), None
        for token in range(4):
            seq.extend([token])
        session.core.damage_slot(0)
        seq.extend([4])
        assert session.verify_experts().slots == PAIRS - 1
        seq.extend([5])
        session.core.damage_slot(0)
        message = "expert 0 of layer 0 in slot 0 is not what was read .* the step used it"
        with pytest.raises(ImpError, match=message) as error:
            seq.extend([6])
        assert error.value.code == "io"
        with pytest.raises(ImpError, match="failed half-way"):
            seq.extend([6])
        seq.close()
        other = session.open()
        other.extend([6])


def test_checks_need_checksums(model: Model) -> None:
    with Session(model, n_ctx=64, expert_slots=PAIRS) as session, session.open() as seq:
        seq.extend([1])
        with pytest.raises(ImpError, match="no checksums were taken when the session was opened"):
            session.verify_experts()
        with pytest.raises(ImpError, match=f"slot {PAIRS} of {PAIRS}"):
            session.core.damage_slot(PAIRS)


def test_a_file_that_shrinks_while_experts_are_read(
    cuda: None, gguf_file: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(gguf_file("experts512"), path)
    with Model.load(path, device="cuda") as model:
        slots = model.sizes().expert_layers * model.sizes().experts_used
        with Session(model, n_ctx=64, expert_slots=slots) as session, session.open() as seq:
            os.truncate(path, 4096)
            with pytest.raises(ImpError, match=f"{path} ends at byte 4096 .* became shorter"):
                seq.extend([1])


def test_a_step_that_takes_too_long(model: Model) -> None:
    tokens = np.arange(150, dtype=np.int32)
    with Session(model, n_ctx=512, max_seqs=2, step_timeout=1e-6) as session:
        seq, other = session.open(), session.open()
        with pytest.raises(ImpError, match="^a step of 150 rows was not done after 1e-06 s") as e:
            seq.extend(tokens)
        assert e.value.code == "timeout"
        for late in (seq, other):
            with pytest.raises(ImpError, match="cannot go on"):
                late.extend([1])
    with Session(model, n_ctx=512) as session, session.open() as seq:
        assert np.isfinite(seq.extend(tokens)).all()
