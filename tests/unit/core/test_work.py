"""Works: the thread that steps an operation, how it ends, and the results of several waiting threads."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine

import numpy as np
import pytest
from tests.support.metronome import stopwatch
from tests.support.ranks import PATIENCE_S, run_each, run_ranks

import unisono as uni
from unisono.backends.native.completions import CompletionDispatcher
from unisono.core.call import Call, await_requests
from unisono.core.clock import RealRuntime
from unisono.core.request import Request
from unisono.core.task import Task
from unisono.core.waits import wait_all
from unisono.core.work import Started as Handed
from unisono.core.work import Work
from unisono.errors import (
    ClosedError,
    DeadlineExceeded,
    Location,
    PeerAborted,
    PeerLost,
    UnisonoError,
    UsageError,
)
from unisono.simulation import Network, now, sleep


class CountingRuntime(RealRuntime):
    """Counts the readings of the clock: a thread that polls instead of sleeping reads it all the time."""

    looks = 0

    def now(self) -> float:
        self.looks += 1
        return super().now()


class HookedRuntime(RealRuntime):
    """Calls a function at each reading of the clock, which then jumps ahead by an hour."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[Callable[[], object]] = []
        self.jumps = 0

    def now(self) -> float:
        if self.hooks:
            self.hooks.pop(0)()
            self.jumps += 1
        return super().now() + 3600 * self.jumps


class Started:
    """A work and its task, and what the test has recorded of them."""

    def __init__(self, steps, *, timers: bool = True, runtime: RealRuntime | None = None, **call) -> None:
        self.runtime = runtime if runtime is not None else RealRuntime()
        self.call = Call("test", 3, "world", 0, 7, started_at=self.runtime.now(), **call)
        self.task: Task = Task(self.runtime, self.call, steps(self.call))
        self.work: Work = Handed(self.task, self.runtime)
        self.timers = timers

    def begin(self) -> Work:
        self.task.begin(self.timers)
        return self.work


def start(steps, **how) -> Work:
    return Started(steps, **how).begin()


def gate(result: object = None, error: Exception | None = None):
    """An operation that waits for one request, which the test completes."""
    request = Request(0)

    def steps(call):
        yield from await_requests(call, [request])
        if error is not None:
            raise error
        return result

    return request, steps


def in_thread(fn: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=fn)
    thread.start()
    return thread


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0)


# -- ends ------------------------------------------------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------------------


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


# -- interruptions ---------------------------------------------------------------------------------------


def careful(request: Request, thrown: list, cleanup: Request | None = None):
    """An operation that records the exception thrown into it, and cleans up before it ends."""

    def steps(call):
        request.notify(call.wake)
        try:
            while not request.done:
                yield
        except UnisonoError as error:
            thrown.append(str(error.what))
            if cleanup is not None:
                cleanup.notify(call.wake)
                while not cleanup.done:
                    try:
                        yield
                    except UnisonoError as second:
                        thrown.append(str(second.what))
            raise

    return steps


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


# -- deadlines -------------------------------------------------------------------------------------------


def expiring(steps, seconds: float, **how) -> Started:
    runtime = how.pop("runtime", None) or RealRuntime()
    return Started(steps, deadline=runtime.deadline(seconds), runtime=runtime, **how)


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


# -- stalls ----------------------------------------------------------------------------------------------


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


# -- dropping, cancelling --------------------------------------------------------------------------------


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


def test_cancelling_ends_the_work_and_returns_whether_it_did():
    thrown: list[str] = []
    work = start(careful(Request(0), thrown))
    assert work.cancel() is True
    assert work.done()
    assert work.cancel() is False
    with pytest.raises(PeerAborted, match="rank 3 cancelled test"):
        work.wait()
    assert thrown == ["rank 3 cancelled test"]


def test_cancelling_waits_until_the_memory_is_free_again():
    cleanup = Request(0)
    work = start(careful(Request(0), [], cleanup))
    threading.Timer(0.05, cleanup.complete).start()
    assert work.cancel()
    assert cleanup.done
    assert work.done()


def test_a_cancelled_receive_leaves_its_message_to_the_next():
    def program(comm):
        buf = np.zeros(3)
        work = comm.start.recv(buf, src=(comm.rank + 1) % 2)
        assert work.cancel()
        comm.barrier()
        comm.send(np.arange(3.0) + comm.rank, (comm.rank + 1) % 2)
        comm.barrier()
        assert not buf.any()
        comm.recv(buf)
        return buf.tolist()

    assert run_ranks(program, 2).values() == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("is_slow", [False, True], ids=["", "another thread hears of it"])
