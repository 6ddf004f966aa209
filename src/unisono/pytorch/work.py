"""Works as torch holds them: one that has ended, a started operation, and several of them as one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from unisono.core.call_site import call_site, line_of
from unisono.core.runtime import NEVER
from unisono.core.work import Work
from unisono.errors import UnisonoError
from unisono.pytorch.compiling import not_compiled
from unisono.pytorch.completion import Stream, WorkFuture

if TYPE_CHECKING:
    from unisono.pytorch.calls import Calls

__all__ = ["DONE", "Message", "Once", "Several", "Started"]

_NOT_GIVEN: Final = timedelta(0)


@not_compiled
class _Base(dist.Work):  # type: ignore[misc]
    """What torch asks of a work; `_end` waits for it and raises its error."""

    # Weakly: the future holds the work, and together they would keep the outputs until garbage is collected.
    _future: weakref.ref[WorkFuture] | None = None

    def _end(self, timeout_s: float | None = None) -> None:
        raise NotImplementedError

    def _outputs(self) -> Sequence[Tensor]:
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        raise NotImplementedError

    def after(self, run: Callable[[], None]) -> None:
        """Run it when the work has ended, on a thread for callbacks."""
        raise NotImplementedError

    def is_served_here(self) -> bool:
        """Whether this thread is the one that runs what `after` was given."""
        return False

    def wait(self, timeout: timedelta = _NOT_GIVEN) -> bool:
        """Wait until it has ended; no timeout means no limit beyond the operation's own.

        Raises:
            DistBackendError: it failed.
        """
        self._end(timeout.total_seconds() if timeout > _NOT_GIVEN else None)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self._end()

    def settle(self) -> None:
        """Wait until it has ended, well or not."""
        self._ended_by()

    def outcome(self) -> list[Tensor]:
        """What its future holds: its output tensors."""
        self._end()
        return list(self._outputs())

    def result(self) -> list[Tensor]:
        """Its output tensors."""
        return self.outcome()

    def exception(self) -> Exception | None:
        """The error that ended it, if one has. Does not wait."""
        return self._ended_by() if self.is_completed() else None

    def _ended_by(self) -> Exception | None:
        try:
            self._end()
        except Exception as error:
            return error
        return None

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._ended_by() is None

    def get_future(self) -> Future[list[Tensor]]:
        """The future of its output tensors."""
        future = None if self._future is None else self._future()
        if future is None:
            future = WorkFuture(self)
            self._future = weakref.ref(future)
            if self.is_completed():
                future.fulfil()
            else:
                self.after(future.fulfil)
        return future


@not_compiled
class Started(_Base):
    """A started collective."""

    def __init__(
        self,
        calls: Calls,
        stream: Stream,
        call: str,
        work: Work[Any],
        outputs: Sequence[Tensor],
        finish: Once | None = None,
    ) -> None:
        dist.Work.__init__(self)
        self._calls = calls
        self._stream = stream
        self._call = call
        self._work = work
        self._given = outputs
        self._finish = finish
        if finish is not None and finish.is_owed:
            self.after(_nothing)

    def _end(self, timeout_s: float | None = None) -> None:
        try:
            result = self._work.wait(timeout_s)
            if self._finish is not None:
                self._finish(result)
        except UnisonoError as error:
            raise self._calls.failed(error, self._call, self.site()) from error

    def site(self) -> str:
        """The line of the user's program that started it."""
        code, instruction = self._work._call_site
        return call_site() if code is None else line_of(code, instruction)

    def _outputs(self) -> Sequence[Tensor]:
        return self._given

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Makes progress."""
        if not self._work.done():
            return False
        if self._finish is not None:
            self.settle()
        return True

    def after(self, run: Callable[[], None]) -> None:
        """Run it on the stream's thread, in the order of these calls."""
        self._stream.after(self, run)

    def is_served_here(self) -> bool:
        """Whether this is the stream's thread."""
        return self._stream.is_served_here()


