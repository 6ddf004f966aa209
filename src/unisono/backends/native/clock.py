"""The clock of native ranks: a thread that blocks makes progress in the engine meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from unisono import _native
from unisono._native import SIGNAL_CHECK_S
from unisono.backends.native.completions import CompletionDispatcher
from unisono.backends.native.signals import DEFERRED, DeferredSignals
from unisono.core.clock import RealRuntime
from unisono.core.runtime import Event, Waiting

__all__ = ["NativeRuntime"]

# How long a caller that polls looks for progress: some looks at the links, and less than a call takes.
_POLL_S = 20e-6
# How long to wait for another thread that dispatches: long for what has come, short if a callback is slow.
_DISPATCH_S = 0.05


class EngineEvent:
    """A flag. A thread waits for it in the engine; `set` on another thread interrupts that wait."""

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
    """The real runtime; a thread that blocks makes progress in the engine."""

    def __init__(self, completions: CompletionDispatcher) -> None:
        super().__init__()
        self._completions = completions

    def defer_signals(self) -> DeferredSignals:
        """Defer signals: a handler that raised before a completion is dispatched would lose it."""
        return DEFERRED

    def polled(self) -> None:
        """Make progress in the engine for a moment, and dispatch what has ended."""
        completions, engine = self._completions, self._completions.engine
        if completions.is_closed or engine.is_forked():
            return
        with DEFERRED:
            if ended := engine.wait(_POLL_S, engine.interrupt_count(), completions.is_dispatching()):
                completions.dispatch(ended)

    def catch_up(self) -> None:
        """Dispatch what has ended by now, or wait until another thread has done so."""
        completions, engine = self._completions, self._completions.engine
        end = self.now() + _DISPATCH_S
        while engine.has_undispatched() and not completions.is_dispatching() and self.now() < end:
            if completions.is_closed or engine.is_forked():
                break
            self.polled()

    def event(self) -> Any:
        """Make an event."""
        return EngineEvent(self._completions.engine)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event and dispatch completions meanwhile; signals are checked every SIGNAL_CHECK_S."""
        assert isinstance(event, EngineEvent)
        completions, engine = self._completions, self._completions.engine
        end = None if timeout is None else self.now() + timeout
        event.waiters.append(threading.get_ident())
        try:
            while not event.is_set():
                if DEFERRED.pending:
                    DEFERRED.deliver()
                # Read the count before the flag: an interrupt after it ends the wait at once.
                interrupt_count = engine.interrupt_count()
                if event.is_set():
                    break
                left = SIGNAL_CHECK_S if end is None else min(SIGNAL_CHECK_S, end - self.now())
                if left <= 0:
                    return False
                is_dispatching = completions.is_dispatching()
                if is_dispatching:
                    completions.dispatch([])  # a callback waits: its completion may be queued behind it
                if ended := engine.wait(left, interrupt_count, is_dispatching):
                    completions.dispatch(ended)
                elif completions.is_closed:
                    # A closed engine returns at once, and only a Python thread can set the flag.
                    self.sleep(0.001)
        finally:
            event.waiters.remove(threading.get_ident())
        return True
