"""Time and threads: deadlines, timers, and a timer thread that exists only while it is needed."""

from __future__ import annotations

import itertools
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.ranks import PATIENCE_S, run_ranks, wait_until

import unisono as uni
from unisono.core.clock import RealEvent, RealRuntime
from unisono.core.runtime import NEVER, Deadline, Waiting
from unisono.errors import UsageError

QUICK = settings(derandomize=True, deadline=None, database=None, max_examples=100)


class StoppedClock(RealRuntime):
    """A clock that stands at the time to which it is set."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self.time = now

    def now(self) -> float:
        return self.time


def timer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "unisono-timers"]


@QUICK
@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_deadline_is_a_point_in_time(now, timeout):
    deadline = StoppedClock(now).deadline(timeout)
    assert deadline.at == now + timeout
    assert deadline.remaining(now) == max(0.0, now + timeout - now)
    assert deadline.remaining(now + timeout) == 0.0
    assert deadline.remaining(now + timeout + 5) == 0.0
    assert deadline.has_passed(now + timeout)
    assert deadline.has_passed(now) is (now + timeout <= now)


@pytest.mark.parametrize("timeout", [2, 2.0, np.float32(2), np.int64(2)])
def test_a_timeout_is_any_real_number(timeout):
    deadline = RealRuntime().deadline(timeout)
    assert deadline.given_s == 2.0
    assert type(deadline.given_s) is float


@pytest.mark.parametrize("timeout", [None, math.inf, 1e9, 1e300, 10**400])
def test_no_limit_never_passes(timeout):
    assert StoppedClock(5.0).deadline(timeout) is NEVER
    assert NEVER.remaining(1e300) is None
    assert not NEVER.has_passed(1e300)
    assert Deadline(None) == NEVER


@pytest.mark.parametrize(
    "timeout", [-1, -0.001, math.nan, -math.inf, True, False, "1", b"1", [1], 1j, -(10**400)]
)
def test_an_invalid_timeout_is_refused_before_anything_happens(timeout):
    with pytest.raises(UsageError, match=r"timeout=.*; allowed: seconds >= 0, or None for no limit"):
        RealRuntime().deadline(timeout)


def test_whole_numbers_and_numpys_floats_are_timeouts():
    assert StoppedClock(1.0).deadline(2).at == 3.0
    assert StoppedClock(1.0).deadline(np.float64(0.5)).at == 1.5


def test_the_clock_never_goes_back():
    runtime = RealRuntime()
    times = [runtime.now() for _ in range(1000)]
    assert times == sorted(times)


def test_waiting_ends_with_the_event_or_the_time():
    runtime = RealRuntime()
    event = runtime.event()
    waiting = lambda: Waiting(0, (), "test")  # noqa: E731
    assert runtime.block(event, 0, waiting) is False
    event.set()
    assert runtime.block(event, None, waiting) is True
    assert runtime.block(event, math.inf, waiting) is True
    event.clear()
    threading.Timer(0, event.set).start()
    assert runtime.block(event, math.inf, waiting) is True
    before = runtime.now()
    runtime.sleep(0.01)
    assert runtime.now() - before >= 0.01


def interrupt_at(step: int, call: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt before the n-th bytecode of a call; return False if the call has fewer."""
    left = step

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("is_open", [False, True])
def test_a_signal_at_any_point_of_a_wait_leaves_the_event_usable(is_open: bool) -> None:
    for step in itertools.count(1):
        event = RealEvent()
        if is_open:
            event._gate.release()  # as in the middle of `set`: the wait passes the gate
        was_interrupted = interrupt_at(step, partial(event.wait, 0.0))
        waiters = [threading.Thread(target=event.wait, daemon=True) for _ in range(2)]
        for waiter in waiters:
            waiter.start()
        setter = threading.Thread(target=event.set, daemon=True)
        for thread in (setter, *waiters):
            if thread is setter:
                thread.start()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"stuck after a signal at step {step}"
        event.clear()
        assert event.wait(0.001) is False
        if not was_interrupted:
            assert step > 20
            return