@not_compiled
class Message(Started):
    """A started send or receive. Its callbacks run as messages end: one may wait for a later collective."""

    def after(self, run: Callable[[], None]) -> None:
        """Run it on unisono's thread for callbacks, in the order in which messages end."""

        def ended(_: Work[Any]) -> None:
            self.settle()
            with _serving_messages:
                run()

        self._work.add_done_callback(ended)

    def is_served_here(self) -> bool:
        """Whether this is unisono's thread for callbacks, in one of a message."""
        return _serving_messages.is_here()

    def _source_rank(self) -> int:
        """The group rank that sent what was received."""
        self._end()
        return int(self._work.wait().source)

    source_rank = _source_rank


@not_compiled
class Several(_Base):
    """Works of a group that torch sees as one."""

    def __init__(self, calls: Calls, parts: Sequence[_Base], finish: Once | None = None) -> None:
        dist.Work.__init__(self)
        self._calls = calls
        self._parts = parts
        self._finish = finish
        if finish is not None:
            self.after(_nothing)

    def _end(self, timeout_s: float | None = None) -> None:
        runtime = self._calls.comm.backend.runtime
        deadline = NEVER if timeout_s is None else runtime.deadline(timeout_s)
        for part in self._parts:
            part._end(None if timeout_s is None else deadline.remaining(runtime.now()))
        try:
            if self._finish is not None:
                self._finish(None)
        except UnisonoError as error:
            (first, *_) = (part for part in self._parts if isinstance(part, Started))
            raise self._calls.failed(error, "all_reduce", first.site()) from error

    def _outputs(self) -> Sequence[Tensor]:
        return [tensor for part in self._parts for tensor in part._outputs()]

    def is_completed(self) -> bool:
        """Whether all have ended."""
        if not all(part.is_completed() for part in self._parts):
            return False
        self.settle()
        return True

    def after(self, run: Callable[[], None]) -> None:
        """Run it after the last of them."""
        left = len(self._parts)
        lock = threading.Lock()

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left > 0:
                    return
            self.settle()
            run()

        for part in self._parts:
            part.after(ended)
        if not self._parts:
            run()

    def is_served_here(self) -> bool:
        """Whether one of them is."""
        return any(part.is_served_here() for part in self._parts)


@not_compiled
class _Done(_Base):
    """A work that has ended, for calls that the caller waits for at once."""

    def _end(self, timeout_s: float | None = None) -> None:
        pass

    def _outputs(self) -> Sequence[Tensor]:
        return ()

    def wait(self, timeout: timedelta = _NOT_GIVEN) -> bool:
        """It has ended."""
        return True

    def is_completed(self) -> bool:
        """It has."""
        return True

    def after(self, run: Callable[[], None]) -> None:
        """At once."""
        run()


class Once:
    """What is left to do when an operation has ended, such as copying its result back; done once.

    `is_owed`: it must be done even if no thread waits for the operation.
    """

    def __init__(self, finish: Callable[[Any], object], *, is_owed: bool = True) -> None:
        self.is_owed = is_owed
        self._finish: Callable[[Any], object] | None = finish
        # Of the caller: another thread may do it, and must be allowed what the caller is.
        self._is_inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def __call__(self, result: Any) -> None:
        """Do it, unless that was done; raises what it raised."""
        with self._lock:
            if self._finish is not None:
                try:
                    with torch.inference_mode(self._is_inference):
                        self._finish(result)
                except Exception as error:
                    self._error = error
                self._finish = None
        if self._error is not None:
            raise self._error


class _ServingMessages(threading.local):
    """Whether this thread runs callbacks of messages, as a context."""

    depth = 0

    def is_here(self) -> bool:
        """Whether it does."""
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


def _nothing() -> None:
    pass


_serving_messages: Final = _ServingMessages()
DONE: Final = _Done()
