"""The clock of native ranks: a thread that blocks makes progress in the engine meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from unisono import _native
from unisono.backends.native.completions import CompletionDispatcher
from unisono.backends.native.signals import DEFERRED, DeferredSignals
from unisono.core.clock import Event, RealRuntime, Waiting

__all__ = ["NativeRuntime"]

# How long the engine waits before Python looks for signals.
_SLICE_S = 0.05


class EngineEvent:
    """A flag. Who waits for it does so in the engine, and is poked out if another thread raises it."""

    __slots__ = ("_engine", "_flag", "waiters")

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine
        self._flag = False
        self.waiters: list[int] = []

    def set(self) -> None:
        self._flag = True
        waiters = self.waiters
        if waiters and waiters != [threading.get_ident()]:
            self._engine.interrupt_wait()

    def clear(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        return self._flag


class NativeRuntime(RealRuntime):
    """The real runtime; who blocks makes progress in the engine."""

    def __init__(self, desk: CompletionDispatcher) -> None:
        super().__init__()
        self._desk = desk

    def defer_signals(self) -> DeferredSignals:
        """Hold signals back: news that the engine gave and nobody told would be lost."""
        return DEFERRED

    def event(self) -> Any:
        """Make an event."""
        return EngineEvent(self._desk.engine)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event, telling what ends meanwhile; signals are seen every 50 ms."""
        assert isinstance(event, EngineEvent)
        desk, engine = self._desk, self._desk.engine
        end = None if timeout is None else self.now() + timeout
        event.waiters.append(threading.get_ident())
        try:
            while not event.is_set():
                if DEFERRED.came:
                    DEFERRED.deliver()
                # Before the look at the flag: a interrupt_wait after it ends the wait at once.
                interrupt_count = engine.interrupt_count()
                if event.is_set():
                    break
                left = _SLICE_S if end is None else min(_SLICE_S, end - self.now())
                if left <= 0:
                    return False
                if desk.is_teller():
                    desk.tell([])  # a callback waits: what it waits for may be behind it in the line
                if news := engine.wait(left, interrupt_count, desk.is_teller()):
                    desk.tell(news)
                elif desk.is_closed:
                    self.sleep(
                        0.001
                    )  # the engine no longer waits; whoever raises the flag is a thread of ours
        finally:
            event.waiters.remove(threading.get_ident())
        return True
