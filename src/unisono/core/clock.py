"""The machine's runtime. Above the transports, only this module reads a clock, waits or starts a thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from unisono.core.parked_threads import is_idle_in, waits_in
from unisono.core.runtime import FOREVER_S, Event, Finalizer, Runtime, Timer, Waiting

__all__ = [
    "Dropped",
    "RealEvent",
    "RealRuntime",
    "call_before_threads_are_joined",
    "file_age_s",
    "when_dropped",
]

_log = logging.getLogger("unisono")


# A signal that arrives just before the main thread sleeps does not wake it: the thread polls at this
# interval.
_SIGNALS_S: Final = 0.1

# How long the timer thread sleeps at most; it ends when it finds no timer left, twice.
_LINGER_S: Final = 0.05
# A call for a finalizer that finds no thread to be had (no memory, say) asks for one again after this.
_NO_THREAD_S: Final = 0.05
# Compact the heap when cancelled timers outnumber live ones by this many.
_CANCELLED_KEPT: Final = 64


class RealEvent:
    """An event for threads of this process. A signal handler may raise at any point of it.

    `threading.Event` does not allow that: it is made of Python functions that take a lock, and an exception
    just after that leaves it locked for ever. Here one lock is the gate: open once the event is set, and each
    thread that passes opens it again for the next.
    """

    __slots__ = ("_gate", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """Set the flag and wake the threads that wait for it."""
        self._is_set = True
        # Not contextlib.suppress: a signal must not strike between the flag and the release.
        try:  # noqa: SIM105
            self._gate.release()
        except RuntimeError:  # it is open
            pass

    def clear(self) -> None:
        """Clear the flag."""
        self._is_set = False
        self._gate.acquire(blocking=False)

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set

    @waits_in
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flag; False if the timeout passed first."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = -1 if until is None else max(0.0, until - time.monotonic())
            try:
                has_passed = self._gate.acquire(timeout=left)
            finally:
                if self.is_set():
                    self.set()
            if not has_passed:  # else it is set, or a `clear` came before the end of a `set`
                break
        return self._is_set


class RealRuntime(Runtime):
    """The machine's clock and threads."""

    def __init__(self) -> None:
        self._timers = _Timers()
        self._forks = _forks
        _collected.serve()

    @property
    def is_forked(self) -> bool:
        """Whether the process was forked since."""
        return self._forks != _forks

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def event(self) -> RealEvent:
        """Make an event."""
        return RealEvent()

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event; signals such as Ctrl-C interrupt it."""
        assert isinstance(event, RealEvent)
        if threading.current_thread() is not threading.main_thread():
            return event.wait(None if timeout is None else min(timeout, FOREVER_S))
        end = self.now() + (FOREVER_S if timeout is None else timeout)
        while not event.wait(max(0.0, min(_SIGNALS_S, end - self.now()))):
            if self.now() >= end:
                return False
        return True

    def call_at(self, when: float, fn: Callable[[], None]) -> Timer:
        """Call `fn` at the given time on the timer thread."""
        return self._timers.add(when, fn)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` on the thread for finalizers."""
        _collected.add(fn)

    def finalizer(self, one: object, fn: Callable[[], None]) -> Finalizer:
        """Call `fn` on the thread for finalizers once an object was dropped."""
        return _RealFinalizer(one, fn)

    def start_thread(self, fn: Callable[[], None], name: str) -> None:
        """Start a daemon thread."""
        threading.Thread(target=fn, name=name, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class _Timers:
    """The timers of a process, run by one thread that exists while there are any, and shortly after.

    Most timers are cancelled long before they are due, and the next one is set at once: neither wakes the
    thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, _Due]] = []
        self._numbers = itertools.count()
        self._awaited = 0  # how many of them were not cancelled
        self._running = False
        self._wakes_at = 0.0  # when the thread wakes at the latest

    def add(self, when: float, fn: Callable[[], None]) -> _Due:
        due = _Due(self, fn)
        with self._changed:
            if not self._running:  # first, because it fails where no thread can be had
                threading.Thread(target=self._run, name="unisono-timers", daemon=True).start()
                self._running, self._wakes_at = True, 0.0
            heapq.heappush(self._heap, (when, next(self._numbers), due))
            self._awaited += 1
            if when < self._wakes_at:
                self._changed.notify()
        return due

    def cancel(self, due: _Due) -> None:
        with self._changed:
            if due.fn is None:
                return
            due.fn = None
            self._awaited -= 1
            if len(self._heap) > 2 * self._awaited + _CANCELLED_KEPT:
                self._heap = [entry for entry in self._heap if entry[2].fn is not None]
                heapq.heapify(self._heap)

    def _run(self) -> None:
        is_idle = False
        while True:
            with self._changed:
                while self._heap and self._heap[0][2].fn is None:
                    heapq.heappop(self._heap)
                if not self._heap and is_idle:
                    self._running = False
                    return
                is_idle = not self._heap
                now = time.monotonic()
                delay = _LINGER_S if is_idle else min(self._heap[0][0] - now, _LINGER_S)
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
                except Exception:  # the other timers go on
                    _log.exception("a timer failed")


class Dropped(weakref.ref[Any]):
    """A reference to an object, with what is to be done when the object has been dropped.

    Not `__del__` and not `weakref.finalize`: Python discards an exception that a signal handler raises in
    those, such as Ctrl-C. The callback of this reference must be a function of C, in which no handler runs.
    If the reference itself is dropped first, nothing is done.
    """

    __slots__ = ("act", "also")
    act: Callable[[], None]
    also: object  # kept with it

    @classmethod
    def watch(cls, one: object, act: Callable[[], None], add: Callable[[Any], None]) -> Dropped:
        """Refer to an object; when it is dropped, `add` is called with the reference."""
        reference = cls(one, add)
        reference.act = act
        return reference


class _Collected:
    """Runs calls for finalizers on one idle thread of the process.

    A finalizer may run while any lock is held, even one of the threading module, so it can neither take a
    lock nor start a thread. Therefore the thread exists before, and the queue is a SimpleQueue, whose `put`
    is reentrant.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | Dropped] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_served = False

    def serve(self) -> None:
        with self._lock:
            if not self._is_served:
                threading.Thread(target=self._run, name="unisono-collected", daemon=True).start()
                self._is_served = True

    def add(self, fn: Callable[[], None]) -> None:
        self._calls.put(fn)

    def watch(self, one: object, fn: Callable[[], None]) -> Dropped:
        return Dropped.watch(one, fn, self._calls.put)

    @is_idle_in
    def _run(self) -> None:
        while True:
            first = self._calls.get()
            # On a thread of its own: deadlock detection counts it as active only while the call runs.
            while True:
                caller = threading.Thread(
                    target=self._call, args=(first,), name="unisono-dropped-call", daemon=True
                )
                try:
                    caller.start()
                    break
                except (RuntimeError, MemoryError):  # no thread can be had: the calls wait until one can
                    time.sleep(_NO_THREAD_S)
            del first  # it may hold much
            caller.join()

    def _call(self, fn: Callable[[], None] | Dropped) -> None:
        """Make this call and those that were queued meanwhile: one garbage collection may queue hundreds."""
        while True:
            try:
                (fn.act if isinstance(fn, Dropped) else fn)()
            except Exception:  # the other calls go on
                _log.exception("a forgotten object could not be closed")
            try:
                fn = self._calls.get_nowait()
            except Empty:
                return


