"""Parked threads: those that wait for another thread of this process. Deadlock detection asks for them."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable
from enum import Enum, auto
from types import CodeType, FrameType
from typing import TypeVar

__all__ = ["Parked", "current_frames", "is_idle_in", "parked_threads", "waits_in"]


class Parked(Enum):
    """How a thread waits for another thread of this process."""

    WITH_LIMIT = auto()
    WITHOUT_LIMIT = auto()


_Function = TypeVar("_Function", bound=Callable[..., object])
_idle_in: set[CodeType] = set()
_waits_in: set[CodeType] = {
    getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join).__code__,
    threading.Condition.wait.__code__,
}


def is_idle_in(fn: _Function) -> _Function:
    """Declare a thread idle while this is its innermost function: it sleeps there until another one acts."""
    _idle_in.add(fn.__code__)
    return fn


def waits_in(fn: _Function) -> _Function:
    """Declare that a thread waits for another one while this is its innermost function.

    Its argument `timeout` is the limit of the wait: None or -1 if there is none.
    """
    _waits_in.add(fn.__code__)
    return fn


def parked_threads() -> dict[threading.Thread, Parked]:
    """Threads that wait for other threads: in `join`, for a condition, future or queue, or idle in a pool.

    They are recognised by their innermost Python function. A thread that waits for a bare lock, in `sleep` or
    in C code is not included, because what ends its wait is unknown. Nor is one that starts a thread, for as
    long as that one may not be seen yet; nor the main thread if a signal handler may wake it.
    """
    pool = sys.modules.get("concurrent.futures.thread")
    idle = _idle_in if pool is None else {*_idle_in, pool._worker.__code__}
    frames, found = current_frames(), {}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is threading.main_thread() and _has_signal_handler():
            continue
        if frame is not None and frame.f_code in idle:
            found[thread] = Parked.WITHOUT_LIMIT
        elif frame is not None and frame.f_code in _waits_in and not _is_starting(frame):
            has_limit = frame.f_locals.get("timeout") not in (None, -1)
            found[thread] = Parked.WITH_LIMIT if has_limit else Parked.WITHOUT_LIMIT
    return found


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread.

    Python makes the frame objects while it holds its lock of threads; a garbage collection at that moment may
    need the same lock and wait for ever (CPython issue 106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _is_starting(frame: FrameType) -> bool:
    """Whether a thread that waits for a condition waits for another one to begin."""
    event = frame.f_back
    caller = None if event is None else event.f_back
    return caller is not None and caller.f_code is threading.Thread.start.__code__


def _has_signal_handler() -> bool:
    """Whether the program handles a signal by its own function, which may do anything."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(one) and one is not signal.default_int_handler for one in handlers)
