"""Messages that wait for long or beside members that have left stay in the engine; so do waits for many."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, found, outcome, world
from tests.support.metronome import stopwatch
from tests.support.oracle import Notes
from tests.support.ranks import PATIENCE_S, run_each, wait_until

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.errors import DeadlineExceeded, PeerLost, UsageError

__all__ = ["world"]

STALL_S = 0.02
# Python adopts a stalled collective soon, a message once its stall is logged.
STALLS = {"stall_query_s": STALL_S, "deadlock_after_s": 0}


def counts(comm: Communicator) -> tuple[int, int]:
    """The numbers of calls that ended in the engine, and that Python adopted."""
    native = comm._group.native
    assert native is not None
    return native.ended, native.adopted


# -- messages that wait -------------------------------------------------------------------------


def test_receives_that_wait_for_long_are_not_adopted(world: MakeWorld) -> None:
    comms = world(2, **STALLS)
    has_waited = threading.Event()

    def program(comm: Communicator) -> int:
        bufs = np.empty(300)
        if comm.rank == 0:
            works = [comm.start.recv(bufs[i : i + 1], 1, i) for i in range(300)]
            time.sleep(20 * STALL_S)
            has_waited.set()
            uni.wait_all(works)
            assert bufs.tolist() == [float(i) for i in range(300)]
        else:
            assert has_waited.wait(PATIENCE_S)
            for i in reversed(range(300)):
                comm.send(np.array([float(i)]), 0, i)
        return counts(comm)[1]

    assert run_each(program, list(comms)).values() == [0, 0]


def test_a_blocking_receive_waits_in_the_engine_until_it_may_be_a_deadlock(world: MakeWorld) -> None:
    comms = world(2, **STALLS)

    def program(comm: Communicator) -> int:
        if comm.rank == 0:
            comm.recv(np.empty(1), 1)
        else:
            time.sleep(10 * STALL_S)
            comm.send(np.ones(1), 0)
        return counts(comm)[1]

    assert run_each(program, list(comms)).values() == [0, 0]


def test_the_deadline_of_a_message_ends_it_although_no_thread_waits(world: MakeWorld) -> None:
    comms = world(2, **STALLS)
    work = comms[0].start.recv(np.empty(1), 1, timeout=0.05)
    wait_until(lambda: work._has_ended())
    with pytest.raises(DeadlineExceeded, match=r"recv did not end within 0\.05 s"):
        work.wait()


# -- waits for many -----------------------------------------------------------------------------


def test_one_adopted_work_leaves_the_wait_for_the_others_in_the_engine(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank
        for turn in range(20):
            bufs = np.zeros(8)
            works = [comm.start.recv(bufs[i : i + 1], other, i) for i in range(8)]
            adopted = turn % 8
            works[adopted]._adopt(True)
            comm.barrier()
            notes.check(
                isinstance(outcome(lambda w=works: uni.wait_any(w, timeout=0.001)), DeadlineExceeded), "none"
            )
            comm.barrier()
            order = list(range(8))
            random.Random(turn).shuffle(order)
            for tag in order:
                comm.send(np.array([tag + 1.0]), other, tag)
                notes.expect(uni.wait_any(works), works.index(works[tag]), f"turn {turn}, tag {tag}")
                notes.expect(bufs[tag], tag + 1.0, f"turn {turn}, tag {tag}")
                works[tag].wait()
                works[tag] = comm.start.recv(np.empty(1), other, 1000 + tag)  # does not end
                comm.barrier()
            for tag in range(8):
                comm.send(np.ones(1), other, 1000 + tag)
            ended: set[int] = set()
            while len(ended) < 8:
                ended |= set(uni.wait_some([work for work in works if not work._has_ended()] or works))
                ended = {i for i, work in enumerate(works) if work._has_ended()}
            uni.wait_all(works)
        notes.check(counts(comm)[1] == 20, f"{counts(comm)[1]} were adopted")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("count", [5, 64, 65, 1000, 5000])
def test_as_completed_gives_many_works_as_they_end(world: MakeWorld, count: int) -> None:
    comms = world(2, **NO_STALL)
    order = list(range(count))
    random.Random(count).shuffle(order)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            bufs = np.zeros(count)
            works = {comm.start.recv(bufs[i : i + 1], 1, i): i for i in range(count)}
            given = []
            for work in uni.as_completed(list(works)):
                work.wait()
                given.append(works[work])
                comm.send(np.ones(1), 1, count)  # one after another
            notes.expect(given, order, "each once, as they ended")
            notes.expect(bufs, np.arange(count) + 1.0, "what they received")
        else:
            for i in order:
                comm.send(np.array([i + 1.0]), 0, i)
                comm.recv(np.empty(1), 0, count)
        return notes

    assert found(comms, program) == []


def test_as_completed_of_many_keeps_its_deadline_and_no_work(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)
    other = comms[1]
    works = [comms[0].start.recv(np.empty(1), 1, i) for i in range(500)]
    for i in range(250):
        other.send(np.ones(1), 0, i)
    seen = [weakref.ref(work) for work in works]
    given = uni.as_completed(works, timeout=0.3)
    first = [next(given) for _ in range(250)]
    assert first == works[:250] or set(first) == set(works[:250])
    for work in first:
        work.wait()
    del works[:250], first, work
    with pytest.raises(DeadlineExceeded, match=r"none of 250 works ended within 0\.3 s"):
        next(given)
    gc.collect()
    assert sum(one() is not None for one in seen) == 250
    for i in range(250, 500):
        other.send(np.ones(1), 0, i)
    assert len(list(uni.as_completed(works))) == 250


def test_an_abandoned_as_completed_removes_its_observers(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)
    works = [comms[0].start.recv(np.empty(1), 1, i) for i in range(300)]
    comms[1].send(np.ones(1), 0, 7)
    given = uni.as_completed(works)
    assert next(given) is works[7]
    comms[1].send(np.ones(1), 0, 8)
    assert next(given) is works[8]
    del given
    for i in (set(range(300))) - {7, 8}:
        comms[1].send(np.ones(1), 0, i)
    uni.wait_all(works)


# -- members that have left ---------------------------------------------------------------------


def leave(comms: list[Communicator], rank: int) -> None:
    """Close one rank, and wait until all others have its goodbye."""
    comms[rank].close()
    for comm in comms:
        if comm is not comms[rank] and not comm._group.is_closed:
            wait_until(lambda comm=comm: rank in comm._group.state.left)


def test_messages_between_others_stay_in_the_engine_when_a_member_has_left(world: MakeWorld) -> None:
    comms = world(4, **NO_STALL)
    comms[3].send(np.array([33.0]), 0, 5)  # before the rank leaves
    comms[3].send(np.array([34.0]), 0, 6)
    leave(comms, 3)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 3:
            return notes
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        before, buf = counts(comm), np.empty(1)
        for turn in range(20):
            comm.sendrecv(np.array([comm.rank + turn]), right, np.empty(1, int), left)
            work = comm.start.recv(buf, left, 9)
            comm.send(np.array([10.0 * comm.rank + turn]), right, 9)
            work.wait()
            notes.expect(buf[0], 10.0 * left + turn, f"turn {turn}")
            work = comm.start.recv(buf, uni.ANY, 10)
            comm.send(np.array([comm.rank + 0.5]), right, 10)
            notes.expect(work.wait().source, left, "wildcard")
        now = counts(comm)
        notes.expect((now[0] - before[0], now[1] - before[1]), (100, 0), "in the engine, adopted")
        return notes

    assert found(comms, program) == []
    # Earlier messages of the rank that left are received; later receives from it fail.
    buf = np.empty(1)
    assert comms[0].recv(buf, 3, 5).source == 3
    assert buf[0] == 33.0
    assert comms[0].recv(buf, uni.ANY, 6).source == 3
    for call in (
        lambda: comms[0].recv(buf, 3),
        lambda: comms[0].send(buf, 3),
        lambda: comms[0].sendrecv(buf, 1, np.empty(1), 3),
        lambda: comms[0].start.recv(buf, 3).wait(),
        lambda: comms[0].all_reduce(1),
    ):
        error = outcome(call)
        assert isinstance(error, PeerLost), error
        assert error.ranks == (3,)


def test_a_rank_that_leaves_ends_only_the_receives_that_wait_for_it(world: MakeWorld) -> None:
    comms = world(3, **NO_STALL)
    first, second, third = (np.empty(1) for _ in range(3))
    of_one, of_two = comms[0].start.recv(first, 1, 1), comms[0].start.recv(second, 2, 2)
    of_any = comms[0].start.recv(third, uni.ANY, 3)
    leave(comms, 2)
    with pytest.raises(PeerLost, match="rank 2"):
        of_two.wait()
    assert not of_one.done()
    assert not of_any.done()
    comms[1].send(np.array([4.0]), 0, 1)
    comms[1].send(np.array([5.0]), 0, 3)
    assert (of_one.wait().source, of_any.wait().source) == (1, 1)
    assert (first[0], third[0]) == (4.0, 5.0)
    assert counts(comms[0])[1] == 1
    # Once no rank is left that could send, a receive from any source ends, too.
    of_any, of_one = comms[0].start.recv(third, uni.ANY, 3), comms[0].start.recv(first, 1, 1)
    leave(comms, 1)
    for work in (of_any, of_one):
        with pytest.raises(PeerLost):
            work.wait()
    assert isinstance(outcome(lambda: comms[0].recv(first)), PeerLost)
    # The rank may still send to itself.
    comms[0].sendrecv(np.array([6.0]), 0, first, 0)
    assert first[0] == 6.0


def test_a_waiting_thread_learns_of_a_rank_that_leaves(world: MakeWorld) -> None:
    comms = world(3, **NO_STALL)
    ended: dict[str, Any] = {}

    def receive(src: Any) -> None:
        ended[str(src)] = outcome(lambda: comms[0].recv(np.empty(1), src, 4))

    threads = [threading.Thread(target=receive, args=(src,)) for src in (1, 2)]
    for thread in threads:
        thread.start()
    leave(comms, 2)
    threads[1].join(PATIENCE_S)
    assert isinstance(ended["2"], PeerLost), ended
    assert "1" not in ended
    comms[1].send(np.ones(1), 0, 4)
    threads[0].join(PATIENCE_S)
    assert ended["1"].source == 1


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_refused_message_ends_a_sendrecv_whose_own_message_waits(
    world: MakeWorld, kind: str, is_started: bool
) -> None:
    comms = world(2, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, there = Notes(), 1 - comm.rank
        if comm.rank == 1:
            comm.send(np.arange(9.0), there, 5)
            comm.recv(np.empty(1), there, 6)  # until rank 0 has the error
            notes.check(comm.probe(there, 5, timeout=0) is None, "rank 0's message was withdrawn")
            return notes
        long, short = np.ones(1 << 18), np.empty(3)
        verbs = comm.start if is_started else comm
        with stopwatch() as seconds:
            error = outcome(lambda: getattr(verbs.sendrecv(long, there, short, there, 5), "wait", list)())
            notes.check(isinstance(error, UsageError) and "72 bytes" in str(error), error)
            notes.check(seconds() < 5, "at once, not after", seconds())
        notes.check(comm.recv_bytes(there, 5) == np.arange(9.0).tobytes(), "the message is still there")
        comm.send(np.ones(1), there, 6)
        return notes

    assert found(comms, program) == []
