"""Ranks that die at random, in virtual time: the programs of tests/support/failing_ranks.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.failing_ranks import SMALL, ended_by, one_collective

import unisono as uni
from unisono.errors import PeerLost
from unisono.simulation import Kill, Killed, now, sleep

REPORTED_WITHIN_S = 0.5  # docs/failure.md, in virtual seconds


def seeds(number: int) -> pytest.MarkDecorator:
    """Every seed; the first dozen in `make test`."""
    marks = [(), pytest.mark.more]
    return pytest.mark.parametrize("seed", [pytest.param(i, marks=marks[i >= 12]) for i in range(number)])


def survive(comm: uni.Communicator, seed: int, ends: dict[int, float]) -> Any:
    """Run random collectives until one fails; return the error. Note when this rank got it, or died."""
    rng = random.Random(seed)
    try:
        for turn in range(400):
            one_collective(comm, rng, turn)
    except PeerLost as error:
        return error
    finally:
        ends[comm.rank] = now()
    return None


def survive_and_leave(comm: uni.Communicator, seed: int, ends: dict[int, float]) -> Any:
    """The same inside `with comm`, which the error leaves."""
    with comm:
        error = survive(comm, seed, ends)
        raise error or AssertionError("no rank died")


@pytest.mark.parametrize("program", [survive, survive_and_leave])
@seeds(64)
def test_every_survivor_learns_which_rank_died(seed: int, program: Any) -> None:
    """The error names no other rank, although others leave after the death; completed results are right."""
    rng = random.Random(f"victims {seed}")
    size = rng.randint(2, 8)
    victim = rng.randrange(size)
    ends: dict[int, float] = {}
    faults = [Kill(victim, at_step=rng.randint(1, 150))]
    results = uni.simulate(program, size, seed, ends, seed=seed, config=SMALL, faults=faults).results
    for rank, error in enumerate(results):
        if rank == victim:
            assert isinstance(error, Killed)
        else:
            assert isinstance(error, PeerLost), f"rank {rank}: {error!r}"
            assert error.ranks == (victim,), f"rank {rank}: {error}"
            assert ends[rank] - ends[victim] < REPORTED_WITHIN_S, f"rank {rank}"


@seeds(24)
def test_two_deaths_are_both_reported_and_no_other_rank_is_blamed(seed: int) -> None:
    rng = random.Random(f"two victims {seed}")
    size = rng.randint(3, 8)
    victims = rng.sample(range(size), 2)
    step = rng.randint(1, 120)
    faults = [Kill(victims[0], at_step=step), Kill(victims[1], at_step=step + rng.randint(0, 3))]

    def program(comm: uni.Communicator, ends: dict[int, float]) -> tuple[PeerLost, PeerLost]:
        error = survive(comm, seed, ends)
        sleep(1.0)
        return error, ended_by(PeerLost, comm.barrier)

    results = uni.simulate(program, size, {}, seed=seed, config=SMALL, faults=faults).results
    dead = {rank for rank, result in enumerate(results) if isinstance(result, Killed)}
    assert dead
    assert dead <= set(victims)
    for rank, result in enumerate(results):
        if rank not in dead:
            first, again = result
            assert set(first.ranks) <= dead, f"rank {rank}: {first}"
            assert set(again.ranks) == dead, f"rank {rank}: {again}"