def test_a_cancelled_collective_ends_the_communicator_for_all_and_messages_still_pass(is_slow: bool):
    """Its messages are sent already, but rank 1 gets the reason of rank 0's end before rank 0's message."""
    is_ready, is_dispatched = threading.Event(), threading.Event()

    def program(comm):
        if comm.rank == 0:
            is_ready.wait(PATIENCE_S)
            work = comm.start.all_reduce(np.ones(5))
            assert work.cancel()
            comm.send(np.ones(1), 1)
        else:
            if is_slow:
                dispatch_slowly(comm.backend.runtime._completions)
            is_ready.set()
            if is_slow:
                assert is_dispatched.wait(PATIENCE_S)
            comm.recv(np.ones(1), 0)
        for _ in range(2):
            with pytest.raises(PeerAborted, match="rank 0 cancelled all_reduce") as caught:
                comm.barrier()
            assert caught.value.rank == 0
        comm.sendrecv(np.ones(2), 1 - comm.rank, np.ones(2), 1 - comm.rank)

    def dispatch_slowly(completions: CompletionDispatcher) -> None:
        dispatch_one = completions._dispatch_one

        def dispatch_late(*details) -> None:
            is_dispatched.set()
            time.sleep(0.005)
            dispatch_one(*details)

        completions._dispatch_one = dispatch_late  # type: ignore[method-assign]

    run_ranks(program, 2).values()


def test_a_cancelled_sendrecv_withdraws_its_message():
    def program(comm):
        if comm.rank == 0:
            big = np.ones(100_000)
            with pytest.raises(DeadlineExceeded):
                comm.sendrecv(big, 1, np.empty(1), 1, timeout=0.01)
        comm.barrier()
        return comm.probe(timeout=0)

    assert run_ranks(program, 2).values() == [None, None]


class InterruptedClock(RealRuntime):
    """A clock that raises KeyboardInterrupt at the first wait."""

    def block(self, event, timeout, waiting, *, is_limited=True):
        if timeout is None or timeout > 0:
            raise KeyboardInterrupt
        return super().block(event, timeout, waiting)


def test_ctrl_c_in_a_receive_withdraws_it(monkeypatch):
    (world,) = uni.local(1)
    with world:
        runtime = world.backend.runtime
        with monkeypatch.context() as patch:
            patch.setattr(type(runtime), "block", InterruptedClock.block)
            with pytest.raises(KeyboardInterrupt):
                world.recv(np.empty(1), src=0, tag=4)
        world.send(np.ones(1), 0, tag=4)
        assert world.recv(np.empty(1), timeout=0).tag == 4


def test_a_reduce_operation_that_raises_ends_the_collective_everywhere():
    def fail(left, right):
        raise ZeroDivisionError("mine")

    def program(comm):
        with pytest.raises((ZeroDivisionError, PeerAborted)) as caught:
            comm.all_reduce(np.ones(3), op=uni.op(fail, name="fail"), algorithm="flat")
        with pytest.raises(PeerAborted, match="ZeroDivisionError: mine") as later:
            comm.barrier()
        return type(caught.value).__name__, later.value.rank

    ended = run_ranks(program, 3).values()
    culprits = [rank for rank, (name, _) in enumerate(ended) if name == "ZeroDivisionError"]
    assert culprits
    assert {rank for _, rank in ended} <= set(culprits), "every rank names a rank that failed"


# -- several waiting threads -----------------------------------------------------------------------------


def test_every_waiter_is_notified():
    for error in (None, PeerLost("gone")):
        request, steps = gate("shared", error)
        work = start(steps)

        def ask(_, work=work):
            try:
                return work.wait(timeout=PATIENCE_S)
            except PeerLost as lost:
                return str(lost.what)

        threading.Timer(0.02, request.complete).start()
        assert run_each(ask, list(range(12))) == ["shared" if error is None else "gone"] * 12


def test_waiters_with_and_without_time_share_a_work():
    requests = [Request(0) for _ in range(30)]

    def steps(call):
        for request in requests:
            yield from await_requests(call, [request])
        return "end"

    work = start(steps)

    def ask(timeout):
        try:
            return work.wait(timeout)
        except DeadlineExceeded:
            return "late"

    def open_all(_):
        for request in requests:
            time.sleep(0.002)
            request.complete()

    jobs = [None, 0.0, 0.001, 0.01, 0.03, PATIENCE_S]
    ended = run_each(lambda job: open_all(0) if job == "open" else ask(job), [*jobs, "open"])
    assert ended[0] == ended[5] == "end"
    assert set(ended[1:5]) <= {"late", "end"}
    assert work.wait(0) == "end"


