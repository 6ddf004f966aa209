"""Fixtures for the tests of `unisono.core`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono import _native


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of one instruction set of this CPU."""
    before = _native.isa()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
