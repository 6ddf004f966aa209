"""Deadlocks between processes: an error if no rank can end the waits, and only then."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.processes import run_processes

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.comm.deadlock import ANY_TAG, RankState, Wait, cycle_of, deadlocked
from unisono.config import Config

QUICK = Config(deadlock_after_s=0.5, stall_query_s=0.1)
LONG = 1 << 17  # float64: beyond the eager limit

# -- the decision ----------------------------------------------------------------------------------------


def recv(number: int, *peers: int, tag: int = 0, **rest: Any) -> Wait:
    return Wait(number, "recv", 7, peers, tag=tag, **rest)


def send(number: int, peer: int, tag: int = 0) -> Wait:
    return Wait(number, "send", 7, (peer,), tag=tag, is_send=True)


def of(*reports: RankState) -> dict[int, RankState]:
    return {report.rank: report for report in reports}


def test_a_cycle_of_waits_is_a_deadlock_and_so_is_a_wait_for_it():
    reports = of(
        *(RankState(rank, (recv(rank, (rank + 1) % 3),)) for rank in range(3)), RankState(3, (recv(9, 1),))
    )
    assert deadlocked(reports) == {0, 1, 2, 3}
    assert [rank for rank, _ in cycle_of(reports, 3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        RankState(1, (recv(2, 0),), helpers=("thread worker",)),
        RankState(1, (recv(2, 0, is_limited=True),)),
        RankState(1, (recv(2, 2),)),  # waits for a rank that does not wait
        RankState(1, (recv(2, 0), recv(3, 2))),  # one of its threads does not wait
        RankState(1, (recv(2, 0),), sends=((7, 0, 0),)),  # the message is already sent
        RankState(1, (recv(2, 0, 2, is_any=True),)),
        RankState(1, ()),
    ],
)
def test_a_rank_that_can_still_be_helped_is_in_no_deadlock(other):
    assert (
        deadlocked(of(RankState(0, (recv(1, 1),)), other, RankState(2, (), helpers=("thread MainThread",))))
        == set()
    )


@pytest.mark.parametrize(
    ("pending", "is_met"),
    [((7, 0, 5), True), ((7, -1, 5), True), ((7, 0, ANY_TAG), True), ((7, 0, 6), False), ((8, 0, 5), False)],
)
def test_messages_meet_by_context_rank_and_tag(pending, is_met):
    receiving = RankState(1, (Wait(2, "recv", pending[0], (0,), tag=pending[2]),), receives=(pending,))
    sending = RankState(0, (send(1, 1, tag=5),), sends=((7, 1, 5),))
    assert (deadlocked(of(sending, receiving)) == set()) == is_met


def test_a_collective_waits_for_the_ranks_that_have_not_called_it():
    barrier = Wait(1, "barrier", 7, (1,), sequence=4)
    for following, lost in ((4, {0, 1}), (5, set()), (3, {0, 1})):
        late = RankState(1, (recv(2, 0),), next_sequences={7: following})
        assert deadlocked(of(RankState(0, (barrier,)), late)) == lost


# -- between processes -----------------------------------------------------------------------------------


def send_on(comm: Communicator) -> None:
    comm.send(np.ones(LONG), (comm.rank + 1) % comm.size)


def recv_from(comm: Communicator) -> None:
    comm.recv(np.empty(LONG), (comm.rank - 1) % comm.size)


def of_any(comm: Communicator) -> None:
    comm.recv(np.empty(3))


def mixed(comm: Communicator) -> None:
    """One rank sends a message that is not received; the next waits for a message that is not sent."""
    if comm.rank == 0:
        comm.send(np.ones(LONG), 1, tag=1)
    elif comm.rank == 1:
        comm.recv(np.empty(LONG), 0, tag=2)
    else:
        comm.recv_bytes(0, tag=3)


def collective(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3)) if comm.rank == 0 else comm.recv(np.empty(3), 0)


def on_groups(comm: Communicator) -> None:
    """Collectives on two groups, in different orders."""
    groups = [comm.split(0), comm.split(0)]
    for group in groups if comm.rank == 0 else groups[::-1]:
        assert group is not None
        group.barrier()


def started(comm: Communicator) -> None:
    """A started operation ends no wait if it matches none."""
    other = comm.start.recv(np.empty(3), (comm.rank + 1) % comm.size, tag=77)
    try:
        comm.start.send(np.ones(LONG), (comm.rank + 1) % comm.size).wait()
    finally:
        other.cancel()


def joined(comm: Communicator) -> None:
    """The main thread joins the thread that waits."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            recv_from(comm)
        except uni.UnisonoError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise errors[0]


