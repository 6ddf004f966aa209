"""A rank of this process dies or leaves: every survivor gets the cause, and the root cause wins.

Documented are 0.5 s. The tests allow 1 s, in which time without a core on a loaded machine does not count.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.failing_ranks import (
    NAMED,
    SMALL,
    ProgramError,
    backend_of,
    close_all,
    dying_worlds,
    ended_by,
    ends_in_time,
    is_in_time,
    metronome,  # noqa: F401
    one_collective,
    seeds,
    survive,
    survive_and_leave,
)
from tests.support.ranks import PATIENCE_S, reference_local, run_each, run_ranks

import unisono as uni
from unisono.comm.control_messages import Goodbye, StallQuery
from unisono.config import Config
from unisono.core.envelope import Lane
from unisono.errors import (
    ClosedError,
    DeadlineExceeded,
    PeerAborted,
    PeerLost,
)

# -- a rank dies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True], ids=["the receiver stays", "the receiver leaves"])
@seeds(64, 8)
def test_every_survivor_learns_which_rank_died_wherever_it_died(first: int, leaves: bool) -> None:
    """The error names no other rank, although others leave after the death; completed results are right."""
    for seed in range(first, first + 8):
        rng = random.Random(f"victims {seed}")
        size = rng.randint(2, 8)
        victim = rng.randrange(size)
        worlds = dying_worlds(size, {victim: rng.randint(1, 150)})

        program = survive_and_leave if leaves else survive
        ended = run_each(lambda comm, seed=seed, program=program: program(comm, seed), worlds).values()
        died_at = backend_of(worlds[victim]).died_at
        assert isinstance(ended[victim][1], ClosedError), f"seed {seed}: the dead rank gets ClosedError"
        for rank, (at, error) in enumerate(ended):
            if rank != victim:
                assert isinstance(error, PeerLost), f"seed {seed}, rank {rank}: {error!r}"
                assert error.ranks == (victim,), f"seed {seed}, rank {rank}: {error}"
                assert is_in_time(died_at, at), f"seed {seed}, rank {rank}: too late"
        close_all(worlds)


@seeds(24, 8)
def test_two_deaths_are_both_reported_and_no_other_rank_is_blamed(first: int) -> None:
    for seed in range(first, first + 8):
        rng = random.Random(f"two victims {seed}")
        size = rng.randint(3, 8)
        victims = rng.sample(range(size), 2)
        step = rng.randint(1, 120)
        worlds = dying_worlds(size, {victims[0]: step, victims[1]: step + rng.randint(0, 3)})
        ended = run_each(lambda comm, seed=seed: survive(comm, seed), worlds).values()
        dead = {rank for rank in victims if backend_of(worlds[rank]).died_at is not None}
        assert dead, f"seed {seed}: no rank died"
        for rank, (_, error) in enumerate(ended):
            if rank not in dead:
                assert isinstance(error, PeerLost), f"seed {seed}, rank {rank}: {error!r}"
                assert set(error.ranks) <= dead, f"seed {seed}, rank {rank}: {error}"
                # A later call names all dead ranks.
                again = ended_by(PeerLost, worlds[rank].barrier)
                assert set(again.ranks) == dead, f"seed {seed}, rank {rank}: {again}"
        close_all(worlds)


@pytest.mark.parametrize("verb", ["recv", "probe", "recv from ANY", "send", "sendrecv", "recv_bytes"])
def test_a_death_ends_messages_that_need_the_dead(verb: str) -> None:
    calls: dict[str, Callable[[uni.Communicator], Any]] = {
        "recv": lambda c: c.recv(np.empty(3), 2),
        "probe": lambda c: c.probe(2),
        "recv from ANY": lambda c: c.recv(np.empty(3)),
        "send": lambda c: c.send(np.ones(100_000), 2),
        "sendrecv": lambda c: c.sendrecv(np.ones(100_000), 2, np.empty(3), 2),
        "recv_bytes": lambda c: c.recv_bytes(2, 9),
    }
    begun = threading.Barrier(3)

    def program(comm: uni.Communicator) -> Any:
        begun.wait(PATIENCE_S)
        if comm.rank == 2:
            backend_of(comm).kill("out of memory")
            return None
        with ends_in_time():
            return [ended_by(PeerLost, lambda: calls[verb](comm))]

    worlds = reference_local(3)
    for (error,) in run_each(program, worlds).values()[:2]:
        assert error.ranks == (2,)
        assert "rank 2" in str(error)
        assert "out of memory" in str(error)
    # Living ranks still exchange messages.
    pair = [worlds[0].start.recv_bytes(1), worlds[1].start.send(b"alive", 0)]
    assert uni.wait_all(pair, PATIENCE_S)[0] == b"alive"
    close_all(worlds)


def test_a_death_ends_started_works_without_a_waiting_thread() -> None:
    worlds = reference_local(3)
    works = [world.start.all_reduce(np.ones(10)) for world in worlds[:2]]
    receive = worlds[0].start.recv_bytes(2)
    with ends_in_time():
        backend_of(worlds[2]).kill()
        for work in (*works, receive):
            assert ended_by(PeerLost, lambda work=work: work.wait(PATIENCE_S)).ranks == (2,)
    close_all(worlds)


def test_a_death_ends_groups_of_the_dead_and_leaves_the_others() -> None:
    def program(world: uni.Communicator) -> Any:
        pair = world.split(world.rank // 2)
        assert pair is not None
        if world.rank == 3:
            world.recv_bytes(0)
            backend_of(world).kill()
            return None
        if world.rank == 0:
            for other in (1, 2):
                world.recv_bytes(other)
            world.send(b"die", 3)
        else:
            world.send(b"split has ended here", 0)
        if world.rank == 2:
            return ended_by(PeerLost, pair.barrier).ranks
        ended_by(PeerLost, lambda: world.recv_bytes(3, 7))
        return pair.all_reduce(world.rank)

    worlds = reference_local(4)
    assert run_each(program, worlds).values() == [1, 1, (3,), None]
    close_all(worlds)


# -- a rank leaves ----------------------------------------------------------------------------------------


def test_a_wait_for_a_rank_that_leaves_ends_with_the_cause() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            comm.recv_bytes(0)
            comm.close()
            return None
        waits = {
            0: lambda: comm.recv_bytes(1),
            2: lambda: comm.probe(1),
            3: lambda: comm.all_reduce(np.ones(5)),
        }
        if comm.rank == 0:
            comm.send(b"you may go", 1)
        with ends_in_time():
            error = ended_by(PeerLost, waits[comm.rank])
        return error.ranks, "left" in error.cause

    worlds = uni.local(4)
    assert run_each(program, worlds).values() == [((1,), True), None, ((1,), True), ((1,), True)]
    close_all(worlds)


@pytest.mark.parametrize("first", list(Lane))
def test_a_rank_has_left_when_both_lanes_say_so(first: Lane) -> None:
    """Data and returned credit use different lanes: the goodbye of one lane may overtake the other lane."""
    worlds = uni.local(2)
    group = worlds[0]._group
    work = worlds[0].start.recv_bytes(1)
    group.on_control_message(1, Goodbye(group.context, first))
    ended_by(DeadlineExceeded, lambda: work.wait(0.05))
    group.on_control_message(1, Goodbye(group.context, Lane(1 - first)))
    assert "left" in ended_by(PeerLost, lambda: work.wait(PATIENCE_S)).cause
    close_all(worlds)


def test_what_was_sent_before_leaving_stays_receivable() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            for i in range(5):
                comm.send(np.array([i]), 0, tag=i % 2)
            return None
        ended_by(PeerLost, lambda: comm.recv_bytes(1, 9))  # the sender has left
        got = np.empty(1, np.int64)
        order = []
        for tag in (1, 0, 1, 0, 0):
            comm.recv(got, 1, tag)
            order.append(int(got[0]))
        ended_by(PeerLost, lambda: comm.recv(got, 1))
        return order

    assert run_ranks(program, 2)[0] == [1, 0, 3, 2, 4]


@pytest.mark.parametrize("collective", list(NAMED))
def test_a_rank_that_has_done_its_part_may_leave(collective: str) -> None:
    """No rank waits until the others are done, and none fails because another was faster."""

    class Chosen(random.Random):
        """A random generator that always chooses this collective."""

        def choice(self, seq: Any) -> Any:
            return collective if collective in seq else super().choice(seq)

    for seed in range(12):
        rng = random.Random(f"{collective} {seed}")
        size = rng.randint(2, 7)
        ended = run_ranks(lambda comm, seed=seed: one_collective(comm, Chosen(seed), 0), size, config=SMALL)
        assert list(ended) == [None] * size, f"seed {seed}: {ended}"


def test_leaving_a_group_is_not_leaving_the_world() -> None:
    def program(world: uni.Communicator) -> Any:
        group = world.sub([0, 1])
        if world.rank == 1:
            group.close()
            ended_by(ClosedError, group.barrier)
        else:
            error = ended_by(PeerLost, group.barrier)
            assert (error.ranks, error.communicator) == ((1,), "world.sub(0,1)")
        return world.all_reduce(1)

    assert list(run_ranks(program, 2)) == [2, 2]


def test_children_leave_with_their_parent() -> None:
    def program(world: uni.Communicator) -> Any:
        child = world.split(0)
        assert child is not None
        grandchild = child.split(0)
        assert grandchild is not None
        if world.rank == 1:
            world.recv_bytes(0)
            world.close()
            return [
                isinstance(ended_by(ClosedError, comm.barrier), ClosedError) for comm in (child, grandchild)
            ]
        world.send(b"go", 1)
        return [ended_by(PeerLost, comm.barrier).ranks for comm in (grandchild, child, world)]

    worlds = uni.local(2)
    assert run_each(program, worlds).values() == [[(1,)] * 3, [True, True]]
    close_all(worlds)


def test_a_communicator_that_is_dropped_is_lost_to_the_others() -> None:
    worlds = uni.local(3)
    works = [worlds[0].start.recv_bytes(2), worlds[1].start.all_reduce(1)]
    with ends_in_time():
        worlds.pop()
        gc.collect()
        for work in works:
            error = ended_by(PeerLost, lambda work=work: work.wait(PATIENCE_S))
            assert error.ranks == (2,)
            assert "left" in error.cause
    close_all(worlds)


# -- the root cause wins ----------------------------------------------------------------------------------


@contextmanager
def delivery_blocked(world: uni.Communicator, by: uni.Communicator) -> Iterator[Callable[[], None]]:
    """Block the delivery to a rank: a thread is busy with one message, and later ones queue behind it.

    Yields a function that ends the block.
    """
    group, is_busy, may_go = world._group, threading.Event(), threading.Event()
    on_control_message = group.on_control_message

    def slowly(sender: int, message: Any) -> None:
        if isinstance(message, StallQuery) and not is_busy.is_set():
            is_busy.set()
            may_go.wait(PATIENCE_S)
        on_control_message(sender, message)

    group.on_control_message = slowly  # type: ignore[method-assign]
    query = StallQuery(group.context, 1 << 40, bytes(16))
    talker = threading.Thread(target=by._group.control.send, args=([world.rank], query))
    talker.start()
    assert is_busy.wait(PATIENCE_S)
    try:
        yield may_go.set
    finally:
        may_go.set()
        talker.join(PATIENCE_S)


@pytest.mark.parametrize("what", ["a message", "a collective"])
def test_an_abort_is_reported_before_the_loss_of_its_rank(what: str) -> None:
    """Rank 0 fails, aborts and leaves while delivery to rank 1 is blocked: its abort is reported first."""
    worlds = uni.local(3)
    work: uni.Work[Any] = worlds[1].start.recv_bytes(0) if what == "a message" else worlds[1].start.barrier()
    with delivery_blocked(worlds[1], by=worlds[2]) as let_go:
        with pytest.raises(ZeroDivisionError), worlds[0]:
            raise ZeroDivisionError("by rank 0")
        ended_by(DeadlineExceeded, lambda: work.wait(0.05))  # no loss is reported yet
        let_go()
        error = ended_by(PeerAborted, lambda: work.wait(PATIENCE_S))
    assert error.rank == 0
    assert "ZeroDivisionError: by rank 0" in str(error)
    close_all(worlds)


def test_a_survivor_that_leaves_because_of_a_death_is_not_the_culprit() -> None:
    """Rank 3 dies; rank 0 learns of it and leaves; rank 1 waits for rank 0, and its error names rank 3."""
    worlds = reference_local(4)
    works: list[uni.Work[Any]] = [
        worlds[1].start.recv_bytes(0),
        worlds[2].start.all_reduce(np.ones(3)),
        worlds[2].start.send(np.ones(100_000), 0),
    ]
    waiting = worlds[0].start.recv_bytes(3)
    with delivery_blocked(worlds[1], by=worlds[2]) as let_go:
        backend_of(worlds[3]).kill("struck by lightning")
        with pytest.raises(PeerLost), worlds[0]:
            waiting.wait(PATIENCE_S)
        let_go()
        for work in works:
            error = ended_by(PeerLost, lambda work=work: work.wait(PATIENCE_S))
            assert error.ranks == (3,)
            assert "struck by lightning" in str(error)
    close_all(worlds)


@pytest.mark.parametrize("what", ["a message", "a collective"])
def test_a_cause_in_the_world_explains_a_missing_rank_in_a_group(what: str) -> None:
    """Rank 0 fails; rank 1 therefore leaves before it has made the group in which rank 2 waits for it."""

    def program(world: uni.Communicator) -> Any:
        if world.rank == 0:
            for peer in (1, 2):
                world.recv_bytes(peer)
            raise ProgramError("the root of it")
        group = world.sub([1, 2]) if world.rank == 2 else world
        work = group.start.recv_bytes(0) if what == "a message" else group.start.barrier()
        world.send(b"ready", 0)
        return work.wait(PATIENCE_S)

    for _ in range(10):
        ended = run_ranks(program, 3)
        for error in ended[1:]:
            assert isinstance(error, PeerAborted), repr(error)
            assert error.rank == 0
            assert "ProgramError: the root of it" in str(error)


def test_a_sendrecv_of_which_half_has_ended_ends_too() -> None:
    """At the interruption the receive has matched; the send, which has not, must not go on waiting."""

    def program(comm: uni.Communicator) -> Any:
        turns = 0
        while True:
            if comm.rank == 3 and turns == 20:
                raise ProgramError("enough of it")
            right, left = (comm.rank + 1) % 4, (comm.rank - 1) % 4
            comm.sendrecv(np.ones(20), right, np.empty(20), left)
            turns += 1

    for _ in range(40):
        for error in run_ranks(program, 4, config=Config(eager_bytes=16))[:3]:
            assert isinstance(error, PeerAborted)
            assert error.rank == 3


@pytest.mark.parametrize("what", ["a message", "a collective"])
def test_a_rank_that_dies_while_it_waits_for_a_control_message_ends_too(what: str) -> None:
    """It has seen that rank 0 has left, but never gets the cause."""
    worlds = reference_local(3)
    work: uni.Work[Any] = worlds[1].start.recv_bytes(0) if what == "a message" else worlds[1].start.barrier()
    with delivery_blocked(worlds[1], by=worlds[2]) as let_go:
        worlds[0].close()
        backend_of(worlds[1]).kill()
        let_go()
        ended_by(ClosedError, lambda: work.wait(PATIENCE_S))
    close_all(worlds)


def test_the_cause_is_passed_on_through_a_chain_of_ranks_that_leave() -> None:
    """Each rank waits for the next one. The last dies, and all leave one after another: all name the last."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == comm.size - 1:
            for peer in range(comm.size - 1):
                comm.recv_bytes(peer, 1)
            backend_of(comm).kill()
            return None
        with comm:
            comm.send(b"ready", comm.size - 1, 1)
            comm.recv_bytes(comm.rank + 1, 2)
        return None

    for _ in range(5):
        ended = run_each(program, reference_local(6))
        for error in ended[:-1]:
            assert isinstance(error, PeerLost)
            assert error.ranks == (5,)
