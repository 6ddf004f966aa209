"""Deferred signals: handlers do not run while the main thread does something that must not be interrupted.

Python runs a handler between any two instructions of the main thread, and most handlers raise: Ctrl-C, or a
program's exit on SIGTERM. A handler that raised between the engine's completion and its dispatch would lose
the completion, and the thread that waits for it would wait for ever.
"""

from __future__ import annotations

import sys
import threading

# The C functions: the `signal` module's wrappers take ten times as long, and every wait calls these.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from types import FrameType
from typing import Any, Final

__all__ = ["DEFERRED", "DeferredSignals"]

# SIGINT is the first, so that its handler is restored last.
_NUMBERS: Final = tuple(map(int, (SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGUSR2)))


class DeferredSignals:
    """A context manager: in its block, handlers of the main thread run only in `deliver`, or at its end."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._depth = 0
        self.pending: list[int] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth += 1
        if self._depth > 1:
            return
        try:
            for number in _NUMBERS:
                handler = getsignal(number)
                # Default actions and ignored signals do not run Python code.
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal(number, self._note)
        except BaseException:  # a handler ran before it was deferred
            self._release()
            raise

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth > 1:
            self._depth -= 1
        else:
            self._release()

    def deliver(self) -> None:
        """Run the handlers of pending signals. They may raise, so call this only at a consistent point."""
        if threading.get_ident() == threading.main_thread().ident:
            self._deliver(self._handlers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self.pending.append(number)
        elif number in self._handlers:
            self._handlers[number](number, frame)

    def _release(self) -> None:
        handlers = dict(self._handlers)
        self._depth = 0
        try:
            for number, handler in reversed(handlers.items()):
                if getsignal(number) == self._note:  # else the program has installed another one
                    signal(number, handler)
                del self._handlers[number]  # not earlier: `_note` passes on what comes until now
        finally:
            self._deliver(handlers)

    def _deliver(self, handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
        while self.pending:
            number = self.pending.pop(0)
            if number in handlers:
                handlers[number](number, sys._getframe(2))


# One per process, like the main thread and the signal handlers.
DEFERRED: Final = DeferredSignals()
