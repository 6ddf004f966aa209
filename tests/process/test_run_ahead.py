"""Run-ahead: repeated short calls return before they are received, and every mismatch is still reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, every_kind, found, outcome, world
from tests.support.metronome import stopwatch
from tests.support.oracle import Notes
from tests.support.ranks import run_each, wait_until

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import CollectiveMismatch, PeerLost

__all__ = ["world"]

AHEAD_MAX = 240  # native/python/native_group.cpp
PATIENCE_S = 30.0


def value(k: int) -> np.ndarray[Any, Any]:
    return np.array([k, 3 * k + 1], np.int64)


def cast(comm: Communicator, k: int, root: int = 0) -> np.ndarray[Any, Any]:
    """Broadcast root's value of step k. One line for all calls: another line would be another call."""
    x = value(k) if comm.rank == root else np.full(2, -1, np.int64)
    comm.broadcast(x, root)
    return x


def total(comm: Communicator) -> np.ndarray[Any, Any]:
    """An all_reduce: every rank waits for all others, and so confirms all earlier calls."""
    x = np.full(3, comm.rank + 1.0)
    comm.all_reduce(x)
    return x


def warm(comm: Communicator) -> None:
    """Make the calls of both roots known, and confirm them on all ranks."""
    for k in range(4):
        for root in (0, 1):
            cast(comm, k, root)
        comm.barrier()
        total(comm)


def first_error(*calls: Callable[[], Any]) -> Any:
    """The error of the first call that failed. A late rank gets it in the different call itself."""
    for call in calls:
        if isinstance(error := outcome(call), Exception):
            return error
    return None


def is_broken(comm: Communicator) -> bool:
    return not comm._group.call_log.fast_path_open


# -- how far --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [2, 4])
def test_a_slow_receiver_gets_everything_in_order_and_is_not_left_far_behind(
    world: MakeWorld, kind: str, size: int
) -> None:
    comms, steps, done = world(size, kind), 3 * AHEAD_MAX, [0]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        warm(comm)
        if comm.rank == 0:
            for k in range(steps):
                cast(comm, k)
                done[0] = k + 1
            return notes
        wait_until(lambda: done[0] >= AHEAD_MAX)
        for k in range(steps):
            lead = done[0] - k
            notes.expect(lead <= AHEAD_MAX + 1, True, f"{lead} calls ahead at #{k}")
            notes.expect(cast(comm, k), value(k), f"#{k}")
        return notes

    assert found(comms, program) == []


def test_long_calls_run_ahead_as_far_as_the_credit_reaches(world: MakeWorld) -> None:
    comms, steps, done = world(2), 60, [0]
    calls_max = Config().eager_credit_bytes // (16 * 1024)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        long = np.empty(2048, np.int64)  # 16 KiB
        comm.broadcast(long, 0)
        warm(comm)
        if comm.rank == 0:
            for k in range(steps):
                comm.broadcast(np.full(2048, k, np.int64), 0)
                done[0] = k + 1
            return notes
        wait_until(lambda: done[0] >= 2)
        for k in range(steps):
            lead = done[0] - k
            notes.expect(lead <= calls_max + 1, True, f"{lead} calls ahead at #{k}")
            notes.expect(comm.broadcast(long, 0), np.full(2048, k, np.int64), f"#{k}")
        return notes

    assert found(comms, program) == []


@every_kind
def test_a_receiver_that_confirms_lets_the_root_go_on(world: MakeWorld, kind: str) -> None:
    """A call that waits for all ranks confirms the earlier ones: then the root is not ahead."""
    comms = world(3, kind)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        warm(comm)
        for k in range(100):
            notes.expect(cast(comm, k, k % 2), value(k), f"#{k}")
            total(comm)
            native_group = comm._group.native
            assert native_group is not None
            notes.expect(native_group.unconfirmed_ranks(), [], f"behind at #{k}")
        return notes

    assert found(comms, program) == []


def test_each_root_has_its_own_bound(world: MakeWorld) -> None:
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(400):
            root = k % 3
            notes.expect(cast(comm, k, root), value(k), f"#{k} from {root}")
        return notes

    assert found(comms, program) == []


# -- mismatches -----------------------------------------------------------------------------------------


def shows_both(error: Any, *calls: str) -> bool:
    return isinstance(error, CollectiveMismatch) and all(call in error.report for call in calls)


@every_kind
@pytest.mark.parametrize("after", ["barrier", "all_reduce", "broadcast"])
def test_a_root_that_ran_ahead_gets_the_mismatch_in_its_next_call(
    world: MakeWorld, kind: str, after: str
) -> None:
    comms = world(3, kind)

    def program(comm: Communicator) -> Any:
        warm(comm)

        def go_on() -> None:
            # A slow rank may get the error before it makes its own call.
            for k in range(10):
                cast(comm, k)
            if comm.rank == 2:
                total(comm)
            cast(comm, 10)
            started = time.monotonic()
            while time.monotonic() - started < 2 * 1.0:
                match after:
                    case "barrier":
                        comm.barrier()
                    case "all_reduce":
                        total(comm)
                    case _:
                        cast(comm, 11)

        return [outcome(go_on)]

    for [error] in run_each(program, list(comms)).values():
        assert shows_both(error, "broadcast", "all_reduce"), error
        assert error.report.count("test_run_ahead.py:") == 2


@every_kind
def test_two_roots_that_both_ran_ahead_get_the_mismatch_in_their_next_call(
    world: MakeWorld, kind: str
) -> None:
    """No rank waits in the different call, and the next call is the same on both ranks."""
    comms = world(2, kind)

    def program(comm: Communicator) -> Any:
        warm(comm)
        return [first_error(lambda: cast(comm, 5, comm.rank), lambda: total(comm))]

    for [error] in run_each(program, list(comms)).values():
        assert shows_both(error, "root=0", "root=1"), error


