"""Works: the thread that steps an operation, how it ends, what it says when it stalls or is dropped."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, wait_until
from tests.support.stepped_works import HookedRuntime, Started, gate, in_thread, start

import unisono as uni
from unisono.core.call import await_requests
from unisono.core.request import Request
from unisono.core.waits import wait_all
from unisono.errors import DeadlineExceeded, Location, PeerAborted, PeerLost, UnisonoError, UsageError

# -- ends ----------------------------------------------------------------------------------------------


def test_an_operation_without_requests_is_done_at_once():
    def steps(call):
        return 42
        yield

    work = start(steps)
    assert work.done()
    assert work.wait() == work.wait(timeout=0) == 42


def test_a_work_is_done_once_what_it_waits_for_has_come():
    request, steps = gate("result")
    work = start(steps)
    assert not work.done()
    assert "under way" in repr(work)
    request.complete()
    assert work.done()
    assert "test #7" in repr(work)
    assert repr(work).endswith("done>")
    assert work.wait() == "result"


def test_it_waits_for_all_of_its_requests_however_they_end():
    requests = [Request(0) for _ in range(5)]

    def steps(call):
        yield from await_requests(call, requests)
        return [r.error is not None for r in requests]

    work = start(steps)
    for i in (3, 1, 4, 0):
        requests[i].fail(UsageError("no")) if i % 2 else requests[i].complete()
        assert not work.done()
    requests[2].complete()
    assert work.wait() == [False, True, False, True, False]


def test_a_wait_that_times_out_leaves_the_work_going():
    request, steps = gate("late")
    work = start(steps, waiting_on=lambda: (1, 4))
    with pytest.raises(DeadlineExceeded, match="the work goes on") as caught:
        work.wait(timeout=0.01)
    assert caught.value.waiting_on == (1, 4)
    assert (caught.value.operation, caught.value.sequence) == ("test", 7)
    assert not work.done()
    request.complete()
    assert work.wait(timeout=0) == "late"


def test_a_waiting_thread_steps_the_work():
    request, seen = Request(0), []

    def steps(call):
        yield from await_requests(call, [request])
        seen.append(threading.get_ident())

    work = start(steps)
    waiter = in_thread(work.wait)
    wait_until(lambda: work._task._waiters)
    request.complete()
    waiter.join(PATIENCE_S)
    assert seen == [waiter.ident]


def test_a_work_without_a_waiter_is_stepped_by_the_thread_that_ended_its_request():
    request, seen = Request(0), []

    def steps(call):
        yield from await_requests(call, [request])
        seen.append(threading.get_ident())

    work = start(steps)
    other = in_thread(request.complete)
    other.join(PATIENCE_S)
    assert work.done()
    assert seen == [other.ident]


def test_a_waiter_that_gives_up_hands_the_work_back():
    """The waiter is woken at the moment its time is up: no other thread would take the step."""
    runtime = HookedRuntime()
    request, steps = gate("x")
    work = start(steps, runtime=runtime, timers=False)
    # The first reading of the clock makes the deadline; at the second it has passed.
    runtime.hooks = [lambda: None, request.complete]
    with pytest.raises(DeadlineExceeded):
        work.wait(timeout=5)
    assert work.done()


def test_long_chains_of_works_do_not_recurse():
    """Each work ends the request of the next, ten times deeper than Python's recursion limit."""
    length, works = 10_000, []
    gates = [gate(i) for i in range(length)]
    for i, (_, steps) in enumerate(gates):
        works.append(start(steps))
        if i + 1 < length:
            works[-1]._task.on_done(gates[i + 1][0].complete)
    gates[0][0].complete()
    assert wait_all(works) == list(range(length))


# -- errors --------------------------------------------------------------------------------------------


def test_an_error_keeps_its_location_and_each_wait_gets_a_copy():
    request, steps = gate(error=PeerLost("gone", ranks=(1,), where=Location(elapsed_s=9.0)))
    work = start(steps)
    request.complete()
    errors = []
    for _ in range(2):
        with pytest.raises(PeerLost, match='gone during test #7 on "world", epoch 0, after 9 s') as caught:
            work.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert errors[0].ranks == errors[1].ranks == (1,)


def test_a_foreign_error_is_raised_as_it_is_and_reaches_the_others_as_an_abort():
    request, steps = gate(error=KeyError("k"))
    told: list[UnisonoError | None] = []
    work = start(steps, on_end=told.append)
    request.complete()
    with pytest.raises(KeyError, match="k"):
        work.wait()
    (abort,) = told
    assert isinstance(abort, PeerAborted)
    assert abort.rank == 3
    assert "KeyError: 'k'" in str(abort)


def test_the_end_of_a_work_is_handled_before_waiters_are_notified():
    request, steps = gate()
    order: list[str] = []
    started = Started(steps, on_end=lambda error: order.append(f"end, done={started.task.is_done()}"))
    work = started.begin()
    work._task.on_done(lambda: order.append("callback"))
    request.complete()
    work._task.on_done(lambda: order.append("late callback"))
    assert order == ["end, done=False", "callback", "late callback"]


# -- stalls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_work_that_stalls_asks_once(waits):
    asked: list[float] = []
    request, steps = gate()
    begun = time.monotonic()
    work = start(steps, on_stall=lambda: asked.append(time.monotonic()), stall_query_s=0.05, timers=not waits)
    threading.Timer(0.3, request.complete).start()
    if waits:
        work.wait()
    else:
        wait_until(work.done)
    assert len(asked) == 1
    assert asked[0] - begun >= 0.05


def test_a_long_stall_is_logged_with_the_missing_ranks(caplog):
    request, steps = gate()
    work = start(steps, stall_log_s=0.02, waiting_on=lambda: (4,))
    threading.Timer(0.2, request.complete).start()
    with caplog.at_level(logging.WARNING, "unisono"):
        work.wait()
    (record,) = caplog.records
    assert 'rank 3: test #7 on "world" stalled for 0.0' in record.getMessage()
    assert "waiting for rank 4" in record.getMessage()


# -- dropping ----------------------------------------------------------------------------------------


def test_a_work_that_is_dropped_before_its_end_warns():
    request, steps = gate()
    works = [start(steps)]
    with pytest.warns(ResourceWarning, match=r"test #7 .* was dropped before it ended"):
        works.clear()
    request.complete()


def test_a_work_that_is_dropped_after_its_end_does_not():
    request, steps = gate()
    work = start(steps)
    request.complete()
    del work
    gc.collect()


def test_a_dropped_work_of_a_local_rank_frees_its_result_without_the_collector():
    comms = uni.local(2)
    gc.collect()
    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="dropped"):
            comms[0].start.all_gather(np.arange(10_007.0))
        mine = np.arange(10_007.0)
        given = weakref.ref(mine)
        work = comms[1].start.all_gather(mine)
        result = weakref.ref(work.wait())
        del mine, work
        wait_until(lambda: given() is None and result() is None)
    finally:
        gc.enable()
    for comm in comms:
        comm.close()