_collected = _Collected()
_forks = 0  # between the first process and this one


def when_dropped(one: object, fn: Callable[[], None]) -> Dropped:
    """Call `fn` on the thread for finalizers when an object was dropped, if the result is kept until then."""
    return _collected.watch(one, fn)


class _RealFinalizer:
    """A finalizer in which no signal handler runs; see Dropped."""

    def __init__(self, one: object, fn: Callable[[], None]) -> None:
        self._fn = fn
        # Kept here, and not by the object: if both are garbage of one cycle, no callback is called.
        _finalizers[id(self)] = when_dropped(one, self._run)

    def detach(self) -> bool:
        return _finalizers.pop(id(self), None) is not None

    def _run(self) -> None:
        if self.detach():
            self._fn()


# By id of the finalizer, which the reference holds.
_finalizers: dict[int, Dropped] = {}


def call_before_threads_are_joined(fn: Callable[[], None]) -> None:
    """Call `fn` when the main thread ends, before Python waits for the other threads.

    `atexit` callbacks run after that. `concurrent.futures` registers here, too, and joins its threads. The
    last one registered is called first, so its module must be imported before.
    """
    import concurrent.futures.thread  # noqa: F401

    with contextlib.suppress(RuntimeError):  # the main thread has ended already
        threading._register_atexit(fn)  # type: ignore[attr-defined]


def file_age_s(path: Path) -> float:
    """Seconds since a file was written; negative if the clock was set back."""
    return time.time() - path.lstat().st_mtime


def _after_fork() -> None:
    """No thread survives a fork, and locks that one held stay locked."""
    global _collected, _forks
    _collected = _Collected()
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)


class _Due:
    """One timer; `fn` is None once it was cancelled or has begun."""

    def __init__(self, timers: _Timers, fn: Callable[[], None]) -> None:
        self._timers = timers
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self._timers.cancel(self)
