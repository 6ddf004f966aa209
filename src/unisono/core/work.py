"""Works: a started operation as the user holds it, to wait for, await or cancel."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic

from unisono._native import WorkBase, set_work_type
from unisono.core.call import T
from unisono.core.callbacks import callback_thread
from unisono.core.runtime import Killed, Runtime
from unisono.core.task import Task
from unisono.errors import PeerAborted, UnisonoError, UsageError

__all__ = ["Started", "Work", "wait_or_cancel"]


class Work(WorkBase, Coroutine[Any, Any, T], Generic[T]):
    """A started operation. Its buffers must not be used until it is done.

    It can be awaited, by many and more than once, and passed to whatever takes a coroutine, such as
    `asyncio.TaskGroup.create_task`. Cancelling the awaiting task ends only its wait: the operation goes on.
    """

    # An operation of the engine is waited for there, by `wait` and `done` of the base. All others, and those
    # that Python has adopted, are tasks.
    _task: Task[T]
    _runtime: Runtime
    # As a coroutine: how far each task of asyncio has come in awaiting it.
    _steps: dict[Any, Generator[Any, None, T]] | None = None

    def __init__(self, task: Task[T], runtime: Runtime) -> None:
        self._task = task
        self._runtime = runtime

    def _wait(self, timeout: float | None) -> T:
        self._note_user()
        return self._task.wait(timeout)

    def _done(self) -> bool:
        if not self._task.is_done():
            self._runtime.polled()
        if not self._task.is_done():
            return False
        self._note_user()
        return True

    def cancel(self) -> bool:
        """Cancel it and wait until it has ended; False if it had ended already.

        A cancelled receive takes no message. A cancelled collective poisons its communicator: later
        collectives fail with PeerAborted, here and on the other ranks.

        It raises nothing: `wait` raises the error of a cancelled operation.
        """
        if self.done() or not self._adopt(True):
            return False
        self._note_user()
        if self._task.is_done():
            return False
        rank = self._task.call.rank
        self._task.interrupt(PeerAborted(f"rank {rank} cancelled {self._task.call.operation}", rank=rank))
        if self._runtime.is_virtual or not self._task.is_done():
            _settled(self._task)
        return True

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Call `fn(work)` when it has ended, successfully or not; soon if it has.

        Callbacks run one after another on a thread of this rank that runs nothing else, in the order in which
        works end; collectives that end together by number.

        Args:
            fn: may start operations and wait for them. If it raises, the exception is logged.

        Raises:
            UsageError: `fn` cannot be called.
        """
        if not callable(fn):
            raise UsageError(f"{fn!r} cannot be called; allowed: a function of the work")
        runtime, rank = self._runtime_and_rank()
        thread = callback_thread(runtime, rank)
        thread.expect(runtime)
        self._on_end(partial(thread.run, runtime, partial(fn, self)))

    def _on_end(self, notify: Callable[[], object]) -> None:
        """Call `notify` on any thread when it has ended; at once if it has. It must return soon."""
        if self._observe(notify):
            return
        task = getattr(self, "_task", None)
        if task is None:
            notify()
        else:
            self._note_user()
            task.on_done(notify)

    def _off_end(self, notify: Callable[[], object]) -> None:
        """Do not call `notify` any more; it may be called right now."""
        self._forget(notify)
        if (task := getattr(self, "_task", None)) is not None:
            task.forget(notify)

    def _has_ended(self) -> bool:
        """As `done`, but make no progress."""
        if self._is_concluded:
            return True
        task = getattr(self, "_task", None)
        return task is not None and task.is_done()

    def _runtime_and_rank(self) -> tuple[Runtime, int]:
        """The clock and threads of its rank, and the world rank."""
        if self._adoption is not None:
            return self._adoption.runtime, self._adoption.world_rank
        return self._runtime, self._task.call.rank

    def _note_user(self) -> None:
        """The user has waited or asked for it, so `close` need not warn of it."""
        if (seen := self._task.call.on_result) is not None:
            seen(None)

    def __await__(self) -> Generator[Any, None, T]:
        if not self._has_ended() and not self._runtime_and_rank()[0].is_virtual:
            import asyncio  # a third of the package's import time, and only needed here

            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def settle() -> None:
                if not future.done():
                    future.set_result(None)

            def notify() -> None:
                with contextlib.suppress(RuntimeError):  # a closed loop has no waiters
                    loop.call_soon_threadsafe(settle)

            self._on_end(notify)
            try:
                yield from future.__await__()
            finally:
                self._off_end(notify)
        result: T = self.wait()
        return result

    def send(self, value: Any) -> Any:
        """As a coroutine: go on."""
        return self._step(lambda steps: steps.send(value))

    def throw(self, *error: Any) -> Any:
        """As a coroutine: give up the wait."""
        return self._step(lambda steps: steps.throw(*error))

    def close(self) -> None:
        """As a coroutine: end the wait of the calling task, if it has begun one."""
        with contextlib.suppress(GeneratorExit, StopIteration):
            self.throw(GeneratorExit)

    def _step(self, take: Callable[[Generator[Any, None, T]], Any]) -> Any:
        asyncio = sys.modules.get("asyncio")
        try:
            awaiting = None if asyncio is None else asyncio.current_task()
        except RuntimeError:  # no loop runs here
            awaiting = None
        if self._steps is None:
            self._steps = {}
        steps = self._steps.setdefault(awaiting, self.__await__())
        try:
            return take(steps)
        except BaseException:  # it has ended, by StopIteration if well
            self._steps.pop(awaiting, None)
            raise

    def __repr__(self) -> str:
        task = getattr(self, "_task", None)
        is_done = task.is_done() if task is not None else self.done()
        return f"<Work {self._verb if task is None else task.call}: {'done' if is_done else 'under way'}>"


set_work_type(Work)


class Started(Work[T]):
    """A work that the user started; it warns if it is dropped before it has ended.

    The works of blocking verbs have no `__del__`: Python discards an exception that a signal handler raises
    in one, and a Ctrl-C must not be lost.
    """

    def __del__(self) -> None:
        task = getattr(self, "_task", None)
        if task is not None and not task.is_done() and not self._runtime.is_dead:
            warnings.warn(
                f"{task.call} was dropped before it ended; keep the Work and wait for it",
                ResourceWarning,
                stacklevel=2,
            )


def _settled(task: Task[Any]) -> None:
    """Wait until an interrupted task has cleaned up; the caller knows its error."""
    with contextlib.suppress(UnisonoError):
        task.wait(None)


def wait_or_cancel(work: Work[T]) -> T:
    """Wait for a work that no other code holds; if the wait is interrupted, cancel the work."""
    try:
        result: T = work.wait()
        return result
    except Killed:
        raise  # a crash cleans nothing up
    except BaseException:  # its own error, and it has ended; or whatever a signal handler raises
        work.cancel()
        raise