def test_wait_all_gives_the_results_in_order():
    gates = [gate(i) for i in range(6)]
    works = [start(steps) for _, steps in gates]
    for i in (5, 0, 3, 1, 4, 2):
        gates[i][0].complete()
    assert wait_all(iter(works)) == list(range(6))
    assert wait_all([]) == []


def test_wait_all_reports_the_first_error_after_all_ended():
    gates = [gate("a"), gate(error=ValueError("first")), gate(error=PeerLost("second")), gate("b")]
    works = [start(steps) for _, steps in gates]
    ended: list[bool] = []

    def ask() -> None:
        with pytest.raises(ValueError, match="first"):
            wait_all(works)
        ended.extend(work.done() for work in works)

    waiter = in_thread(ask)
    for request, _ in gates[:3]:
        request.complete()
    waiter.join(0.05)
    assert waiter.is_alive(), "the last work has not ended"
    gates[3][0].complete()
    waiter.join(PATIENCE_S)
    assert ended == [True] * 4


def test_wait_all_has_one_deadline_for_all():
    gates = [gate(i) for i in range(5)]
    works = [start(steps) for _, steps in gates]
    gates[0][0].complete()
    with stopwatch() as seconds:
        with pytest.raises(DeadlineExceeded, match="the work goes on"):
            wait_all(works, timeout=0.1)
        assert seconds() < 2.0
    assert not works[1].done()
    for request, _ in gates[1:]:
        request.complete()
    assert wait_all(works) == list(range(5))


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_and_works_lose_no_wake_up(seed):
    """60 works of 20 requests; threads end them in any order while others wait, time out and wait again."""
    rng = random.Random(seed)
    operations = []
    for i in range(60):
        requests = [Request(0) for _ in range(20)]

        def steps(call, requests=requests, i=i):
            for request in requests:
                request.notify(call.wake)
            total = 0
            while not all(r.done for r in requests):
                total += 1
                yield
            return i

        operations.append((requests, start(steps)))
    todo = [request for requests, _ in operations for request in requests]
    rng.shuffle(todo)
    works = [work for _, work in operations]

    def end(part) -> None:
        for request in part:
            request.complete()

    def ask(order) -> list[int]:
        results = []
        for work in order:
            while True:
                try:
                    results.append(work.wait(timeout=rng.choice([0.0, 1e-4, 1e-2, None])))
                    break
                except DeadlineExceeded:
                    continue
        return sorted(results)

    parts = [("end", todo[k::3]) for k in range(3)]
    asks = [("ask", rng.sample(works, len(works))) for _ in range(5)]
    ended = run_each(lambda job: end(job[1]) if job[0] == "end" else ask(job[1]), [*parts, *asks]).values()
    assert ended[3:] == [list(range(60))] * 5


@pytest.mark.parametrize("seed", range(3))
def test_cancelling_from_many_threads_ends_each_work_once(seed):
    rng = random.Random(seed)
    requests = [Request(0, lambda r: False) for _ in range(80)]
    ends: list[int] = []

    def steps_of(i):
        def steps(call):
            requests[i].notify(call.wake)
            try:
                while not requests[i].done:
                    yield
            except UnisonoError:
                ends.append(i)
                raise
            ends.append(i)

        return steps

    works = [start(steps_of(i)) for i in range(80)]
    order = list(range(80))
    rng.shuffle(order)

    def act(job) -> list[bool]:
        if job == "end":
            return [bool(requests[i].complete()) for i in order]
        return [works[i].cancel() for i in reversed(order)]

    run_each(act, ["end", "cancel", "cancel", "cancel"]).values()
    assert sorted(ends) == list(range(80))
    assert all(work.done() for work in works)


def test_started_collectives_of_many_threads_give_the_right_sums():
    """Each thread of a rank has its own communicator; all threads share the world's inboxes and control."""
    threads, rounds = 3, 15

    def program(comm):
        children = [comm.split(0) for _ in range(threads)]

        def one(t: int) -> list[float]:
            sums = []
            for i in range(rounds):
                works = [
                    children[t].start.all_reduce(np.full(7, 100.0 * t + i + k + comm.rank)) for k in range(3)
                ]
                sums += [float(x[3]) for x in wait_all(works)]
            return sums

        return run_each(one, list(range(threads))).values()

    for results in run_ranks(program, 3).values():
        for t in range(threads):
            assert results[t] == [3 * (100.0 * t + i + k) + 3 for i in range(rounds) for k in range(3)]


