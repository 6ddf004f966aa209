"""Callback threads: each rank's one thread that runs the callbacks of its works, and nothing else.

Not the thread that dispatches completions: a callback may start operations and wait for them. Not one thread
for the process: ranks of this process wait for each other in their callbacks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from unisono.core.runtime import Killed, Runtime

__all__ = ["CallbackThread", "callback_thread"]

_log = logging.getLogger("unisono")

# How long the thread stays when no callback is expected: a program that adds one after another keeps it.
_LINGER_S: Final = 0.05


class CallbackThread:
    """Runs callbacks one after another, in the order in which they become due.

    The thread is made when the first callback is added, and ends soon after the last one has run. In virtual
    time it exists only while callbacks are due: a thread that idles would look like one that is stuck.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._due: deque[Callable[[], object]] = deque()
        self._expected = 0
        self._is_running = False

    def expect(self, runtime: Runtime) -> None:
        """A callback was added: `run` will be called once for it."""
        with self._changed:
            if not runtime.is_virtual:
                self._ensure_thread(runtime)
            self._expected += 1

    def run(self, runtime: Runtime, callback: Callable[[], object]) -> None:
        """Run it after those that became due earlier."""
        with self._changed:
            self._expected -= 1
            self._due.append(callback)
            self._changed.notify()
            self._ensure_thread(runtime)

    def _ensure_thread(self, runtime: Runtime) -> None:
        if not self._is_running:
            serve = self._serve_virtual if runtime.is_virtual else self._serve
            runtime.start_thread(serve, f"unisono-callbacks-{self._rank}")
            self._is_running = True  # after the start, which fails where no thread can be had

    def _serve(self) -> None:
        while (callback := self._next()) is not None:
            _call(callback)
            del callback  # it holds the work, and with it the result

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._due:
                is_idle = not self._expected
                self._changed.wait(_LINGER_S if is_idle else None)
                if is_idle and not self._due and not self._expected:
                    self._is_running = False
                    return None
            return self._due.popleft()

    def _serve_virtual(self) -> None:
        while self._due:
            _call(self._due.popleft())
        self._is_running = False


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Killed:
        raise  # the rank ends, and this thread with it
    except BaseException:  # also SystemExit: the callbacks of other works are still to run
        _log.exception("a callback of a work failed")


_threads: WeakKeyDictionary[Runtime, dict[int, CallbackThread]] = WeakKeyDictionary()
_lock = threading.Lock()


def callback_thread(runtime: Runtime, rank: int) -> CallbackThread:
    """The callback thread of a rank, by its world rank."""
    with _lock:
        of_runtime = _threads.setdefault(runtime, {})
        if rank not in of_runtime:
            of_runtime[rank] = CallbackThread(rank)
        return of_runtime[rank]


def _after_fork() -> None:
    """No thread survives a fork, and locks that one held stay locked."""
    global _lock
    _threads.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