@pytest.mark.parametrize(
    ("waiting", "text"),
    [
        (Waiting(0, (), 'recv on "w"'), 'rank 0 waits for any rank in recv on "w"'),
        (Waiting(1, (0,), "send"), "rank 1 waits for rank 0 in send"),
        (Waiting(2, (0, 3), "barrier #4"), "rank 2 waits for ranks 0, 3 in barrier #4"),
    ],
)
def test_the_description_of_a_wait_is_a_sentence(waiting, text):
    assert str(waiting) == text


# -- timers ----------------------------------------------------------------------------------------------


def test_timers_run_in_the_order_of_their_times_on_one_thread():
    runtime, ran, done = RealRuntime(), [], threading.Event()
    start = runtime.now() + 0.3
    runtime.call_at(start + 0.04, done.set)
    for delay in (0.03, 0.0, 0.02, 0.01, 0.02):
        runtime.call_at(start + delay, lambda d=delay: ran.append((d, runtime.now(), threading.get_ident())))
    assert done.wait(PATIENCE_S)
    assert [d for d, _, _ in ran] == [0.0, 0.01, 0.02, 0.02, 0.03]
    assert all(at >= start + d for d, at, _ in ran), "never too early"
    assert len({thread for _, _, thread in ran}) == 1


def test_a_timer_whose_time_has_passed_runs_at_once():
    runtime, done = RealRuntime(), threading.Event()
    runtime.call_at(0.0, done.set)
    assert done.wait(PATIENCE_S)


def test_a_new_earlier_timer_runs_first():
    runtime, ran, done = RealRuntime(), [], threading.Event()
    late = runtime.call_at(runtime.now() + 3600, lambda: ran.append("late"))
    wait_until(lambda: runtime._timers._changed._waiters)  # the timer thread sleeps
    runtime.call_at(runtime.now(), done.set)
    assert done.wait(PATIENCE_S)
    late.cancel()
    wait_until(lambda: not timer_threads())
    assert ran == []


def test_the_timer_thread_ends_after_the_last_timer_and_is_started_again():
    runtime = RealRuntime()
    for _ in range(5):
        done = threading.Event()
        assert not timer_threads()
        runtime.call_at(runtime.now(), done.set)
        assert done.wait(PATIENCE_S)
        wait_until(lambda: not timer_threads())
    assert not runtime._timers._heap


def test_the_timer_thread_ends_when_the_last_timer_is_cancelled():
    runtime = RealRuntime()
    timers = [runtime.call_at(runtime.now() + 3600, lambda: None) for _ in range(20)]
    assert len(timer_threads()) == 1
    for timer in timers:
        timer.cancel()
        timer.cancel()
    wait_until(lambda: not timer_threads())


def test_cancelled_timers_are_not_kept_until_they_would_be_due():
    runtime = RealRuntime()
    last = runtime.call_at(runtime.now() + 3600, lambda: None)
    for _ in range(1000):
        runtime.call_at(runtime.now() + 7200, lambda: None).cancel()
    assert len(runtime._timers._heap) < 100
    assert len(timer_threads()) == 1
    last.cancel()
    wait_until(lambda: not timer_threads())


def test_a_cancelled_timer_does_not_run():
    runtime, ran, done = RealRuntime(), [], threading.Event()
    start = runtime.now() + 0.3
    timers = [runtime.call_at(start, lambda i=i: ran.append(i)) for i in range(10)]
    for timer in timers[::2]:
        timer.cancel()
    runtime.call_at(start + 0.01, done.set)
    assert done.wait(PATIENCE_S)
    assert ran == [1, 3, 5, 7, 9]
    timers[1].cancel()  # too late, and without effect