# -- await -----------------------------------------------------------------------------------------------


def test_a_work_can_be_awaited_while_another_thread_ends_it():
    request, steps = gate("awaited")
    work = start(steps)

    async def main():
        threading.Timer(0.02, request.complete).start()
        return await work

    assert asyncio.run(main()) == "awaited"


def test_a_work_that_is_done_is_awaited_at_once():
    request, steps = gate("x")
    work = start(steps)
    request.complete()

    async def main():
        return await work, await work

    assert asyncio.run(main()) == ("x", "x")


def test_many_may_await_one_work_and_one_may_await_many():
    gates = [gate(i) for i in range(10)]
    works = [start(steps) for _, steps in gates]

    async def one(work):
        return await work

    async def main():
        opener = asyncio.get_running_loop().run_in_executor(None, lambda: [r.complete() for r, _ in gates])
        results = await asyncio.gather(*(one(work) for work in works), *(one(works[0]) for _ in range(5)))
        await opener
        return results

    assert asyncio.run(main()) == [*range(10), 0, 0, 0, 0, 0]


def test_an_awaited_error_is_raised():
    request, steps = gate(error=PeerLost("gone", ranks=(2,)))
    work = start(steps)

    async def main():
        threading.Timer(0.01, request.complete).start()
        with pytest.raises(PeerLost, match="gone"):
            await work

    asyncio.run(main())


def test_an_await_that_is_given_up_leaves_the_work_going():
    request, steps = gate("later")
    work = start(steps)

    async def one():
        return await work

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one(), 0.01)
        assert not work.done()

    asyncio.run(main())
    request.complete()  # the loop is closed, so nothing is notified
    assert work.wait() == "later"


def test_ranks_can_live_on_one_loop():
    comms = uni.local(3)

    async def one(comm):
        x = np.arange(5.0) + comm.rank
        await comm.start.all_reduce(x)
        row = await comm.start.split(comm.rank % 2)
        await row.start.barrier()
        gathered = await comm.start.all_gather(np.full(2, comm.rank))
        return x.tolist(), gathered[:, 0].tolist()

    async def main():
        return await asyncio.gather(*map(one, comms))

    assert asyncio.run(main()) == [([3.0, 6.0, 9.0, 12.0, 15.0], [0, 1, 2])] * 3
    for comm in comms:
        comm.close()


def test_a_work_is_a_coroutine_that_many_tasks_may_drive():
    gates = [gate(i) for i in range(4)]
    works = [start(steps) for _, steps in gates]

    async def main():
        opener = asyncio.get_running_loop().run_in_executor(None, lambda: [r.complete() for r, _ in gates])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in (*works, works[2], works[2])]
        await opener
        assert await asyncio.wait_for(works[1], 1) == 1
        return [task.result() for task in tasks]

    assert isinstance(works[0], Coroutine)
    assert asyncio.run(main()) == [0, 1, 2, 3, 2, 2]


