"""Fixtures of the tests of remote calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.calls import WORLDS


@pytest.fixture(params=WORLDS)
def world_of(request) -> Callable[..., list[Any]]:
    """`world_of(fn, n)` runs `fn(comm)` on n ranks; the test is repeated for each kind of world."""
    return WORLDS[request.param]
