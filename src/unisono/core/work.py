"""Works: a started operation as the user holds it, to wait for, await or cancel."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterable
from typing import Any, Generic

from unisono._native import WorkBase, set_work_type
from unisono.core.clock import Killed, RealRuntime, Runtime
from unisono.core.task import T, Task
from unisono.errors import PeerAborted, UnisonoError

__all__ = ["Started", "Work", "wait_all", "wait_or_cancel"]


class Work(WorkBase, Generic[T]):
    """A started operation; also awaitable. Its buffers must not be used until it is done.

    An operation of the engine is waited for there, by `wait` and `done` of the base. All others, and those
    that Python has adopted, are tasks.
    """

    _task: Task[T]
    _runtime: Runtime

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

    def _note_user(self) -> None:
        """The user has waited or asked for it, so `close` need not warn of it."""
        if (seen := self._task.call.on_result) is not None:
            seen(None)

    def __await__(self) -> Generator[Any, None, T]:
        if self._adopt(True) and not self._task.is_done() and not self._runtime.is_virtual:
            self._note_user()
            import asyncio  # a third of the package's import time, and only needed here

            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def settle() -> None:
                if not future.done():
                    future.set_result(None)

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # nobody waits on a loop that is closed
                    loop.call_soon_threadsafe(settle)

            self._task.on_done(tell)
            yield from future.__await__()
        result: T = self.wait()
        return result

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
    """Wait for a work that nobody else holds; if the wait is interrupted, cancel the work."""
    try:
        result: T = work.wait()
        return result
    except Killed:
        raise  # a crash cleans nothing up
    except BaseException:  # its own error, and it has ended; or whatever a signal handler raises
        work.cancel()
        raise


def wait_all(works: Iterable[Work[Any]], timeout: float | None = None) -> list[Any]:
    """Wait for all works and return their results.

    Raises:
        UnisonoError: the first error in the order of `works`, after all have ended or the timeout passed.
    """
    works = list(works)
    if not works:
        return []
    runtime = getattr(works[0], "_runtime", None) or RealRuntime()
    deadline = runtime.deadline(timeout)
    results: list[Any] = []
    first: BaseException | None = None
    for work in works:
        try:
            results.append(work.wait(deadline.remaining(runtime.now())))
        except Exception as error:  # a user's own reduce operation may raise anything
            first = first if first is not None else error
    if first is not None:
        raise first
    return results
