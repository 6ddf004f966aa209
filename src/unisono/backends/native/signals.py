"""Signals held back while the main thread is in the midst of something that must not be left half done.

Knows Python's signal handlers and when they may run. Does not know what is being done.

Python runs a handler between any two instructions of the main thread, and most handlers raise: Ctrl-C, or the
exit that a program makes of SIGTERM. One that struck between the engine's news and the operation that it ends
would lose the news, and whoever waits for it would wait for ever.
"""

from __future__ import annotations

import sys
import threading

# The C functions: what `signal` puts around them costs ten times as much, and this is done at every wait.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from types import FrameType
from typing import Any, Final

__all__ = ["DEFERRED", "DeferredSignals"]

# Ctrl-C comes first, to be let through last.
_NUMBERS: Final = tuple(map(int, (SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGUSR2)))


class DeferredSignals:
    """Within its block the handlers of the main thread only run where `deliver` is called, or after it."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._depth = 0
        self.came: list[int] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth += 1
        if self._depth > 1:
            return
        try:
            for number in _NUMBERS:
                handler = getsignal(number)
                # What only kills or is ignored leaves nothing half done.
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal(number, self._note)
        except BaseException:  # a handler struck before it was held back
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
        """Run the handlers of what came meanwhile. They may raise, so nothing may be half done here."""
        if threading.get_ident() == threading.main_thread().ident:
            self._deliver(self._handlers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self.came.append(number)
        elif number in self._handlers:
            self._handlers[number](number, frame)

    def _release(self) -> None:
        handlers = dict(self._handlers)
        self._depth = 0
        try:
            for number, handler in reversed(handlers.items()):
                if getsignal(number) == self._note:  # else somebody has put another one in its place
                    signal(number, handler)
                del self._handlers[number]  # not before: what strikes until then is passed on to it
        finally:
            self._deliver(handlers)

    def _deliver(self, handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
        while self.came:
            number = self.came.pop(0)
            if number in handlers:
                handlers[number](number, sys._getframe(2))


# A process has one main thread, and one handler for each signal.
DEFERRED: Final = DeferredSignals()