def test_a_cancelled_task_leaves_the_work_going():
    request, steps = gate("later")
    work = start(steps)

    async def main():
        tasks = [asyncio.create_task(work), asyncio.create_task(work)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        threading.Timer(0.02, request.complete).start()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, result = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert result == "later"


# -- callbacks -------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_order_of_the_ends_on_one_thread_that_ends_later():
    gates = [gate(i) for i in range(6)]
    runtime = RealRuntime()
    works = [start(steps, runtime=runtime) for _, steps in gates]
    called: list[tuple[int, str]] = []
    for work in works:
        work.add_done_callback(lambda work: called.append((work.wait(0), threading.current_thread().name)))
    for i in (5, 0, 3, 1, 4, 2):
        gates[i][0].complete()
    wait_until(lambda: len(called) == 6)
    works[4].add_done_callback(lambda work: called.append((work.wait(0), threading.current_thread().name)))
    wait_until(lambda: len(called) == 7)
    assert called == [(i, "unisono-callbacks-3") for i in (5, 0, 3, 1, 4, 2, 4)]
    wait_until(lambda: all(thread.name != "unisono-callbacks-3" for thread in threading.enumerate()))


def test_a_callback_that_raises_is_logged_and_the_others_run(caplog):
    runtime = RealRuntime()
    request, steps = gate(error=PeerLost("gone", ranks=(2,)))
    work = start(steps, runtime=runtime)
    called = threading.Event()
    work.add_done_callback(lambda work: work.wait())
    work.add_done_callback(lambda work: called.set())
    with caplog.at_level(logging.ERROR, "unisono"):
        request.complete()
        assert called.wait(PATIENCE_S)
    assert "a callback of a work failed" in caplog.text
    assert "gone" in caplog.text
    with pytest.raises(UsageError, match="cannot be called"):
        work.add_done_callback("no function")


def test_callbacks_of_local_ranks_start_and_wait_for_collectives():
    """Each rank has its own thread for callbacks: on a single thread they would wait for each other."""

    def program(comm):
        found: list[float] = []
        over = threading.Event()

        def go_on(work):
            found.append(float(work.wait()[1]))
            if len(found) == 5:
                over.set()
                return
            comm.barrier()
            comm.start.all_reduce(np.arange(3.0) * len(found) + comm.rank).add_done_callback(go_on)

        comm.start.all_reduce(np.arange(3.0) + comm.rank).add_done_callback(go_on)
        assert over.wait(PATIENCE_S)
        return found

    expected = [3.0 + 3 * max(1, turn) for turn in range(5)]
    assert run_ranks(program, 3).values() == [expected] * 3


def test_callbacks_of_simulated_ranks_run_in_virtual_time_and_repeat():
    def program(comm):
        found: list[tuple[float, int, float]] = []

        def note(work):
            total = comm.start.all_reduce(np.arange(3.0) + comm.rank).wait()  # a callback may wait
            found.append((now(), work.wait().tag, float(total[2])))

        works = [comm.start.recv(np.zeros(2), src=1 - comm.rank, tag=tag) for tag in range(4)]
        for work in works:
            work.add_done_callback(note)
        for tag in (2, 0, 3, 1):
            comm.send(np.ones(2), dst=1 - comm.rank, tag=tag)
        assert uni.wait_any(works[2:]) in (0, 1)
        assert len(list(uni.as_completed(works))) == 4
        while len(found) < 4:
            sleep(0.001)
        with pytest.raises(DeadlineExceeded):
            uni.wait_any([comm.start.recv(np.zeros(2), src=1 - comm.rank, tag=9)], timeout=3)
        return found

    network = Network(latency_s=1e-3, bytes_per_s=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        runs = [uni.simulate(program, 2, network=network, seed=7).raise_first().results for _ in range(2)]
    assert runs[0] == runs[1]
    for found in runs[0]:
        assert [tag for _, tag, _ in found] == [2, 0, 3, 1]
        assert {total for _, _, total in found} == {5.0}
        assert [at for at, _, _ in found] == sorted(at for at, _, _ in found)
        assert found[0][0] >= 2e-3


# -- waits for several -----------------------------------------------------------------------------------


def test_wait_any_and_some_and_as_completed():
    gates = [gate(i, ValueError("mine") if i == 4 else None) for i in range(6)]
    works = [start(steps) for _, steps in gates]
    for timeout in (0, 0.01):
        with pytest.raises(DeadlineExceeded, match="none of 6 works"):
            uni.wait_any(works, timeout=timeout)
    threading.Timer(0.02, gates[4][0].complete).start()
    assert uni.wait_any(works) == 4, "a failure is an end"
    with pytest.raises(ValueError, match="mine"):
        works[4].wait()
    gates[1][0].complete()
    assert uni.wait_some(iter(works)) == [1, 4]
    given = uni.as_completed(works, timeout=PATIENCE_S)
    assert [next(given), next(given)] == [works[1], works[4]]
    for i in (5, 0, 3, 2):
        gates[i][0].complete()
        assert next(given) is works[i]
    assert list(given) == []
    with pytest.raises(UsageError, match="at least one"):
        uni.wait_any([])
    with pytest.raises(UsageError, match="allowed: works"):
        uni.wait_some([works[0], "no work"])


def test_a_wait_for_any_leaves_nothing_behind_in_works_that_go_on():
    first, steps = gate()
    last, later = gate()
    ended, work = start(steps), start(later)
    first.complete()
    for _ in range(10):
        assert uni.wait_any([work, ended]) == 1
    assert work._task._callbacks == []
    last.complete()


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
