"""Mismatches: within a second all ranks get an error that shows both calls.

The corpus consists of pairs of calls. Some ranks make the first call, the others the second. A rank that
needs no other rank for its part (an empty reduction, a leaf of a tree) gets the error in its next collective.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
from tests.support.metronome import stopwatch
from tests.support.mismatch_corpus import (
    CALLS,
    CORPUS,
    LIMIT_S,
    NEAR,
    SIZES,
    Call,
    Outcome,
    calls_by_rank,
    check_collision,
    check_report,
    collide,
    f4,
    mismatches,
)
from tests.support.mismatches import reported_in_time
from tests.support.processes import run_processes
from tests.support.ranks import PATIENCE_S, run_ranks

import unisono as uni


def cases() -> list[Any]:
    """The first 120 pairs with every number of ranks, the others with one number each.

    `make test` runs every eighth pair, because a mismatch takes 0.5 s and there are hundreds of pairs.
    """
    return [
        pytest.param(
            pair, size, id=f"{' and '.join(pair)}, {size} ranks", marks=pytest.mark.more if i % 8 else ()
        )
        for i, pair in enumerate(CORPUS)
        for size in (SIZES if i < 120 else (SIZES[i % 3],))
    ]


@pytest.mark.parametrize(("pair", "size"), cases())
def test_every_rank_gets_a_mismatch_within_a_second(pair, size):
    check_collision(calls_by_rank(pair, size))


def some_pairs(kind: str, amount: int) -> list[tuple[str, str]]:
    """Different pairs for every kind of ranks, the same in every run."""
    return random.Random(kind).sample(CORPUS, min(amount, len(CORPUS)))


FEW, MANY = 12, len(CORPUS)
EVERYWHERE = ("shm", "tcp", "tls", "hosts", "quic", "gloo", "iroh", "simulated")


@pytest.mark.parametrize("amount", [FEW, pytest.param(MANY, marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", EVERYWHERE)
def test_a_mismatch_is_the_same_on_every_backend(kind, amount):
    pairs = some_pairs(kind, amount)
    if kind == "simulated":
        ended = uni.simulate(mismatches, 3, pairs).results
    else:
        ended = run_processes(mismatches, 3, pairs, kind=kind, patience_s=4 * PATIENCE_S)
    assert ended == [[]] * 3


def test_the_corpus_is_large_and_has_every_kind():
    assert len(CORPUS) >= 200
    used = set(itertools.chain.from_iterable(CORPUS))
    assert used == set(CALLS)


@pytest.mark.parametrize("size", SIZES)
def test_another_order_is_a_mismatch(size):
    calls = [
        Call(lambda c: (c.barrier(), c.all_reduce(f4(5))), "barrier"),
        Call(lambda c: (c.all_reduce(f4(5)), c.barrier()), "all_reduce float32[5]"),
    ]
    check_collision([calls[rank == size - 1] for rank in range(size)])


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_one_rank_leaves_out_is_a_mismatch_at_the_next(size):
    def program(comm, go):
        for i in range(20):
            comm.all_reduce(f4(3))
            if not (i == 11 and comm.rank == size - 1):
                comm.broadcast(f4(4), root=0)

    ended = run_ranks(program, size, None)
    for error in ended:
        assert isinstance(error, uni.CollectiveMismatch), repr(error)
        assert "broadcast float32[4] root=0" in error.report
        assert "all_reduce float32[3] op=sum" in error.report
        assert error.sequence == 23, "12 rounds of two, less the one that was left out"


@pytest.mark.parametrize("size", [3, 5])
def test_a_late_rank_gets_the_mismatch_at_once(size):
    """The others have failed before the last rank makes its call, which is the correct one."""
    calls = [CALLS["sum"] if rank % 2 else CALLS["barrier"] for rank in range(size)]
    comms = uni.local(size)
    early = collide(comms[:-1], calls)
    with stopwatch() as seconds:
        (late,) = collide_alone(comms[-1], calls[-1])
        assert seconds() < LIMIT_S
    for error in (*(outcome.error for outcome in early), late):
        check_report(error, calls)


def collide_alone(comm, call: Call) -> list[BaseException | None]:
    with pytest.raises(uni.UnisonoError) as caught, comm:
        call.make(comm)
    return [caught.value]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "pair", [("none", "sum"), ("fused none", "fused"), ("broadcast from 0", "broadcast from 1")]
)
def test_a_rank_that_completed_its_call_and_left_is_a_mismatch_not_a_loss(pair, size):
    """An empty reduction needs no other rank, so its caller may have left before the others call."""
    for turn in range(4):
        calls = [CALLS[pair[rank != 0]] for rank in range(size)]
        outcomes = collide(uni.local(size), calls, go_on=False)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert errors, turn
        for error in errors:
            check_report(error, calls)


def test_mismatches_in_a_child_concern_the_child_only():
    def program(comm):
        row = comm.split(comm.rank // 2)
        if comm.rank < 2:
            with pytest.raises(uni.CollectiveMismatch) as caught:
                row.all_reduce(f4(3 + comm.rank))
            assert "rank 0: all_reduce float32[3]" in caught.value.report
            assert "rank 1: all_reduce float32[4]" in caught.value.report
            with pytest.raises(uni.CollectiveMismatch):
                row.barrier()
            row.sendrecv(f4(1), 1 - row.rank, f4(1), 1 - row.rank)
        else:
            row.all_reduce(f4(3))
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 4).values() == [6] * 4


def test_a_child_names_world_ranks():
    def program(comm):
        odd = comm.split(comm.rank % 2)
        if comm.rank % 2:
            with pytest.raises(uni.CollectiveMismatch) as caught:
                (odd.barrier if comm.rank == 3 else odd.all_reduce)(*() if comm.rank == 3 else (f4(2),))
            return caught.value.report
        return odd.all_reduce(1)

    results = run_ranks(program, 4).values()
    assert results[0] == results[2] == 2
    assert results[1].startswith("rank 1: all_reduce float32[2]")
    assert "\nrank 3: barrier" in results[1]


def test_calls_on_different_communicators_are_a_deadlock_that_names_both():
    """No mismatch, because a rank cannot know that the other's threads will not make the missing call."""

    def program(comm):
        left, right = comm.split(0), comm.split(0)
        (left if comm.rank == 0 else right).all_reduce(f4(3))

    with stopwatch() as seconds:
        ended = run_ranks(program, 2, config=uni.Config(deadlock_after_s=0.3))
        assert seconds() < 4.0
    for error in ended:
        assert isinstance(error, uni.Deadlock), repr(error)
        assert 'all_reduce #0 on "world.split#0(0)"' in str(error)
        assert 'all_reduce #0 on "world.split#1(0)"' in str(error)


