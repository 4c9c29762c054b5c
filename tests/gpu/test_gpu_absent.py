"""What is said where CUDA cannot be used: one line with the reason, and the CPU still works."""

from __future__ import annotations

import numpy as np
import pytest

from imp_runtime import ImpError, _core
from imp_runtime.placement import Limits, choose_device
from imp_runtime.planner import ModelSizes


def chosen(device: str) -> str:
    """Where the sizes are not needed."""

    def sizes() -> ModelSizes:
        raise AssertionError

    return choose_device(device, sizes, Limits())[0]


@pytest.fixture
def detail() -> str:
    info = _core.system_info()
    if info["cuda_usable"]:
        pytest.skip("this machine can use CUDA")
    return str(info["cuda_detail"])


def test_status_is_one_line(detail: str) -> None:
    assert detail and "\n" not in detail
    assert ("no CUDA code" in detail) != _core.system_info()["cuda_built"]


def test_device_cuda_says_why(detail: str) -> None:
    with pytest.raises(ImpError) as error:
        chosen("cuda")
    assert str(error.value) == f"device cuda: {detail}"
    x = np.zeros((1, 4), np.float32)
    args = {"gate": x, "up": x}
    with pytest.raises(ImpError) as error:
        _core.run_op("swiglu", args, {}, backend="cuda")
    assert str(error.value) == f"CUDA cannot be used: {detail}"
    assert _core.run_op("swiglu", args, {}, backend="cpu")["y"].shape == (1, 4)


def test_unknown_names() -> None:
    with pytest.raises(ImpError, match="device 'tpu': auto, cpu or cuda"):
        chosen("tpu")
    with pytest.raises(ImpError, match="backend 'tpu': cpu or cuda"):
        _core.run_op("swiglu", {}, {}, backend="tpu")


def test_cublas_lt_that_is_absent() -> None:
    """No library of that name, and one that is another: own kernels serve, and a line says why."""
    built = _core.system_info()["cuda_built"]
    for file, why in (
        ("libabsent.so.1", "cannot open"),
        ("libm.so.6", "has no cublasLtGetVersion"),
    ):
        found, detail = _core.cublas_lt(file)
        assert not found and "\n" not in detail
        if built:
            assert detail.startswith("none, large BF16 maps take imp's own kernels: " + file)
            assert why in detail
        else:
            assert "no CUDA code" in detail


def test_auto_is_the_cpu(detail: str) -> None:
    assert chosen("auto") == chosen("cpu") == "cpu"
