"""Communicators under random faults: every rank gets right results or PeerLost, and all ranks end.

The random program is the same on all ranks, so only faults may cause errors: never a mismatch, a deadlock or
another error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono as uni
from unisono.simulation import Drop, Fault, Kill, Killed, Network, Partition, Pause, SimResult, Slow, sleep


def contribution(rank: int, count: int) -> Any:
    return (np.arange(count) % 97 + 1.0) * (rank + 1)


def all_reduce(world: uni.Communicator, parts: list[Any], root: int) -> None:
    assert np.array_equal(world.all_reduce(parts[world.rank].copy()), sum(parts))


def broadcast(world: uni.Communicator, parts: list[Any], root: int) -> None:
    assert np.array_equal(world.broadcast(parts[world.rank].copy(), root), parts[root])


def all_gather(world: uni.Communicator, parts: list[Any], root: int) -> None:
    assert np.array_equal(world.all_gather(parts[world.rank]), parts)


def reduce_scatter(world: uni.Communicator, parts: list[Any], root: int) -> None:
    mine = np.stack([parts[world.rank] + to for to in range(world.size)])
    assert np.array_equal(world.reduce_scatter(mine), sum(parts) + world.size * world.rank)


def all_to_all(world: uni.Communicator, parts: list[Any], root: int) -> None:
    mine = np.stack([parts[world.rank] + to for to in range(world.size)])
    assert np.array_equal(world.all_to_all(mine), [part + world.rank for part in parts])


def scan(world: uni.Communicator, parts: list[Any], root: int) -> None:
    assert np.array_equal(world.scan(parts[world.rank]), sum(parts[: world.rank + 1]))


def shift(world: uni.Communicator, parts: list[Any], root: int) -> None:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    into = np.zeros_like(parts[left])
    world.sendrecv(parts[world.rank], right, into, left)
    assert np.array_equal(into, parts[left])


def split(world: uni.Communicator, parts: list[Any], root: int) -> None:
    half = world.split(world.rank % 2)
    assert half is not None
    assert np.array_equal(half.all_reduce(parts[world.rank].copy()), sum(parts[world.rank % 2 :: 2]))


def started(world: uni.Communicator, parts: list[Any], root: int) -> None:
    works: list[uni.Work[Any]] = [
        world.start.all_reduce(parts[world.rank].copy()),
        world.start.all_gather(parts[world.rank]),
    ]
    try:
        sleep(0.1 * root)
    finally:
        total, gathered = uni.wait_all(works)
    assert np.array_equal(total, sum(parts))
    assert np.array_equal(gathered, parts)


def objects(world: uni.Communicator, parts: list[Any], root: int) -> None:
    assert world.all_gather_object({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]


def uneven_pace(world: uni.Communicator, parts: list[Any], root: int) -> None:
    sleep(0.5 if world.rank == root else 0.0)
    world.barrier()


Step = Callable[[uni.Communicator, list[Any], int], None]
STEPS: list[Step] = [
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    scan,
    shift,
    split,
    started,
    objects,
    uneven_pace,
]


def chaos(seed: int) -> tuple[SimResult, list[Fault]]:
    """A program of random steps with a random network and up to two random faults, all from one seed."""
    chance = random.Random(f"chaos {seed}")
    n = chance.randint(2, 6)
    steps = [
        (chance.choice(STEPS), chance.choice([0, 1, 7, 300, 5_000, 40_000]), chance.randrange(n))
        for _ in range(chance.randint(1, 8))
    ]

    def program(world: uni.Communicator) -> str:
        for step, count, root in steps:
            step(world, [contribution(rank, count) for rank in range(n)], root)
        return "through"

    network = Network(chance.choice([1e-5, 1e-3]), 1e8, chance.choice([0.0, 1e-3]))
    faults = [fault(chance, n) for _ in range(chance.randint(0, 2))]
    return uni.simulate(program, n, seed=seed, network=network, faults=faults), faults


def fault(chance: random.Random, n: int) -> Fault:
    rank = chance.randrange(n)
    other = (rank + chance.randrange(1, n)) % n
    when: dict[str, Any] = (
        {"at_s": chance.choice([0.0, 1e-3, 0.1, 0.5])}
        if chance.random() < 0.5
        else {"at_step": chance.randint(1, 40)}
    )
    for_s = chance.choice([0.2, 1.0, 3.0, None])
    return chance.choice(
        [
            lambda: Kill(rank, **when),
            lambda: Pause(rank, for_s=for_s, **when),
            lambda: Drop(rank, other, for_s=for_s, **when),
            lambda: Slow(rank, other, 20.0, for_s=for_s, **when),
            lambda: Partition([[rank], [other]], for_s=for_s, **when),
        ]
    )()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_programs_end_with_right_results_or_name_the_ranks_they_lost(seed: int) -> None:
    result, faults = chaos(seed)
    for outcome in result.results:
        assert outcome == "through" or (faults and isinstance(outcome, uni.PeerLost | Killed)), repr(outcome)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_programs_repeat_exactly(seed: int) -> None:
    assert chaos(seed)[0].trace_hash == chaos(seed)[0].trace_hash
