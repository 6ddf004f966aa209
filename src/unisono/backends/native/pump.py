"""The pump: the thread of a rank that dispatches completions while no thread of the user waits."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref

from unisono import _native
from unisono.backends.native.completions import CompletionDispatcher
from unisono.backends.native.refusals import Refusals
from unisono.core.clock import RealRuntime
from unisono.core.parked_threads import is_idle_in

__all__ = ["Pump"]

_log = logging.getLogger("unisono.native")


class Pump:
    """The thread of one rank, and how the rank leaves if it is not closed."""

    def __init__(self, completions: CompletionDispatcher) -> None:
        self._completions = completions
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(completions), completions.engine), name="unisono-pump", daemon=True
        )
        self._thread.start()
        _open.add(self)

    def join(self) -> None:
        """Wait for the thread, when the engine was closed."""
        _open.discard(self)
        self._wait(None)

    def abandon(self) -> None:
        """Leave without a goodbye."""
        _open.discard(self)
        completions = self._completions
        completions.engine.close(0.0)
        completions.is_closed = True
        completions.engine.interrupt_wait()
        self._wait(1.0)

    def _wait(self, timeout: float | None) -> None:
        if threading.current_thread() is not self._thread and not self._completions.engine.is_forked():
            self._thread.join(timeout)


# Those of ranks of this process that were not closed.
_open: set[Pump] = set()


@atexit.register
def _leave_all() -> None:
    """No thread may return from the engine while the interpreter shuts down."""
    for pump in list(_open):
        pump.abandon()


@is_idle_in
def _run(completions_ref: weakref.ref[CompletionDispatcher], engine: _native.Engine) -> None:
    """Dispatch completions while no thread waits, conclude observed works, log refused connections."""
    refusals, clock = Refusals(), RealRuntime()
    while True:
        events = engine.pump(1.0)
        completions = completions_ref()
        is_over = completions is None or (completions.is_closed and not events)
        _native.conclude_announced(engine)
        for line in refusals.lines(engine.take_refusals(), engine.refused(), clock.now(), is_last=is_over):
            _log.warning("refused %s", line)
        if completions is None or is_over:
            return
        completions.adopt_overdue()
        if events:
            completions.dispatch(events)
        del completions, events
