"""The devices that every op test runs on."""

from __future__ import annotations

import pytest

from tests.ops.harness import DEVICES, Device


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> Device:
    """One backend and kernel set after the other; a new backend joins in harness.DEVICES."""
    d: Device = request.param
    if d.missing():
        pytest.skip(d.missing())
    return d
