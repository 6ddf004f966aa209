"""Time and threads: the only place above the transports that reads a clock, waits or starts a thread.

Knows how to wait and when. Does not know what is waited for. The simulator puts a runtime of its own in
the place of this one, and everything above runs unchanged in virtual time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from numbers import Real
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from unisono.errors import UsageError, ranks_text

__all__ = [
    "NEVER",
    "Deadline",
    "Event",
    "Killed",
    "Parked",
    "RealRuntime",
    "Runtime",
    "Timer",
    "Waiting",
    "call_before_threads_are_joined",
    "file_age_s",
    "parked_threads",
]

_log = logging.getLogger("unisono")


class Event(Protocol):
    """A flag that threads can wait for through their runtime."""

    def set(self) -> None:
        """Raise the flag and wake who waits."""

    def clear(self) -> None:
        """Lower the flag."""

    def is_set(self) -> bool:
        """Whether the flag is up."""


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Forget it, unless it has begun."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When an operation gives up; None means never. `given_s` is the timeout that the user gave."""

    at: float | None
    given_s: float | None = None

    def remaining(self, now: float) -> float | None:
        """Seconds left, at least 0; None if there is no end."""
        return None if self.at is None else max(0.0, self.at - now)

    def has_passed(self, now: float) -> bool:
        """Whether it is over."""
        return self.at is not None and now >= self.at


# A signal that strikes just before the main thread falls asleep does not wake it: it is seen after this time.
_SIGNALS_S: Final = 0.1

NEVER: Final = Deadline(None)

# So often the thread of the timers looks whether any is left.
_LINGER_S: Final = 0.05
# More of the forgotten than of the others, and these, are thrown out before they are due.
_FORGOTTEN_KEPT: Final = 64

# Thirty years: longer waits overflow the clocks of some systems, and nobody is there to see them end.
_FOREVER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits, for whom and in what: what a Deadlock shows."""

    rank: int
    ranks: tuple[int, ...]
    operation: str

    def __str__(self) -> str:
        whom = ranks_text(self.ranks) if self.ranks else "any rank"
        return f"rank {self.rank} waits for {whom} in {self.operation}"


class Killed(BaseException):
    """Ends a rank's thread as a crash would: nobody catches it, cleans up after it or says goodbye."""


class Runtime(ABC):
    """A clock, a way to wait, and timers."""

    is_virtual = False
    # Whether it finds deadlocks by itself: all ranks live in this process.
    sees_deadlocks = False

    @property
    def is_dead(self) -> bool:
        """Whether a simulated crash has ended this rank: it finishes nothing, and nobody is to blame."""
        return False

    @abstractmethod
    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    @abstractmethod
    def event(self) -> Event:
        """Make an event."""

    @abstractmethod
    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event; False if the time ran out first.

        `waiting` is asked for only when a deadlock has to be explained. Without `is_limited` the timeout is
        only a pause for housekeeping: the caller will wait again, for ever if need be.

        Raises:
            Deadlock: no rank can go on, so the event will never come.
        """

    @abstractmethod
    def call_at(self, when: float, fn: Callable[[], None]) -> Timer:
        """Call `fn`, which must be short, at the given time on a thread of the runtime's own."""

    @abstractmethod
    def call_soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` where no lock is held: for finalizers, which run in the midst of any code."""

    @abstractmethod
    def start_thread(self, fn: Callable[[], None], name: str) -> None:
        """Run `fn` on a thread of its own, which keeps no process alive."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let time pass for the calling thread."""

    def used(self, rank: int) -> None:  # noqa: B027 - only who watches threads has something to do here
        """The calling thread begins an operation of a rank."""

    def polled(self) -> None:  # noqa: B027 - only virtual time has something to do here
        """Somebody asked whether something has happened, and does not wait.

        It costs nothing here. In virtual time it must, or a loop that asks until it has would never end.
        """

    def defer_signals(self) -> AbstractContextManager[None]:
        """A block in which signal handlers of Python only run while `block` waits, or after it."""
        return _AS_IT_COMES

    def deadline(self, timeout: float | None) -> Deadline:
        """Turn a timeout into a deadline: once, at the public door."""
        if timeout is None:
            return NEVER
        # NumPy's numbers are Real; the others come first because they are quickly told.
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, Real)) or not timeout >= 0:
            raise UsageError(f"timeout={timeout!r}; allowed: seconds >= 0, or None for no limit")
        if timeout >= _FOREVER_S:
            return NEVER
        return Deadline(self.now() + float(timeout), float(timeout))


# Where threads of Python wait for each other a handler strikes wherever it likes.
_AS_IT_COMES = nullcontext()


class RealRuntime(Runtime):
    """The machine's own clock and threads."""

    def __init__(self) -> None:
        self._timers = _Timers()
        _collected.serve()

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def event(self) -> threading.Event:
        """Make an event."""
        return threading.Event()

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event; signals such as Ctrl-C interrupt it."""
        assert isinstance(event, threading.Event)
        if threading.current_thread() is not threading.main_thread():
            return event.wait(None if timeout is None else min(timeout, _FOREVER_S))
        end = self.now() + (_FOREVER_S if timeout is None else timeout)
        while not event.wait(max(0.0, min(_SIGNALS_S, end - self.now()))):
            if self.now() >= end:
                return False
        return True

    def call_at(self, when: float, fn: Callable[[], None]) -> Timer:
        """Call `fn` at the given time on the timer thread."""
        return self._timers.add(when, fn)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` on the thread that waits for such calls."""
        _collected.add(fn)

    def start_thread(self, fn: Callable[[], None], name: str) -> None:
        """Start a daemon."""
        threading.Thread(target=fn, name=name, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class _Timers:
    """Calls that are due later, run by one thread that exists only while there are any, and a little longer.

    Most timers are forgotten long before they are due, and the next is set at once: neither wakes the thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, _Due]] = []
        self._numbers = itertools.count()
        self._awaited = 0  # how many of them were not forgotten
        self._running = False
        self._wakes_at = 0.0  # when the thread looks again in any case

    def add(self, when: float, fn: Callable[[], None]) -> _Due:
        due = _Due(self, fn)
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._numbers), due))
            self._awaited += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="unisono-timers", daemon=True).start()
            elif when < self._wakes_at:
                self._changed.notify()
        return due

    def forget(self, due: _Due) -> None:
        with self._changed:
            if due.fn is None:
                return
            due.fn = None
            self._awaited -= 1
            if len(self._heap) > 2 * self._awaited + _FORGOTTEN_KEPT:
                self._heap = [entry for entry in self._heap if entry[2].fn is not None]
                heapq.heapify(self._heap)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._heap and self._heap[0][2].fn is None:
                    heapq.heappop(self._heap)
                if not self._heap:
                    self._running = False
                    return
                now = time.monotonic()
                delay = min(self._heap[0][0] - now, _LINGER_S)
                if delay > 0:
                    self._wakes_at = now + delay
                    self._changed.wait(delay)
                    continue
                due = heapq.heappop(self._heap)[2]
                fn, due.fn = due.fn, None
                self._awaited -= 1
            if fn is not None:
                try:
                    fn()
                except Exception:  # the other timers must not pay for it
                    _log.exception("a timer failed")


