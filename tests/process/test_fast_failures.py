"""Failures on the fast path: mismatches, deadlines, interruptions, ranks that die or leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, calls_ended, found, outcome, world
from tests.support.metronome import stopwatch
from tests.support.oracle import Notes
from tests.support.ranks import run_each

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.errors import (
    ClosedError,
    CollectiveMismatch,
    DeadlineExceeded,
    PeerAborted,
    PeerLost,
)

__all__ = ["world"]


# -- failures ---------------------------------------------------------------------------------------------


def step(comm: Communicator) -> Any:
    """One line for all calls, because only calls from the same line are known calls."""
    return comm.all_reduce(np.ones(4))


def warm(comm: Communicator, times: int = 5) -> None:
    for _ in range(times):
        step(comm)
        comm.barrier()


def test_a_mismatch_is_seen_by_all_and_shows_both_lines(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        calls = (lambda: comm.all_reduce(np.ones(4)), lambda: comm.all_reduce(np.ones(5)))
        for call in calls:
            for _ in range(4):
                call()
        before = calls_ended(comm)
        error = outcome(calls[comm.rank])
        assert calls_ended(comm) == before
        return error, outcome(calls[0])

    ended = run_each(program, list(comms)).values()
    for error, afterwards in ended:
        assert isinstance(error, CollectiveMismatch)
        assert isinstance(afterwards, CollectiveMismatch)
        assert "float64[4]" in error.report
        assert "float64[5]" in error.report
        assert error.report.count("test_fast_failures.py:") == 2


@pytest.mark.parametrize("other", ["barrier", "broadcast", "all_gather"])
def test_another_collective_is_a_mismatch_never_a_wrong_sum(world: MakeWorld, other: str) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        def call(name: str) -> Any:
            return comm.barrier() if name == "barrier" else getattr(comm, name)(np.ones(4))

        for name in ("all_reduce", other) * 4:
            call(name)
        with stopwatch() as seconds:
            error = outcome(lambda: call("all_reduce" if comm.rank else other))
            if comm.rank == 0 and other == "broadcast":
                assert isinstance(error, np.ndarray | CollectiveMismatch)
                error = outcome(lambda: call("barrier"))  # a root runs ahead, up to its next call
            assert seconds() < 2
        return [error]

    for (error,) in run_each(program, list(comms)).values():
        assert isinstance(error, CollectiveMismatch)
        assert "all_reduce" in error.report
        assert other in error.report


def test_a_rank_that_leaves_ends_a_waiting_call(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        warm(comm)
        if comm.rank == 1:
            comm.close()
            return None
        return [outcome(lambda: warm(comm))]

    (error,) = run_each(program, list(comms)).values()[0]
    assert isinstance(error, PeerLost)
    assert error.ranks == (1,)
    assert "left" in str(error)
    assert "#10" in str(error)


def test_an_abort_ends_a_waiting_call(world: MakeWorld) -> None:
    comms = world(3)
    warmed = threading.Barrier(3)

    def program(comm: Communicator) -> Any:
        warm(comm)
        warmed.wait()
        if comm.rank == 1:
            comm.abort("enough")
        return [outcome(lambda: step(comm)) for _ in range(2)]

    for rank, errors in enumerate(run_each(program, list(comms)).values()):
        for error in errors:
            assert isinstance(error, PeerAborted), (rank, error)
            assert "enough" in str(error)


def test_a_close_in_another_thread_ends_a_waiting_call(world: MakeWorld) -> None:
    comms = world(2)
    warmed = threading.Barrier(2)

    def program(comm: Communicator) -> Any:
        warm(comm)
        warmed.wait()
        if comm.rank == 1:
            return None
        flights = comm._group.call_log
        sequence = flights.next

        def close_when_it_waits() -> None:
            while flights.next == sequence:
                time.sleep(0.001)
            comm._group.close()

        closer = threading.Thread(target=close_when_it_waits)
        closer.start()
        error = outcome(lambda: step(comm))
        closer.join()
        return [error]

    (error,) = run_each(program, list(comms)).values()[0]
    assert isinstance(error, ClosedError)


def test_a_timeout_is_reported_by_python_and_poisons(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        warm(comm)
        if comm.rank == 1:
            return outcome(lambda: comm.recv_bytes(0, 1)), outcome(lambda: step(comm))
        first = outcome(lambda: comm.all_reduce(np.ones(4), timeout=0.2))
        comm.send(b"", 1, 1)
        return first, outcome(lambda: step(comm))

    (late, again), (_, theirs) = run_each(program, list(comms)).values()
    assert isinstance(late, DeadlineExceeded)
    assert late.waiting_on == (1,)
    assert isinstance(again, DeadlineExceeded)
    assert isinstance(theirs, DeadlineExceeded)


def test_after_a_late_rank_the_next_calls_take_the_fast_path_again(world: MakeWorld) -> None:
    comms = world(2, stall_query_s=0.05)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(3):
            warm(comm)
            if comm.rank == 1:
                time.sleep(0.2)  # longer than a stall, which is what is tested
            notes.expect(comm.all_reduce(np.array([comm.rank + k])), np.array([1 + 2 * k]), f"#{k}")
        gained = []
        for _ in range(20):  # on a loaded machine other calls may stall, too
            before = calls_ended(comm)
            warm(comm)
            gained.append(calls_ended(comm) - before)
        notes.expect(max(gained), 10, "fast path again")
        return notes

    assert found(comms, program) == []
    assert comms[0]._group.native is not None
    assert comms[0]._group.native.adopted >= 1


# -- processes --------------------------------------------------------------------------------------------


def _die_or_wait(comm: Communicator, folder: str) -> None:
    warm(comm, 50)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with stopwatch() as seconds:
        error = outcome(lambda: warm(comm))
        took = seconds()
    ranks = getattr(error, "ranks", ())
    Path(folder, str(comm.rank)).write_text(f"{type(error).__name__} {ranks} {took < 2 * 0.5}")


def test_a_killed_rank_is_named_by_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    with pytest.raises(uni.UnisonoError, match="rank 1"):
        uni.spawn(_die_or_wait, 3, str(tmp_path))
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text() == "PeerLost (1,) True"


def _interrupted(comm: Communicator) -> list[Any]:
    warm(comm, 50)
    if comm.rank == 1:
        return [str(outcome(lambda: step(comm))) if comm.recv_bytes(0, 9) else None]
    call_log, sequence, main = comm._group.call_log, comm._group.call_log.next, threading.get_ident()
    native_group = comm._group.native
    assert native_group is not None
    before = native_group.adopted  # on a busy machine the calls above may have stalled, too

    def strike() -> None:
        while call_log.next == sequence:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    striker = threading.Thread(target=strike)
    striker.start()
    with stopwatch() as seconds:
        try:
            step(comm)
            ended = "well"
        except KeyboardInterrupt:
            ended = "interrupted"
        took = seconds()
    striker.join()
    comm.send(b"1", 1, 9)
    return [ended, took < 2 * 0.2 + 0.2, native_group.adopted - before]


def test_ctrl_c_ends_a_waiting_call_and_the_others_learn_of_it() -> None:
    here, there = uni.spawn(_interrupted, 2)
    assert here == ["interrupted", True, 1]
    assert "cancelled all_reduce" in there[0]


def _repeated(comm: Communicator) -> list[int]:
    group = comm._group
    for k in range(300):
        x = np.array([k, comm.rank], np.int32)
        comm.all_reduce(x)
        assert x.tolist() == [k * comm.size, sum(range(comm.size))]
    assert group.native is not None
    return [group.native.decided, group.native.ended + group.native.adopted, group.call_log.next]


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_processes_take_the_fast_path(shm: str) -> None:
    """Python makes one decision for each class of calls."""
    for decided, begun, numbers in uni.spawn(
        _repeated, 4, env={"UNISONO_SHM": shm, "UNISONO_STALL_QUERY_S": "60"}
    ):
        assert decided == 1
        assert begun == numbers == 300
