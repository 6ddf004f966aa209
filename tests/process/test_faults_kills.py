"""Fifty ranks killed at random in worlds of eight: no hang, no wrong value, no wrong rank blamed."""

from __future__ import annotations

import itertools

import pytest
from tests.soak import kills as soak

pytestmark = pytest.mark.more

KILLS, KILLS_ELSEWHERE = 50, 3


@pytest.mark.timeout(400)
def test_fifty_ranks_are_killed_and_every_survivor_names_the_dead() -> None:
    done = 0
    for world in itertools.count():
        if done == KILLS:
            break
        done += soak.kill_some(world, KILLS - done)


@pytest.mark.parametrize("kind", soak.BINDERS)
def test_killed_ranks_are_named_on_other_backends_too(kind: str) -> None:
    done = 0
    for world in itertools.count():
        if done == KILLS_ELSEWHERE:
            break
        done += soak.kill_some(world, KILLS_ELSEWHERE - done, kind)