def test_a_timer_that_fails_does_not_affect_the_others(caplog):
    runtime, done = RealRuntime(), threading.Event()
    now = runtime.now()
    with caplog.at_level(logging.ERROR, "unisono"):
        runtime.call_at(now, lambda: 1 / 0)
        runtime.call_at(now, done.set)
        assert done.wait(PATIENCE_S)
        wait_until(lambda: not timer_threads())
        again = threading.Event()
        runtime.call_at(now, again.set)
        assert again.wait(PATIENCE_S)
    assert "ZeroDivisionError" in caplog.text


def test_a_timer_may_set_the_next():
    runtime, done, left = RealRuntime(), threading.Event(), [20]

    def again() -> None:
        left[0] -= 1
        if left[0]:
            runtime.call_at(runtime.now(), again)
        else:
            done.set()

    again()
    assert done.wait(PATIENCE_S)


def test_timers_can_be_set_and_cancelled_from_many_threads():
    runtime, ran = RealRuntime(), []
    due = runtime.now() + 0.05

    def work(_) -> int:
        kept = 0
        for i in range(200):
            timer = runtime.call_at(due + i * 1e-5, lambda: ran.append(1))
            if i % 3:
                timer.cancel()
            else:
                kept += 1
        return kept

    threads: list[int] = []
    workers = [threading.Thread(target=lambda: threads.append(work(None))) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    wait_until(lambda: not timer_threads())
    assert sum(threads) == 6 * 67
    # A timer whose time had passed when it was set may run before it can be cancelled.
    assert len(ran) >= sum(threads)
    assert runtime.now() >= due


# -- timeouts and timers in the public API ---------------------------------------------------------------


@pytest.mark.parametrize("timeout", [-1, math.nan, "soon", True])
@pytest.mark.parametrize("verb", ["recv", "probe", "barrier", "all_reduce", "send", "split"])
def test_every_verb_refuses_an_invalid_timeout(verb, timeout):
    arguments = {"recv": (np.empty(1),), "all_reduce": (np.ones(1),), "send": (np.ones(1), 0), "split": (0,)}
    (world,) = uni.local(1)
    with world:
        with pytest.raises(UsageError, match="timeout="):
            getattr(world, verb)(*arguments.get(verb, ()), timeout=timeout)
        assert world.all_reduce(1) == 1


def test_a_started_operation_with_a_deadline_leaves_no_timer_behind():
    def program(comm):
        works = [comm.start.all_reduce(np.ones(3), timeout=3600) for _ in range(20)]
        uni.wait_all(works)
        return comm.backend.runtime

    for runtime in run_ranks(program, 3).values():
        wait_until(lambda runtime=runtime: not runtime._timers._heap)
    wait_until(lambda: not timer_threads())


def test_a_blocking_verb_needs_no_timer_thread():
    def program(comm):
        comm.all_reduce(np.ones(3), timeout=3600)
        return len(timer_threads())

    wait_until(lambda: not timer_threads())  # of tests before
    assert run_ranks(program, 2).values() == [0, 0]


COLLECTS_WHILE_FRAMES_ARE_MADE = """
import gc, threading
from unisono.core.parked_threads import current_frames

class Node:
    pass

def deep(levels):
    if levels:
        return deep(levels - 1)
    gc.set_threshold(1)  # the next object that is made collects
    frames = current_frames()
    gc.set_threshold(10_000)
    assert threading.get_ident() in frames
    assert gc.isenabled()

for turn in range(100):
    for _ in range(5):
        node = Node()
        node.me, node.local = node, threading.local()
    del node
    deep(turn % 7)
gc.disable()
current_frames()
assert not gc.isenabled()
print("ended")
"""


def test_stacks_are_read_while_a_finalizer_needs_the_lock_of_threads() -> None:
    """CPython would deadlock: see current_frames."""
    ended = subprocess.run(
        [sys.executable, "-c", COLLECTS_WHILE_FRAMES_ARE_MADE], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "ended\n", ended.stderr
