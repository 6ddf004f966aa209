"""The pool: threads that run handlers, a bounded number at a time.

Knows slots and threads. Does not know what a job does. A handler that waits for another rank gives its slot
up meanwhile, so that calls which call back never deadlock; it takes precedence when it wants the slot again.

Where a backend has a mailbox, a thread that has nothing to run reads it: whoever reads a call runs it, and
only if that takes long does the next thread read on (see native/engine/mailbox.hpp).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from unisono.core.clock import Event, Runtime, Waiting

__all__ = ["WAITING_MAX", "Pool", "Reader"]

# Handlers that wait for other ranks, each on a thread of its own.
WAITING_MAX: Final = 1024
# A thread without work ends after a while; a new one costs a tenth of a millisecond.
_LINGER_S: Final = 1.0
_RESTING_MAX: Final = 4


class Reader(Protocol):
    """What a thread does that has nothing to run."""

    def read(self) -> None:
        """Wait for something to do; return when there may be."""

    def rouse(self) -> None:
        """Make one of those who read return."""


class Pool:
    """Runs jobs, at most `limit` at a time."""

    def __init__(
        self, runtime: Runtime, run: Callable[[Any], None], limit: int, name: str, reader: Reader | None
    ) -> None:
        self._runtime = runtime
        self._run = run
        self._limit = limit
        self._name = name
        self._reader = reader
        self._lock = threading.Lock()
        self._jobs: deque[Any] = deque()
        self._returning: deque[Event] = deque()
        self._running = 0
        self._waiting = 0
        self._resting = 0
        self._threads = 0
        self._wakes = threading.Semaphore(0)
        self._is_closed = False
        self._is_empty = runtime.event()
        self._mine = threading.local()
        if reader is not None:
            with self._lock:
                self._start_thread()

    @property
    def is_full(self) -> bool:
        """Whether more handlers wait than any program needs: whoever calls now would wait for ever."""
        return self._waiting >= WAITING_MAX

    @property
    def _is_reading(self) -> bool:
        """Whether the calling thread reads: it will run by itself what it has put."""
        return getattr(self._mine, "is_reading", False)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return getattr(self._mine, "is_worker", False)

    def put(self, job: Any) -> None:
        """Let a job be run. A thread of the pool that has nothing else to do runs it itself."""
        with self._lock:
            self._jobs.append(job)
            if not self._is_reading:
                self._help()

    def discard(self, job: Any) -> bool:
        """Take back a job that has not begun."""
        with self._lock:
            try:
                self._jobs.remove(job)
            except ValueError:
                return False
            return True

    def is_idle(self) -> bool:
        """Whether no job runs, waits or has to be run."""
        with self._lock:
            return not (self._jobs or self._running or self._waiting)

    def give_up_slot(self) -> None:
        """The job of the calling thread begins to wait for others."""
        with self._lock:
            self._running -= 1
            self._waiting += 1
            self._hand_on()

    def take_slot(self, waiting: Callable[[], Waiting]) -> None:
        """It goes on: as soon as a slot is free."""
        with self._lock:
            if self._running < self._limit:
                self._running += 1
                self._waiting -= 1
                return
            turn = self._runtime.event()
            self._returning.append(turn)
        while not turn.is_set():
            self._runtime.block(turn, None, waiting, is_limited=False)

    def close(self, timeout: float, waiting: Callable[[], Waiting]) -> None:
        """Let the threads end, and wait for it unless one of them asks."""
        with self._lock:
            self._is_closed = True
            self._jobs.clear()
            for _ in range(self._resting if self._reader is None else 0):
                self._wakes.release()
            if self._threads == 0:
                self._is_empty.set()
        if not self.is_mine and not self._is_empty.is_set():
            self._runtime.block(self._is_empty, timeout, waiting)

    # -- its threads --------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._mine.is_worker = True
        try:
            while True:
                job = self._next()
                if job is not None:
                    try:
                        self._run(job)
                    finally:
                        with self._lock:
                            self._running -= 1
                            if self._returning:
                                self._hand_on()
                elif not self._rest():
                    return
        finally:
            with self._lock:
                self._threads -= 1
                if self._is_closed and self._threads == 0:
                    self._is_empty.set()

    def _next(self) -> Any:
        with self._lock:
            if not self._jobs or self._running >= self._limit:
                return None
            self._running += 1
            # Somebody has to read while this one runs.
            if self._reader is not None and self._resting == 0:
                self._start_thread()
            return self._jobs.popleft()

    def _rest(self) -> bool:
        """Wait for work; False if the thread is no longer needed."""
        reader = self._reader
        with self._lock:
            if self._is_closed or self._runtime.is_virtual:
                return False
            if reader is not None and self._resting >= _RESTING_MAX:
                return False
            self._resting += 1
        if reader is not None:
            self._mine.is_reading = True
            try:
                reader.read()
            finally:
                self._mine.is_reading = False
                with self._lock:
                    self._resting -= 1
            return True
        if self._wakes.acquire(timeout=_LINGER_S):
            return True
        with self._lock:
            if self._resting:
                self._resting -= 1
                return False
        self._wakes.acquire()  # it was woken just now
        return True

    def _help(self) -> None:
        """Find a thread for the next job; the caller holds the lock."""
        if self._is_closed or not self._jobs or self._running >= self._limit:
            return
        if self._resting == 0:
            self._start_thread()
        elif self._reader is not None:
            self._reader.rouse()
        else:
            self._resting -= 1
            self._wakes.release()

    def _hand_on(self) -> None:
        """A slot is free: for who had it before, or for the next job. The caller holds the lock."""
        if self._returning and self._running < self._limit:
            self._running += 1
            self._waiting -= 1
            self._returning.popleft().set()
        else:
            self._help()

    def _start_thread(self) -> None:
        self._threads += 1
        self._runtime.start_thread(self._live, self._name)
