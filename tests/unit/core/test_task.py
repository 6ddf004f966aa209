"""The task of a work: interruptions, unreachable peers and deadlines, before, during and after a step."""

from __future__ import annotations

import threading

import pytest
from tests.support.ranks import PATIENCE_S, wait_until
from tests.support.stepped_works import CountingRuntime, Started, careful, expiring, gate, in_thread, start

from unisono.core.clock import RealRuntime
from unisono.core.request import Request
from unisono.errors import ClosedError, DeadlineExceeded, PeerLost, UnisonoError

# -- interruptions -------------------------------------------------------------------------------------


def test_an_interrupted_operation_is_notified_and_cleans_up():
    thrown: list[str] = []
    cleanup = Request(0)
    work = start(careful(Request(0), thrown, cleanup))
    work._task.interrupt(ClosedError("first"))
    work._task.interrupt(ClosedError("second"))
    assert thrown == ["first"]
    assert not work.done(), "the memory of the operation is still in use"
    cleanup.complete()
    with pytest.raises(ClosedError, match="first"):
        work.wait()
    work._task.interrupt(ClosedError("too late"))
    assert thrown == ["first"]


def test_an_operation_can_be_interrupted_before_it_begins():
    thrown: list[str] = []
    started = Started(careful(Request(0), thrown))
    started.task.interrupt(ClosedError("early"))
    work = started.begin()
    with pytest.raises(ClosedError, match="early"):
        work.wait(timeout=PATIENCE_S)


def test_an_interruption_during_a_step_waits_for_the_step():
    """One thread runs the step, another interrupts: the first gets the error once, when the step waits."""
    inside, go_on = threading.Event(), threading.Event()
    seen: list[object] = []

    def steps(call):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        seen.append("step done")
        try:
            yield
        except ClosedError:
            seen.append(threading.get_ident())
            raise

    started = Started(steps)
    runner = in_thread(started.begin)
    assert inside.wait(PATIENCE_S)
    started.task.interrupt(ClosedError("now"))
    assert seen == []
    go_on.set()
    with pytest.raises(ClosedError, match="now"):
        started.work.wait(timeout=PATIENCE_S)
    runner.join(PATIENCE_S)
    assert seen == ["step done", runner.ident]


def test_an_interruption_and_an_unreachable_peer_at_the_same_moment_are_one_error():
    """If both happen at once, exactly one of the two errors is thrown into the operation."""
    thrown: list[str] = []
    cleanup = Request(0)

    def unreachable_error() -> UnisonoError:
        started.task.interrupt(ClosedError("interrupted"))
        return PeerLost("doomed")

    started = Started(careful(Request(0), thrown, cleanup), unreachable_error=unreachable_error)
    work = started.begin()
    cleanup.complete()
    with pytest.raises(ClosedError, match="interrupted"):
        work.wait(timeout=PATIENCE_S)
    assert thrown == ["interrupted"]


def test_an_unreachable_peer_is_noticed_when_the_task_is_woken():
    thrown: list[str] = []
    doomed: list[UnisonoError] = []
    work = start(careful(Request(0), thrown), unreachable_error=lambda: doomed[0] if doomed else None)
    assert not work.done()
    doomed.append(PeerLost("all are gone"))
    work._task.wake()
    with pytest.raises(PeerLost, match="all are gone"):
        work.wait(timeout=0)
    assert thrown == ["all are gone"]


def test_an_interruption_after_the_end_of_its_request_has_no_effect():
    request = Request(0)

    def steps(call):
        request.notify(call.wake)
        try:
            while not request.done:
                yield
        except UnisonoError:
            if not request.done:
                raise
        return "made it"

    started = Started(steps)
    work = started.begin()
    with started.task._lock:  # both happen before a step can be taken
        started.task._is_interrupted, started.task._interruption = True, lambda: ClosedError("x")
        request.done = True
    started.task.wake()
    assert work.wait(timeout=0) == "made it"


# -- deadlines -----------------------------------------------------------------------------------------


def test_a_started_work_expires_although_no_thread_waits():
    thrown: list[str] = []
    work = expiring(careful(Request(0), thrown), 0.01, waiting_on=lambda: (5,)).begin()
    wait_until(work.done)
    with pytest.raises(DeadlineExceeded, match="waiting for rank 5") as caught:
        work.wait()
    assert caught.value.waiting_on == (5,)
    assert "the work goes on" not in str(caught.value)


def test_a_waiter_keeps_the_deadline_of_a_work_without_timers():
    work = expiring(careful(Request(0), []), 0.01, timers=False).begin()
    with pytest.raises(DeadlineExceeded, match=r"test did not end within 0\.01 s"):
        work.wait(timeout=PATIENCE_S)
    assert work.done()


def test_a_rank_known_to_be_absent_is_named_first():
    work = expiring(careful(Request(0), []), 0.0, waiting_on=lambda: (1, 2, 3), timers=False).begin()
    work._task.call.absent.update((6, 2))
    with pytest.raises(DeadlineExceeded, match="waiting for ranks 2, 6"):
        work.wait()


def test_a_waiter_sleeps_until_an_expired_work_has_ended():
    """Its request was matched just before the deadline and ends later: the waiter sleeps meanwhile."""
    runtime, cleanup = CountingRuntime(), Request(0)
    started = expiring(careful(Request(0), [], cleanup), 0.0, timers=False, runtime=runtime)
    threading.Timer(0.2, cleanup.complete).start()
    with pytest.raises(DeadlineExceeded):
        started.begin().wait()
    assert runtime.looks < 100


def test_a_waiter_sleeps_during_a_long_step_past_the_deadline():
    runtime, inside, go_on = CountingRuntime(), threading.Event(), threading.Event()

    def steps(call):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        return "done"
        yield

    started = expiring(steps, 0.0, timers=False, runtime=runtime)
    runner = in_thread(started.begin)
    assert inside.wait(PATIENCE_S)
    threading.Timer(0.2, go_on.set).start()
    assert started.work.wait() == "done"
    runner.join(PATIENCE_S)
    assert runtime.looks < 100


def test_timers_of_a_work_end_with_it():
    runtime = RealRuntime()
    request, steps = gate()
    work = expiring(steps, 3600, runtime=runtime, on_stall=lambda: None, stall_query_s=3600).begin()
    assert len(runtime._timers._heap) == 2
    request.complete()
    assert work.done()
    wait_until(lambda: not runtime._timers._heap)
