"""How handlers run: on the threads of a pool, a bounded number at a time; `async def` ones on an event loop.

A *slot* is the right to run. A handler that waits for another rank gives its slot up meanwhile, so that
nested calls never deadlock, and takes precedence over new jobs when it wants the slot back.

With a reader, an idle thread reads frames: the thread that reads a call runs it, and only if that takes long
does the next thread read on (see native/engine/mailbox.hpp). Without one, idle threads sleep.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from unisono.core.runtime import Event, Runtime, Waiting
from unisono.errors import UsageError

if TYPE_CHECKING:
    import asyncio

__all__ = ["WAITING_MAX", "Loop", "Pool", "Reader", "held_slot", "run_virtual"]

_log = logging.getLogger("unisono.rpc")

# Handlers that wait for other ranks, each on a thread of its own.
WAITING_MAX: Final = 1024
# An idle thread ends after this time; starting a new one costs about 0.1 ms.
_LINGER_S: Final = 1.0
# Idle threads that read: one reads, the others take over while handlers run.
_READERS_MAX: Final = 4

_thread = threading.local()  # .slot: the pool whose slot the thread holds


def held_slot() -> Pool | None:
    """The pool whose slot the calling thread holds; None outside of handlers."""
    return getattr(_thread, "slot", None)


class Reader(Protocol):
    """What an idle thread of the pool does."""

    def read(self) -> None:
        """Wait for frames and dispatch them; also returns after `wake_reader`, or after a while without."""

    def wake_reader(self) -> None:
        """Make one thread return from `read`."""


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
        self._resuming: deque[Event] = deque()
        self._running = 0
        self._waiting = 0
        self._idle = 0
        self._threads = 0
        self._wakes = threading.Semaphore(0)
        self._is_closed = False
        self._is_empty = runtime.event()
        self._own = threading.local()

    def start(self) -> None:
        """Begin to read, if there is a reader."""
        if self._reader is not None:
            with self._lock:
                self._start_thread()

    @property
    def is_full(self) -> bool:
        """Whether more handlers wait than any program needs: another one might wait for ever."""
        return self._waiting >= WAITING_MAX

    @property
    def has_jobs(self) -> bool:
        """Whether jobs are queued: the calling thread, if it is one of the pool's, takes the next at once."""
        return bool(self._jobs)

    @property
    def _is_reading(self) -> bool:
        """Whether the calling thread reads: it runs what it puts by itself."""
        return getattr(self._own, "is_reading", False)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return getattr(self._own, "is_worker", False)

    def put(self, job: Any) -> None:
        """Queue a job. A thread of the pool that reads runs what it puts by itself."""
        with self._lock:
            self._jobs.append(job)
            if not self._is_reading:
                self._assign_thread()

    def is_idle(self) -> bool:
        """Whether no job runs, waits or is queued."""
        with self._lock:
            return not (self._jobs or self._running or self._waiting)

    def give_up_slot(self) -> None:
        """The job of the calling thread begins to wait for other ranks."""
        with self._lock:
            self._running -= 1
            self._waiting += 1
            self._pass_slot_on()

    def take_slot(self, waiting: Callable[[], Waiting]) -> None:
        """The job of the calling thread goes on as soon as a slot is free."""
        with self._lock:
            if self._running < self._limit:
                self._running += 1
                self._waiting -= 1
                return
            turn = self._runtime.event()
            self._resuming.append(turn)
        while not turn.is_set():
            self._runtime.block(turn, None, waiting, is_limited=False)

    def close(self, timeout: float, waiting: Callable[[], Waiting]) -> None:
        """End the threads, and wait for that unless the calling thread is one of them."""
        with self._lock:
            self._is_closed = True
            self._jobs.clear()
            for _ in range(self._idle if self._reader is None else 0):
                self._wakes.release()
            if self._threads == 0:
                self._is_empty.set()
        if not self.is_mine and not self._is_empty.is_set():
            self._runtime.block(self._is_empty, timeout, waiting)

    # -- threads ------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        self._own.is_worker = True
        try:
            while True:
                job = self._next()
                if job is not None:
                    _thread.slot = self
                    try:
                        self._run(job)
                    finally:
                        _thread.slot = None
                        with self._lock:
                            self._running -= 1
                            if self._resuming:
                                self._pass_slot_on()
                elif not self._wait_for_job():
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
            # Another thread has to read while this one runs.
            if self._reader is not None and self._idle == 0:
                self._start_thread()
            return self._jobs.popleft()

    def _wait_for_job(self) -> bool:
        """Read, or sleep; False if the thread is no longer needed."""
        reader = self._reader
        with self._lock:
            if self._is_closed or self._runtime.is_virtual:
                return False
            if reader is not None and self._idle >= _READERS_MAX:
                return False
            self._idle += 1
        if reader is not None:
            self._own.is_reading = True
            try:
                reader.read()
            finally:
                self._own.is_reading = False
                with self._lock:
                    self._idle -= 1
            return True
        if self._wakes.acquire(timeout=_LINGER_S):
            return True
        with self._lock:
            if self._idle:
                self._idle -= 1
                return False
        self._wakes.acquire()  # another thread took it off the idle count just now and wakes it
        return True

    def _assign_thread(self) -> None:
        """Find a thread for the next job. The caller holds the lock."""
        if self._is_closed or not self._jobs or self._running >= self._limit:
            return
        if self._idle == 0:
            self._start_thread()
        elif self._reader is not None:
            self._reader.wake_reader()
        else:
            self._idle -= 1
            self._wakes.release()

    def _pass_slot_on(self) -> None:
        """Give a free slot to a handler that wants it back, or to the next job. The caller holds the lock."""
        if self._resuming and self._running < self._limit:
            self._running += 1
            self._waiting -= 1
            self._resuming.popleft().set()
        else:
            self._assign_thread()

    def _start_thread(self) -> None:
        self._threads += 1
        self._runtime.start_thread(self._run_thread, self._name)


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        import asyncio  # loaded only by programs with async handlers

        self._runtime = runtime
        self._loop = asyncio.new_event_loop()
        self._ident = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._is_over = runtime.event()
        runtime.start_thread(self._run_thread, name)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.get_ident() == self._ident

    def run(self, job: Coroutine[Any, Any, None], on_task: Callable[[Callable[[], object]], None]) -> None:
        """Run a coroutine; `on_task` is called with a function that cancels it from any thread."""

        def begin() -> None:
            task = self._loop.create_task(job)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            on_task(lambda: self._loop.call_soon_threadsafe(task.cancel))

        self._loop.call_soon_threadsafe(begin)

    def close(self, timeout: float, waiting: Waiting) -> None:
        """Cancel what runs, and end the thread."""

        def end() -> None:
            self._is_closing = True
            for task in list(self._tasks):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        if not self.is_mine:
            self._runtime.block(self._is_over, timeout, lambda: waiting)

    def _run_thread(self) -> None:
        import asyncio

        self._ident = threading.get_ident()
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_closing:
                try:
                    self._loop.run_forever()
                except BaseException:  # SystemExit, for example, of a task that a handler has started
                    _log.exception("a task or callback of an async handler raised")
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
            self._is_over.set()


def run_virtual(made: Any) -> Any:
    """The result of a coroutine, or the items of an async generator, that awaits works only.

    In virtual time works block instead of suspending the coroutine.

    Raises:
        UsageError: it awaits something else.
    """
    if hasattr(made, "__anext__"):
        return _items(made)
    try:
        made.send(None)
    except StopIteration as stop:
        return stop.value
    made.close()
    raise UsageError(
        "an async handler awaits something that is not a Work; the simulator has no event loop",
        next_step="await only agent.start(...) there",
    )


def _items(made: Any) -> Iterator[Any]:
    try:
        while True:
            try:
                item = run_virtual(made.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_virtual(made.aclose())
