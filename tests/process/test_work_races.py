"""Works that several threads, signal handlers and finalizers use at once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, world
from tests.support.ranks import PATIENCE_S, run_each
from tests.support.waiter import Waiter

import unisono as uni
from unisono.comm import adoption
from unisono.comm.adoption import Adoption
from unisono.comm.communicator import Communicator
from unisono.core.work import Work
from unisono.errors import DeadlineExceeded, UnisonoError, UsageError

__all__ = ["world"]

STALL_S = 0.25


def waiting(call: Callable[[], Any]) -> Waiter:
    """A thread that most likely waits in the engine already."""
    waiter = Waiter(call)
    time.sleep(0.02)
    return waiter


class CollectedLate:
    """Garbage in a cycle; `call` runs when the collector finds it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._itself = self
        self._call = call

    def __del__(self) -> None:
        self._call()


# -- deadlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["timeout", "default"])
def test_a_work_that_is_only_polled_expires(world: MakeWorld, how: str):
    comms = world(2, deadline_s=0.1 if how == "default" else None)
    for _ in range(5):
        given = {"timeout": 0.1} if how == "timeout" else {}
        work = comms[0].start.recv(np.zeros(3), src=1, **given)
        began = time.monotonic()
        while not work.done():
            assert time.monotonic() < began + PATIENCE_S, "the work does not expire"
        with pytest.raises(DeadlineExceeded):
            work.wait()


def test_a_polled_collective_fails_when_another_rank_fails(world: MakeWorld):
    comms = world(2, stall_query_s=3600.0)
    work = comms[0].start.all_reduce(np.arange(1021.0))
    other = waiting(lambda: comms[1].abort("for the test"))
    began = time.monotonic()
    while not work.done():
        assert time.monotonic() < began + PATIENCE_S, "the failure was not reported"
    other.outcome()
    with pytest.raises(UnisonoError):
        work.wait()


@pytest.mark.parametrize("seconds", [np.float64(0.05), np.float32(0.05), np.int64(0)])
def test_any_real_number_is_a_timeout_of_a_wait(world: MakeWorld, seconds: Any):
    comms = world(2)
    buffer = np.zeros(3)
    work = comms[1].start.recv(buffer, src=0)
    with pytest.raises(DeadlineExceeded):
        work.wait(seconds)
    comms[0].send(np.arange(3.0), dst=1)
    assert work.wait(np.float64(PATIENCE_S)).nbytes == 24


@pytest.mark.parametrize("seconds", ["soon", -1, -0.5, float("nan"), True, 1j, [1]])
def test_an_invalid_timeout_is_refused_and_the_work_goes_on(world: MakeWorld, seconds: Any):
    comms = world(2)
    works = [comm.start.all_reduce(np.arange(5.0) + comm.rank) for comm in comms]
    if not works[0].done():
        with pytest.raises(UsageError, match="timeout"):
            works[0].wait(seconds)
    for work in works:
        assert work.wait(PATIENCE_S).tolist() == [1, 3, 5, 7, 9]


# -- another thread ends the work meanwhile ---------------------------------------------------------------


def test_a_work_that_ends_while_a_signal_handler_runs_in_its_wait(world: MakeWorld):
    """The interrupted thread must not let Python adopt an operation that another thread has concluded."""
    comms = world(2, stall_query_s=STALL_S, stall_log_s=STALL_S, deadlock_after_s=0)
    buffer = np.zeros(3)
    began = time.monotonic()
    work = comms[1].start.recv(buffer, src=0)
    waiter = waiting(work.wait)

    def handle(*_: object) -> None:
        comms[0].send(np.arange(3.0), dst=1)
        waiter.join(PATIENCE_S)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        # Just before the stall, so that the handler runs when Python would adopt the work.
        late = threading.Timer(
            began + STALL_S - 0.02 - time.monotonic(), lambda: os.kill(os.getpid(), signal.SIGUSR1)
        )
        late.start()
        status = work.wait()
        late.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert status == waiter.outcome() == (0, 0, 24)
    assert buffer.tolist() == [0, 1, 2]


def test_a_work_that_ends_while_python_is_about_to_adopt_it(world: MakeWorld):
    """The garbage collector runs in the middle: a finalizer lets another thread conclude the work."""
    comms = world(2, stall_query_s=3600.0)
    buffer = np.zeros(3)
    work = comms[1].start.recv(buffer, src=0)
    waiter = waiting(work.wait)

    def meet() -> None:
        comms[0].send(np.arange(3.0), dst=1)
        waiter.join(0.3)

    gc.collect()
    gc.disable()
    thresholds = gc.get_threshold()
    try:
        CollectedLate(meet)
        gc.set_threshold(1)
        gc.enable()
        work.cancel()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    gc.collect()
    assert waiter.outcome() == work.wait() == (0, 0, 24)
    assert buffer.tolist() == [0, 1, 2]


