"""Fifty ranks killed at random, eight at a time: no hang, no wrong value, nobody wrongly blamed."""

from __future__ import annotations

import itertools

import pytest

from . import soak

KILLS = 50


@pytest.mark.timeout(400)
def test_fifty_ranks_are_killed_and_every_survivor_names_the_dead() -> None:
    done = 0
    for world in itertools.count():
        if done == KILLS:
            break
        done += soak.kill_some(world, KILLS - done)