@every_kind
def test_a_mismatch_is_found_although_no_rank_calls_again(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Any:
        warm(comm)
        outcome(lambda: cast(comm, 5, comm.rank))
        wait_until(lambda: is_broken(comm), limit_s=2 * 1.0)
        return [outcome(lambda: cast(comm, 6)) for _ in range(2)]

    for errors in run_each(program, list(comms)).values():
        for error in errors:
            assert shows_both(error, "root=0", "root=1"), error


@every_kind
def test_a_call_through_python_finds_it_too(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Any:
        warm(comm)
        outcome(lambda: cast(comm, 5, comm.rank))
        return [outcome(lambda: comm.start.all_reduce(np.ones(3)).wait())]

    for [error] in run_each(program, list(comms)).values():
        if error is not None and not isinstance(error, np.ndarray):
            assert shows_both(error, "root=0", "root=1"), error
    for comm in comms:
        wait_until(lambda comm=comm: is_broken(comm), limit_s=2 * 1.0)


def test_a_late_report_of_a_message_that_was_claimed_is_no_mismatch(world: MakeWorld) -> None:
    """The engine reports an unclaimed message; before Python handles that, hundreds of calls are made."""
    comms = world(2)
    run_each(warm, comms)
    reported = comms[1]._group.call_log.next
    (fingerprint,) = comms[1]._group.call_log.last(1).values()

    def program(comm: Communicator) -> None:
        for k in range(600):
            cast(comm, k)

    run_each(program, comms).values()
    assert comms[1]._group.call_log.find(reported) is None, "the report is discarded"
    assert comms[1]._group.on_unclaimed(0, reported, fingerprint), "the communicator is not poisoned"
    assert [x.tolist() for x in run_each(total, comms).values()] == [[3.0] * 3] * 2


@every_kind
def test_a_root_that_closes_after_it_ran_ahead_gets_the_mismatch(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Any:
        warm(comm)
        error = first_error(lambda: cast(comm, 5, comm.rank), comm.close)
        comm.close()
        return [error]

    for [error] in run_each(program, list(comms)).values():
        assert shows_both(error, "root=0", "root=1"), error
    assert all("closed" in repr(comm) for comm in comms)


@every_kind
def test_close_waits_for_what_a_late_rank_calls(world: MakeWorld, kind: str) -> None:
    comms, has_cast = world(2, kind), threading.Event()

    def program(comm: Communicator) -> Any:
        warm(comm)
        if comm.rank == 0:
            cast(comm, 5)
            has_cast.set()
            return [outcome(comm.close)]
        assert has_cast.wait(PATIENCE_S)
        return [outcome(lambda: total(comm))]

    for [error] in run_each(program, list(comms)).values():
        assert shows_both(error, "broadcast", "all_reduce"), error


def test_a_mismatch_that_was_raised_is_not_raised_again_by_close(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        warm(comm)
        return first_error(lambda: cast(comm, 5, comm.rank), lambda: total(comm)), outcome(comm.close)

    for error, at_close in run_each(program, list(comms)).values():
        assert isinstance(error, CollectiveMismatch)
        assert at_close is None


# -- endings --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_root_broadcast_before_it_left_is_received(world: MakeWorld, kind: str, is_late: bool) -> None:
    """Whether the root still waits in `close`, or has already left because no receiver called."""
    comms = world(3, kind, **({"flush_s": 0.05} if is_late else {}))
    ready, both = threading.Event(), threading.Barrier(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        warm(comm)
        if comm.rank == 0:
            for k in range(20):
                cast(comm, k)
            if not is_late:
                ready.set()
            notes.expect(outcome(comm.close), None, "close")
            ready.set()
            return notes
        assert ready.wait(PATIENCE_S)
        for k in range(20):
            notes.expect(cast(comm, k), value(k), f"#{k}")
        both.wait(PATIENCE_S)  # the first error ends the calls of all ranks
        error = outcome(lambda: cast(comm, 20))
        notes.expect(isinstance(error, PeerLost) and error.ranks == (0,), True, f"then {error!r}")
        return notes

    assert found(comms, program) == []


def _leave(comm: Communicator, folder: str) -> int:
    warm(comm)
    total = 0
    for k in range(30):
        total += int(cast(comm, k)[1])
    return total


@pytest.mark.parametrize("shm", ["1", "0"])
def test_processes_that_end_at_once_lose_nothing(shm: str, tmp_path: Path) -> None:
    want = sum(int(value(k)[1]) for k in range(30))
    assert uni.spawn(_leave, 4, str(tmp_path), env={"UNISONO_SHM": shm}) == [want] * 4


def _cast_to_the_dead(comm: Communicator, folder: str) -> None:
    warm(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error: Any = None
    deadline = time.monotonic() + PATIENCE_S
    with stopwatch() as seconds:
        while error is None and time.monotonic() < deadline:
            error = outcome(lambda: cast(comm, 1) if comm.rank == 0 else comm.barrier())
            error = None if isinstance(error, np.ndarray) else error
        took = seconds()
    ranks = getattr(error, "ranks", ())
    Path(folder, str(comm.rank)).write_text(f"{type(error).__name__} {ranks} {took < 2 * 0.5}")


@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_root_learns_that_a_receiver_is_dead(shm: str, tmp_path: Path) -> None:
    with pytest.raises(uni.UnisonoError, match="rank 1"):
        uni.spawn(_cast_to_the_dead, 2, str(tmp_path), env={"UNISONO_SHM": shm})
    assert (tmp_path / "0").read_text() == "PeerLost (1,) True"