class _Collected:
    """Calls that finalizers ask for, run by one idle thread for the whole process.

    A finalizer may run where any lock is held, even one of the threading module: it can neither take a lock
    nor start a thread. So the thread is there before, and the queue is one that may be filled at any point.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_served = False

    def serve(self) -> None:
        with self._lock:
            if not self._is_served:
                self._is_served = True
                threading.Thread(target=self._run, name="unisono-collected", daemon=True).start()

    def add(self, fn: Callable[[], None]) -> None:
        self._calls.put(fn)

    def _run(self) -> None:
        while True:
            # On a thread that ends: who looks for threads that may still act sees it only while it does.
            caller = threading.Thread(target=self._call, args=(self._calls.get(),), name="unisono-forgotten")
            caller.daemon = True
            caller.start()
            caller.join()

    def _call(self, fn: Callable[[], None]) -> None:
        """Call it, and what else was asked for meanwhile: one collection may find hundreds."""
        while True:
            try:
                fn()
            except Exception:  # the others must not pay for it
                _log.exception("a forgotten object could not be closed")
            try:
                fn = self._calls.get_nowait()
            except Empty:
                return


_collected = _Collected()


def call_before_threads_are_joined(fn: Callable[[], None]) -> None:
    """Call `fn` when the main thread ends, before Python waits for the other threads.

    What registers with `atexit` comes after them. `concurrent.futures` joins threads of its own at that
    moment: who registers later is called earlier, so it must have registered before.
    """
    import concurrent.futures.thread  # noqa: F401

    with contextlib.suppress(RuntimeError):  # the main thread has ended already
        threading._register_atexit(fn)  # type: ignore[attr-defined]


def file_age_s(path: Path) -> float:
    """How long ago a file was written; negative if the clock was set back."""
    return time.time() - path.lstat().st_mtime


class Parked(Enum):
    """How a thread waits for another thread of Python."""

    WITH_LIMIT = auto()
    WITHOUT_LIMIT = auto()


def parked_threads() -> dict[threading.Thread, Parked]:
    """Threads that wait for others: in `join`, for a condition, a future or a queue, or idle in a pool.

    Seen by the innermost function of each. A thread in a bare lock, in `sleep` or in another module's C code
    is not among them: what may end its wait is not known. Nor is a main thread that a signal may wake.
    """
    pool = sys.modules.get("concurrent.futures.thread")
    idle = {_Collected._run.__code__, *([] if pool is None else [pool._worker.__code__])}
    waits = {
        getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join).__code__,
        threading.Condition.wait.__code__,
    }
    frames, found = sys._current_frames(), {}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is threading.main_thread() and _has_signal_handler():
            continue
        if frame is not None and frame.f_code in idle:
            found[thread] = Parked.WITHOUT_LIMIT
        elif frame is not None and frame.f_code in waits:
            has_limit = frame.f_locals.get("timeout") not in (None, -1)
            found[thread] = Parked.WITH_LIMIT if has_limit else Parked.WITHOUT_LIMIT
    return found


def _has_signal_handler() -> bool:
    """Whether the program handles a signal by a function of its own, which may do anything."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(one) and one is not signal.default_int_handler for one in handlers)


def _after_fork() -> None:
    """No thread survives a fork, and what it held stays locked."""
    global _collected
    _collected = _Collected()


os.register_at_fork(after_in_child=_after_fork)


class _Due:
    """One call that is due; `fn` is None once it has been forgotten or begun."""

    def __init__(self, timers: _Timers, fn: Callable[[], None]) -> None:
        self._timers = timers
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self._timers.forget(self)
