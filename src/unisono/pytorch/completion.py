"""Streams: where a group's collectives run, and the thread that runs the callbacks of their futures.

Callbacks may start collectives and wait for them, as PowerSGD does. Ranks must start the collectives of a
communicator in the same order, so nothing of this depends on timing: callbacks of one stream run one after
another, in the order in which the program added them, and always on the stream's own thread. What they start
runs in a *nested stream*, on a communicator of its own, whose futures are completed by another thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from torch.futures import Future

from unisono.comm.communicator import Communicator
from unisono.pytorch.compiling import not_compiled

__all__ = ["Ending", "Stream", "WorkFuture"]

_log = logging.getLogger("unisono")


class Ending(Protocol):
    """A work as this module sees it."""

    def settle(self) -> None:
        """Wait until it has ended, well or not."""

    def is_completed(self) -> bool:
        """Whether it has ended. Makes progress."""

    def outcome(self) -> Any:
        """What it gives; raises its error."""

    def after(self, run: Callable[[], None]) -> None:
        """Run it when the work has ended, on a thread for callbacks."""

    def is_served_here(self) -> bool:
        """Whether this thread is the one that runs what `after` was given."""


class Stream:
    """A communicator for collectives that are started in one order, with a thread for callbacks.

    `serving` is shared by the streams of a group: by thread, the stream whose callbacks it runs.
    """

    def __init__(self, comm: Communicator, serving: dict[int, Stream]) -> None:
        self.comm = comm
        self.start = comm.start
        self._serving = serving
        self._due: SimpleQueue[tuple[Ending, Callable[[], None]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._has_thread = False
        self._is_closed = False
        self._nested: Stream | None = None

    def nested(self) -> Stream:
        """The stream of what callbacks of this one start."""
        with self._lock:
            if self._nested is None:
                everyone = tuple(range(self.comm.size))
                self._nested = Stream(self.comm._sub(everyone, "callbacks"), self._serving)
            return self._nested

    def after(self, work: Ending, run: Callable[[], None]) -> None:
        """Run it when the work has ended, and all that was passed to this method before has run."""
        with self._lock:
            if self._is_closed:  # the work has ended by that
                start_here = False
            else:
                start_here, self._has_thread = not self._has_thread, True
                self._due.put((work, run))
        if start_here:
            name = f"unisono-futures-{self.comm.name}"
            self.comm.backend.runtime.start_thread(self._serve, name)
        elif self._is_closed:
            work.settle()
            run()

    def is_served_here(self) -> bool:
        """Whether this thread runs the callbacks of this stream."""
        return self._serving.get(threading.get_ident()) is self

    def close(self) -> None:
        """Let the thread end when it has run what is due."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            nested = self._nested
        self._due.put(None)
        if nested is not None:
            nested.close()

    def _serve(self) -> None:
        me = threading.get_ident()
        self._serving[me] = self
        try:
            while (due := self._due.get()) is not None:
                work, run = due
                work.settle()
                try:
                    run()
                except BaseException:  # also SystemExit: other callbacks are still to run
                    _log.exception("a callback of a future failed")
                del work, run, due  # they hold tensors
        finally:
            del self._serving[me]


@not_compiled
class WorkFuture(Future[Any]):  # type: ignore[misc]
    """The future of a work. Its callbacks run in the order described above, also if it is done already."""

    def __init__(
        self, work: Ending, made_by: Callable[[], Any] | None = None, parent: WorkFuture | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._made_by = made_by  # a callback; None: it is the work's own
        self._parent = parent
        self._is_begun = False

    def fulfil(self) -> None:
        """Complete it, unless that has begun. The work has ended."""
        if self._is_begun:  # by `wait` on this thread
            return
        self._is_begun = True
        make = self._work.outcome if self._made_by is None else self._made_by
        try:
            result = make()
        except Exception as error:
            self._set_unwrap_func(_raise)
            self.set_result(_Failure(error))
        else:
            self.set_result(result)

    def then(self, callback: Callable[[Any], Any]) -> WorkFuture:
        """A future of what the callback returns for this one."""
        child = WorkFuture(self._work, lambda: callback(self), self)
        self._work.after(child.fulfil)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call it when this future is done."""
        self._work.after(lambda: callback(self))

    # The thread that completes it may be late: the work itself knows first.

    def done(self) -> bool:
        """Whether it has a value or an error."""
        return super().done() or (self._made_by is None and self._work.is_completed())

    def wait(self) -> Any:
        """Wait; the thread makes progress itself if it waits for the work.

        A callback that waits for another one of its own thread runs it: in its turn it would come too late.
        """
        if self._made_by is None:
            return self._work.outcome()
        if self._work.is_served_here():
            self._fulfil_here()
        return super().wait()

    def _fulfil_here(self) -> None:
        if self._parent is not None:
            self._parent._fulfil_here()
        self._work.settle()
        self.fulfil()

    def value(self) -> Any:
        """The value, if it is done."""
        return super().value() if self._made_by is not None else self._work.outcome()


class _Failure:
    """The value of a future that failed.

    Python cannot give a future an error that C++ sees: C++ takes this for a value. DDP looks for tensors in
    it by pickling it, or converts it to a tensor, and asks for its text when that fails: either raises the
    error itself, and so `backward` does.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error

    def __str__(self) -> str:
        raise self.error


def _raise(failure: _Failure) -> None:
    raise failure.error