CYCLES = {
    "sends": (send_on, 2, "send on"),
    "receives": (recv_from, 2, "recv on"),
    "three sends": (send_on, 3, "rank 2 waits for rank 0 in send"),
    "any": (of_any, 3, "waits for any rank in recv"),
    "mixed": (mixed, 2, "rank 0 waits for rank 1 in send"),
    "a collective and a receive": (collective, 2, "all_reduce #0"),
    "groups in another order": (on_groups, 2, "barrier #0"),
    "started": (started, 2, "send on"),
    "a thread that is joined": (joined, 2, "recv on"),
    "alone": (recv_from, 1, "rank 0 waits for rank 0 in recv"),
}


def ended(comm: Communicator, program: Callable[[Communicator], None]) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        program(comm)
    except uni.UnisonoError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def check_deadlock(results: list[Any], words: str) -> None:
    assert any(words in text for _, text, _ in results), results
    for kind, text, _ in results:
        assert kind == "Deadlock", text
        assert "no rank can go on" in text
    # The first caller has waited for deadlock_after_s; the others may have called later.
    assert max(elapsed_s for _, _, elapsed_s in results) >= 0.45


@pytest.mark.parametrize("what", CYCLES)
def test_ranks_that_wait_for_each_other_get_a_deadlock_error(what):
    program, size, words = CYCLES[what]
    check_deadlock(run_processes(ended, size, program, kind="shm", config=QUICK), words)


@pytest.mark.parametrize("kind", ["tcp", "quic", "iroh", pytest.param("gloo", marks=pytest.mark.more)])
@pytest.mark.parametrize("what", ["sends", "a collective and a receive"])
def test_ranks_that_wait_for_each_other_get_a_deadlock_error_on_every_backend(what, kind):
    program, size, words = CYCLES[what]
    check_deadlock(run_processes(ended, size, program, kind=kind, config=QUICK), words)


def test_the_communicator_works_on_after_a_deadlock_of_messages():
    def program(comm: Communicator) -> tuple[str, float]:
        kind, _, _ = ended(comm, send_on)
        return kind, float(comm.all_reduce(comm.rank + 1.0))

    assert run_processes(program, 2, config=QUICK) == [("Deadlock", 3.0)] * 2


def test_receives_under_way_beside_a_deadlock_stay_in_the_engine():
    def program(comm: Communicator) -> tuple[str, int]:
        other = 1 - comm.rank
        works = [comm.start.recv(np.empty(1), other, 100 + i) for i in range(50)]
        kind, _, _ = ended(comm, lambda comm: comm.recv(np.empty(3), other, 7))
        for i in range(50):
            comm.send(np.ones(1), other, 100 + i)
        uni.wait_all(works)
        adopted = comm._group.native.adopted
        comm.barrier()  # a wait for a rank that leaves is adopted, too
        return kind, adopted

    assert run_processes(program, 2, config=QUICK) == [("Deadlock", 1)] * 2


# -- no error where it is not certain --------------------------------------------------------------------


def late(comm: Communicator) -> None:
    """Rank 0 computes in Python, and then makes its call."""
    if comm.rank == 0:
        time.sleep(1.6)
        comm.send(np.ones(LONG), 1)
    else:
        comm.recv(np.empty(LONG), 0)


def another_thread(comm: Communicator) -> None:
    """Another thread, which does not wait, sends the message."""
    helper = threading.Timer(1.6, lambda: comm.send(np.ones(3), 1 - comm.rank))
    helper.start()
    comm.recv(np.empty(3), 1 - comm.rank)
    helper.join()