def test_started_collectives_that_do_not_match_end_too():
    """All works under way end, and none hangs; a later one is refused before it starts.

    Works that were started after the different one match each other: each succeeds or raises the mismatch.
    """

    def program(comm):
        ended = []
        for i in range(8):
            try:
                ended.append(comm.start.all_gather(100 * i + comm.rank + f4(2 + (i == 3) * comm.rank)))
            except uni.CollectiveMismatch as error:
                ended.append(error)
        errors = [one if isinstance(one, Exception) else failure(i, one) for i, one in enumerate(ended)]
        assert isinstance(errors[3], uni.CollectiveMismatch)
        with pytest.raises(uni.CollectiveMismatch):
            comm.start.barrier()
        return {error.sequence for error in errors if error is not None}

    def failure(i: int, work) -> Exception | None:
        try:
            gathered = work.wait(timeout=PATIENCE_S)
        except uni.CollectiveMismatch as error:
            return error
        assert np.array_equal(gathered, [100 * i + rank + f4(2) for rank in range(3)])
        return None

    assert run_ranks(program, 3).values() == [{3}] * 3


def test_segments_of_other_lengths_are_a_mismatch():
    """Settings are compared when ranks join; here the ranks share a process and get different settings."""
    other = uni.Config(segment_bytes=4096)
    calls = [CALLS["sum"]._replace(words=f"segment={n}") for n in (262144, 4096)]

    def outcomes() -> list[Outcome]:
        comms = uni.local(2)
        comms[1].backend.__class__ = type(
            "Other", (type(comms[1].backend),), {"config": property(lambda self: other)}
        )
        try:
            # A group reads the settings when it is made.
            return collide([comm.sub([0, 1]) for comm in comms], calls)
        finally:
            for comm in comms:
                comm.close()

    reported_in_time(outcomes, lambda outcome: check_report(outcome.error, calls))


# -- no false reports ----------------------------------------------------------------------------------


MATCHED = [call for name, call in CALLS.items() if name not in ("split",)]


@pytest.mark.parametrize("size", SIZES)
def test_matched_calls_are_never_reported(size):
    """Ranks pause at random, and every wait of 1 ms sends a stall query."""
    rounds = 500
    config = uni.Config(stall_query_s=0.001)

    def program(comm):
        order, mine = random.Random(size), random.Random(comm.rank)
        children = [comm, comm.split(0), comm.sub(range(size))]
        for _ in range(rounds):
            call, where = order.choice(MATCHED), order.choice(children)
            if mine.random() < 0.05:
                time.sleep(mine.random() * 0.004)
            call.make(where)
        return rounds

    assert run_ranks(program, size, config=config).values() == [rounds] * size


@pytest.mark.parametrize("size", SIZES)
def test_matched_calls_started_together_are_never_reported(size):
    class Starting:
        """A communicator whose verbs start: the table of calls serves both ways."""

        def __init__(self, comm) -> None:
            self.size, self.rank, self.start = comm.size, comm.rank, comm.start

        def __getattr__(self, verb):
            return getattr(self.start, verb)

    def program(comm):
        order, mine = random.Random(size + 10), random.Random(comm.rank)
        for _ in range(60):
            works = [order.choice(MATCHED).make(Starting(comm)) for _ in range(order.randint(1, 8))]
            if mine.random() < 0.1:
                time.sleep(mine.random() * 0.004)
            mine.shuffle(works)
            uni.wait_all(works)

    run_ranks(program, size, config=uni.Config(stall_query_s=0.001)).values()


# -- the same in the simulator -------------------------------------------------------------------------


SIMULATED = [pair for pairs in NEAR.values() for pair in pairs]


@pytest.mark.parametrize("pair", SIMULATED, ids=[" and ".join(pair) for pair in SIMULATED])
def test_simulated_ranks_get_a_mismatch_within_a_virtual_second(pair):
    calls = calls_by_rank(pair, 3)

    def program(comm):
        calls[comm.rank].make(comm)
        comm.barrier()

    result = uni.simulate(program, 3, seed=1)
    for error in result.results:
        check_report(error, calls)
    assert result.time_s < 1.0


def test_simulated_ranks_get_a_mismatch_with_nothing_eager():
    for pair in SIMULATED:
        calls = calls_by_rank(pair, 3)

        def program(comm, calls=calls):
            calls[comm.rank].make(comm)
            comm.barrier()

        for error in uni.simulate(program, 3, seed=1, config=uni.Config(eager_bytes=0)).results:
            check_report(error, calls)