def test_a_collective_that_ends_when_the_time_of_a_wait_is_over(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
):
    """It ends while Python adopts it: the wait returns the engine's result, not that of Python's task."""
    comms = world(2, stall_query_s=3600.0)
    work = comms[0].start.all_reduce(np.arange(5.0))
    adopt = Adoption.adopt

    def late(self: Adoption, *call: Any) -> Work[Any]:
        comms[1].all_reduce(np.arange(5.0) + 1)
        time.sleep(0.05)  # the engine of the other rank has the result by then, too
        return adopt(self, *call)

    monkeypatch.setattr(Adoption, "adopt", late)
    assert work.wait(0.02).tolist() == [1, 3, 5, 7, 9]


# -- memory -----------------------------------------------------------------------------------------------


def test_nothing_is_received_into_the_memory_of_a_call_that_was_left(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
):
    """A second Ctrl-C arrives while the first cancels the call; from then on its memory may be freed."""
    comms = world(2, stall_query_s=0.02, deadlock_after_s=0.02)

    def leave(work: Work[Any]) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(adoption, "wait_or_cancel", leave)
    left, met = np.full(3, -1.0), np.zeros(3)
    with pytest.raises(KeyboardInterrupt):
        comms[1].recv(left, src=0)
    monkeypatch.undo()
    comms[0].send(np.arange(3.0), dst=1)
    comms[1].recv(met, src=0, timeout=PATIENCE_S)
    assert met.tolist() == [0, 1, 2]
    assert left.tolist() == [-1, -1, -1]


def test_nothing_reads_the_memory_of_a_collective_that_was_left(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
):
    comms = world(2, stall_query_s=0.02)

    def leave(work: Work[Any]) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(adoption, "wait_or_cancel", leave)
    with pytest.raises(KeyboardInterrupt):
        comms[0].all_reduce(np.ones(300_001, np.float16), op="mean")  # reduced in the call's own memory
    monkeypatch.undo()
    late = waiting(lambda: comms[1].all_reduce(np.ones(300_001, np.float16), op="mean", timeout=1.0))
    assert isinstance(late.outcome(), UnisonoError)


# -- the same thread again --------------------------------------------------------------------------------


def test_a_handler_may_ask_for_the_work_that_python_is_adopting(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
):
    comms = world(2, stall_query_s=0.02)
    buffer = np.zeros(3)
    work = comms[1].start.recv(buffer, src=0)
    answers: list[Any] = []
    adopt = Adoption.adopt

    def interrupted(self: Adoption, *call: Any) -> Work[Any]:
        for ask in (work.done, work.wait, work.cancel, lambda: uni.wait_any([work])):
            try:
                answers.append(ask())
            except UsageError as error:
                answers.append(type(error))
        return adopt(self, *call)

    monkeypatch.setattr(Adoption, "adopt", interrupted)
    with pytest.raises(DeadlineExceeded):
        work.wait(0.5)
    monkeypatch.undo()
    assert answers == [False, UsageError, UsageError, UsageError]
    comms[0].send(np.arange(3.0), dst=1)
    assert work.wait(PATIENCE_S) == (0, 0, 24)
    assert buffer.tolist() == [0, 1, 2]


# -- errors while the result is made ----------------------------------------------------------------------


def test_a_result_that_cannot_be_made_is_an_error_in_every_thread_that_waits(world: MakeWorld):
    import torch

    comms = world(2)
    works = [comm.start.all_gather(torch.arange(3.0) + comm.rank) for comm in comms]
    kept = sys.modules.pop("torch")
    try:
        waiter = waiting(lambda: works[0].wait(PATIENCE_S))
        assert isinstance(waiter.outcome(), RuntimeError)
        with pytest.raises(RuntimeError, match="torch"):
            works[0].wait()
        assert works[0].done()
    finally:
        sys.modules["torch"] = kept
    assert works[1].wait(PATIENCE_S).tolist() == [[0, 1, 2], [1, 2, 3]]


# -- communicators that come and go -----------------------------------------------------------------------


def test_works_of_closed_communicators_end(world: MakeWorld):
    """Threads start works on communicators that are closed meanwhile."""
    comms = world(2)

    def program(comm: Communicator) -> None:
        for turn in range(10):
            row = comm.split(color=0, key=comm.rank)
            assert row is not None
            works = [row.start.recv(np.zeros(3), src=1 - row.rank, tag=turn), row.start.barrier()]
            waiter = waiting(works[0].wait)
            works[1].wait(PATIENCE_S)
            row.close()
            assert isinstance(waiter.outcome(), UnisonoError)
            with contextlib.suppress(UnisonoError):
                works[0].wait(PATIENCE_S)

    run_each(program, comms).values()


# -- the end of the interpreter -----------------------------------------------------------------------------

SPINNING = """
import threading, time
import numpy as np
import unisono as uni
from unisono.core.work import Work

comm = uni.init(backend="native", config=uni.Config(stall_query_s=0.02, deadlock_after_s=0))
entered = threading.Event()

def spin(*_):
    entered.set()
    while True:
        pass

Work._wait = spin
work = comm.start.recv(np.zeros(1), src=0)
threading.Thread(target=work.wait, daemon=True).start()
assert entered.wait(60)
time.sleep(0.02)
print("last line", flush=True)
"""


def test_an_interpreter_ends_while_a_thread_runs_python_inside_a_wait():
    """CPython unwinds the stack of such a thread through C++ frames, which must not be an error in ASan."""
    ended = subprocess.run(
        [sys.executable, "-c", SPINNING], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr
