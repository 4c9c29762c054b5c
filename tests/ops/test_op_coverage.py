"""Every op that the core offers is compared with a reference in this folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imp_runtime import ImpError, _core
from tests.ops.harness import DEVICES


def test_no_op_is_missing() -> None:
    files = [p for p in Path(__file__).parent.glob("test_op_*.py") if p.name != "test_op_rows.py"]
    tested = {n for p in files for n in re.findall(r'device\.run\(\s*"(\w+)"', p.read_text())}
    assert tested == set(_core.op_names())


def test_unknown_op_and_missing_argument() -> None:
    with pytest.raises(ImpError, match="nothing_like_it"):
        _core.run_op("nothing_like_it", {}, {})
    with pytest.raises(ImpError, match="argument qkv is missing"):
        _core.run_op("delta_rule", {}, {})


def test_kernel_sets_of_this_machine() -> None:
    assert not DEVICES[0].missing()  # the generic kernels run anywhere
    with pytest.raises(ImpError, match="sse9"):
        _core.run_op("rope_table", {"dim": 2, "theta": 1.0}, {}, kernels="sse9")
