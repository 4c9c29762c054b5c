"""Which device runs a model and where its experts go, on machines that are not here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imp_runtime import ImpError, _core
from imp_runtime.model import Model
from imp_runtime.placement import Limits, choose_device, plan_session
from imp_runtime.planner import (
    ONE_CONTEXT,
    Machine,
    ModelSizes,
    Request,
    Tier,
    synthetic_sizes,
)
from imp_runtime.session import Session

GIB = 1 << 30
SESSION = Request(n_ctx=4096, n_ubatch=512)


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return synthetic_sizes("flash-next")


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    info = _core.system_info() | {"cuda_usable": True, "cuda_free_bytes": 0}
    monkeypatch.setattr(_core, "system_info", lambda: info)


@pytest.mark.parametrize(
    "vram, ram, device, why",
    [
        (80, 8, "cuda", ""),
        (32, 128, "cuda", ""),
        (12, 128, "cuda", ""),
        (4, 128, "cpu", "bytes of VRAM are needed"),
        (32, 32, "cpu", "bytes of experts cannot be pinned"),
        (0, 128, "cpu", "no VRAM may be used"),
    ],
)
@pytest.mark.usefixtures("with_cuda")
def test_auto(sizes: ModelSizes, vram: int, ram: int, device: str, why: str) -> None:
    limits = Limits(vram * GIB, ram * GIB)
    got, note = choose_device("auto", lambda: sizes, limits)
    assert got == device
    assert why in note and bool(note) == bool(why)


@pytest.mark.usefixtures("with_cuda")
def test_a_choice_that_was_made_is_not_planned(sizes: ModelSizes) -> None:
    def none() -> ModelSizes:
        raise AssertionError

    assert choose_device("cuda", none, Limits(1, 1)) == ("cuda", "")
    assert choose_device("cpu", none, Limits(1, 1)) == ("cpu", "")


def test_session_plans(sizes: ModelSizes) -> None:
    machine = Machine(32 * GIB, 128 * GIB)
    made = plan_session(sizes, machine, SESSION)
    assert made.tier is Tier.PINNED and made.n_ctx == 4096
    # What is left of 32 GiB beside the dense weights and what a session needs.
    assert 8400 < made.slots < 9000
    assert made.slots * sizes.blob_bytes < 32 * GIB - sizes.dense_bytes
    each = plan_session(sizes, machine, replace(SESSION, parallel=4))
    shared = replace(SESSION, parallel=4, cache_tokens=ONE_CONTEXT)
    assert each.slots < plan_session(sizes, machine, shared).slots < made.slots
    assert plan_session(sizes, Machine(141 * GIB, GIB), SESSION).tier is Tier.VRAM


def test_what_does_not_fit_is_refused_at_the_byte(sizes: ModelSizes) -> None:
    enough = Machine(32 * GIB, sizes.expert_bytes)
    assert plan_session(sizes, enough, SESSION).tier is Tier.PINNED
    short = Machine(32 * GIB, sizes.expert_bytes - 1)
    numbers = rf"{sizes.expert_bytes} bytes of experts .*, {sizes.expert_bytes - 1} may be used"
    with pytest.raises(ImpError, match=f"device cuda: {numbers}"):
        plan_session(sizes, short, SESSION)


def test_a_model_keeps_its_limits_and_says_what_is_planted() -> None:
    limits = Limits(ram_bytes=GIB)
    spec = "flash-next:layers=2,experts=16,vocab=64,table=64"
    model = Model.synthetic(spec, device="cpu", limits=limits, routing="prose")
    assert model.limits is limits and model.device == "cpu"
    assert "routing: planted (prose)" in model.notes
    with Session(model, n_ctx=16) as session:
        assert session.routing == "prose" and session.plan is None


@pytest.mark.parametrize(
    "args, message",
    [
        (("--vram-limit", "much"), "--vram-limit"),
        (("--ram-limit", "12 stones"), "--ram-limit"),
        (("--expert-policy", "fifo"), "expert policy 'fifo'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "perplexity", "bench"])
def test_flags_are_refused_in_one_sentence(
    command: str,
    args: tuple[str, str],
    message: str,
    prose_gguf: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from imp_runtime.cli import bench, perplexity
    from imp_runtime.cli.main import main

    model = str(prose_gguf)
    if command == "run":
        status = main(["run", model, "-p", "x", *args])
    elif command == "perplexity":
        status = perplexity.main(["-m", model, "-p", "a b c d " * 40, "-c", "16", *args])
    else:
        status = bench.main(["-m", model, "-p", "16", "-n", "0", "-r", "1", *args])
    err = capsys.readouterr().err
    assert status == 1
    assert sum(message in line for line in err.splitlines()) == 1 and "Traceback" not in err