def limited(comm: Communicator) -> None:
    """Rank 0's wait has a deadline, after which it sends what rank 1 waits for."""
    if comm.rank == 0:
        with pytest.raises(uni.DeadlineExceeded):
            comm.recv(np.empty(3), 1, timeout=1.6)
        comm.send(np.ones(3), 1)
    else:
        comm.recv(np.empty(3), 0)


def served(comm: Communicator) -> None:
    """A handler of a remote call sends the message."""
    agent = uni.rpc.Agent(comm)
    comm.barrier()
    if comm.rank == 0:
        agent.register("go", lambda: comm.send(np.ones(3), 1))
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(1.6, lambda: agent.call(0, "go")).start()
        comm.recv(np.empty(3), 0)
    comm.barrier()


def signalled(comm: Communicator) -> None:
    """The main thread waits without a limit, and a signal handler of the program sends the message."""
    stop = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    server = threading.Thread(target=lambda: comm.recv(np.empty(3), 1 - comm.rank))
    server.start()
    threading.Thread(target=kill_later, args=(os.getpid(),), name="unisono-not-to-be-counted").start()
    stop.wait()
    signal.signal(signal.SIGUSR1, before)
    comm.send(np.ones(3), 1 - comm.rank)
    server.join()


def kill_later(pid: int) -> None:
    time.sleep(1.6)
    os.kill(pid, signal.SIGUSR1)


UNCERTAIN = {
    "late": late,
    "another thread": another_thread,
    "limited": limited,
    "served": served,
    "signalled": signalled,
}


@pytest.mark.parametrize("what", UNCERTAIN)
def test_waits_that_a_thread_may_still_end_are_no_deadlock(what):
    for result in run_processes(ended, 2, UNCERTAIN[what], config=QUICK):
        assert result == ("", "", 0.0), result


@pytest.mark.parametrize("what", ["another thread", "limited"])
def test_a_cycle_that_is_not_certain_is_logged_once(what):
    def program(comm: Communicator) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("unisono").addHandler(handler)
        UNCERTAIN[what](comm)
        return [line for line in said if "cycle of waits" in line]

    lines = [line for said in run_processes(program, 2, config=QUICK) for line in said]
    assert len(lines) == 1, lines
    assert "rank 0 waits for rank 1 in recv" in lines[0]
    assert "rank 1 waits for rank 0 in recv" in lines[0]
    assert ("rank 0 waits with a timeout" if what == "limited" else "has thread") in lines[0]


def test_a_long_message_under_way_is_no_deadlock():
    """Both sides wait for each other until the message is complete, and are checked repeatedly."""
    config = Config(deadlock_after_s=0.01, eager_bytes=64)

    def program(comm: Communicator) -> int:
        x, other = np.full(1 << 20, comm.rank, np.float64), np.empty(1 << 20)
        began, turns, is_over = time.monotonic(), 0, False
        while not is_over:
            comm.send(x, 1) if comm.rank == 0 else comm.recv(other, 0)
            comm.sendrecv(x, 1 - comm.rank, other, 1 - comm.rank, tag=3)
            assert other[-1] == 1 - comm.rank
            time.sleep(0.03 * ((turns + comm.rank) % 2))
            turns += 1
            is_over = bool(comm.broadcast(np.array([time.monotonic() - began > 2]), 0)[0])
        return turns

    results = run_processes(program, 2, kind="tcp", config=config)
    assert all(isinstance(turns, int) for turns in results), results


def test_deadlock_detection_can_be_turned_off():
    def program(comm: Communicator) -> None:
        comm.recv(np.empty(3), 1 - comm.rank, timeout=1.5)

    for kind, _, _ in run_processes(ended, 2, program, config=Config(deadlock_after_s=0, stall_query_s=0.1)):
        assert kind in ("DeadlineExceeded", "PeerLost")  # the goodbye of a rank that ended a moment earlier
