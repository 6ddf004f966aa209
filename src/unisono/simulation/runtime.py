"""Virtual time for one rank: the runtime that the simulator puts in place of the real one."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Final

from unisono.core.runtime import Deadline, Event, Finalizer, Killed, Runtime, Timer, Waiting
from unisono.simulation.checks import check_amount
from unisono.simulation.scheduler import Scheduler, SimThread, Stopped, TimedCall, scheduler_here

__all__ = ["SimEvent", "SimRuntime", "now", "sleep"]

# The virtual time of a poll. It must not be 0: a loop that polls until something has happened would go on for
# ever at one point of virtual time. A loop that has polled for long pays a hundredth of that time per poll:
# it takes some thousand rounds per virtual second, and not a million.
POLL_S: Final = 1e-6
POLL_SHARE: Final = 0.01


def now() -> float:
    """Seconds of virtual time in a simulated rank; of the machine's monotonic clock elsewhere."""
    scheduler = scheduler_here()
    return time.monotonic() if scheduler is None else scheduler.now


def sleep(seconds: float) -> None:
    """Let virtual time pass in a simulated rank; real time elsewhere."""
    scheduler = scheduler_here()
    if scheduler is None:
        time.sleep(seconds)
    else:
        check_amount("seconds", seconds)
        scheduler.blocking_thread().sleep(seconds)


class SimEvent:
    """A flag in virtual time."""

    __slots__ = ("_is_set", "_scheduler", "waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self.waiters: list[SimThread] = []

    def set(self) -> None:
        """Set the flag and wake all waiting threads."""
        self._scheduler.check_caller()
        self._is_set = True
        for thread in self.waiters:
            thread.wake()

    def clear(self) -> None:
        """Clear the flag."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set


class SimRuntime(Runtime):
    """The clock and timers of one rank. Its timers are paused and end with the rank."""

    is_virtual = True
    sees_deadlocks = True

    def __init__(self, scheduler: Scheduler, thread: SimThread) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._polling_since = self._polled_at = 0.0

    @property
    def is_dead(self) -> bool:
        """Whether the rank was killed, or the simulation is stopping."""
        return self._thread.killed is not None or self._scheduler.is_stopping

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._scheduler.now

    def event(self) -> SimEvent:
        """Make an event."""
        return SimEvent(self._scheduler)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event in virtual time."""
        assert isinstance(event, SimEvent)
        thread = self._scheduler.blocking_thread()
        thread.check_alive()
        if event.is_set():
            return True
        timer = None
        if timeout is not None and timeout < math.inf:
            when = self._scheduler.now + timeout
            timer = self._scheduler.call_at(when, thread.wake, is_housekeeping=not is_limited)
        event.waiters.append(thread)
        try:
            thread.wait(waiting)
        finally:
            event.waiters.remove(thread)
            if timer is not None:
                timer.cancel()
        return event.is_set()

    def call_at(self, when: float, fn: Callable[[], None]) -> Timer:
        """Call `fn` at a virtual time; later if the rank is paused then, never once it has ended."""
        self._scheduler.check_caller()
        if when == math.inf:
            return TimedCall(self._scheduler, fn, is_housekeeping=True)
        return self._scheduler.call_at(when, lambda: self._on_time(fn))

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Call it at once: only one thread runs, and it holds no lock that `fn` could need."""
        fn()

    def finalizer(self, one: object, fn: Callable[[], None]) -> Finalizer:
        """Call it at once when the object is dropped."""
        made = weakref.finalize(one, fn)
        made.atexit = False
        return made

    def start_thread(self, fn: Callable[[], None], name: str) -> None:
        """Start another thread of the rank."""

        def run() -> None:
            try:
                fn()
            except Stopped:
                raise
            except Killed:
                pass  # it ends with its rank

        self._scheduler.add_helper(self._thread, run)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        check_amount("seconds", seconds)
        self._scheduler.blocking_thread().sleep(seconds)

    def deadline(self, timeout: float | None) -> Deadline:
        """Turn a timeout into a deadline; a timeout of 0 is a poll, which takes `POLL_S` or more."""
        if timeout == 0:
            self.polled()
        return super().deadline(timeout)

    def polled(self) -> None:
        """Let the time of a poll pass."""
        scheduler = self._scheduler
        if scheduler_here() is not scheduler or scheduler.current is not self._thread:
            return
        if scheduler.now != self._polled_at:
            self._polling_since = scheduler.now
        self._thread.sleep(max(POLL_S, (scheduler.now - self._polling_since) * POLL_SHARE))
        self._polled_at = scheduler.now

    def _on_time(self, fn: Callable[[], None]) -> None:
        if not self._thread.has_ended:
            self._thread.when_running(fn)
