"""Works: what a user holds of a started operation, to wait for, await or cancel."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterable
from typing import Any, Generic

from unisono.core.clock import (
    Killed,
    Runtime,
)
from unisono.core.task import T, Task
from unisono.errors import PeerAborted, UnisonoError

__all__ = ["Started", "Work", "wait_all", "wait_or_cancel"]


class Work(Generic[T]):
    """A started operation. Its buffers belong to it until it is done."""

    def __init__(self, task: Task[T], runtime: Runtime) -> None:
        self._task = task
        self._runtime = runtime

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the end and return the result.

        Raises:
            DeadlineExceeded: `timeout` seconds passed; the work goes on.
            UnisonoError: the operation failed.
        """
        self._note_user()
        return self._task.wait(timeout)

    def done(self) -> bool:
        """Whether it ended, well or not."""
        if not self._task.is_done():
            self._runtime.polled()
        if not self._task.is_done():
            return False
        self._note_user()
        return True

    def cancel(self) -> bool:
        """End it now; False if it had ended already.

        A receive is withdrawn and leaves its message to the next. A collective cannot be taken back:
        its communicator is unusable afterwards, here and on the other ranks.
        """
        self._note_user()
        if self._task.is_done():
            return False
        rank = self._task.call.rank
        self._task.interrupt(PeerAborted(f"rank {rank} cancelled {self._task.call.operation}", rank=rank))
        if self._runtime.is_virtual or not self._task.is_done():
            _settled(self._task)
        return True

    def _note_user(self) -> None:
        """Somebody waits for it, or has asked how it ended: it is not forgotten."""
        if (seen := self._task.call.on_result) is not None:
            seen(None)

    def __await__(self) -> Generator[Any, None, T]:
        self._note_user()
        if not self._task.is_done() and not self._runtime.is_virtual:
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
        return self._task.wait(None)

    def __repr__(self) -> str:
        return f"<Work {self._task.call}: {'done' if self._task.is_done() else 'under way'}>"


class Started(Work[T]):
    """A work in the hands of a user, who is told if it is dropped.

    The works of blocking verbs are not: Python forgets what a signal handler raises in a `__del__`, and a
    Ctrl-C during one of those must not be lost.
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
    """Let an interrupted task clean up; its own error is not news to the one who interrupted it."""
    with contextlib.suppress(UnisonoError):
        task.wait(None)


def wait_or_cancel(work: Work[T]) -> T:
    """Wait for a work that nobody else holds: who is interrupted ends it."""
    try:
        return work.wait()
    except Killed:
        raise  # a crash cleans nothing up
    except BaseException:  # its own error, and it has ended; or whatever a signal handler raises
        work.cancel()
        raise


def wait_all(works: Iterable[Work[Any]], timeout: float | None = None) -> list[Any]:
    """Wait for all works and return their results; report the first error after all ended."""
    works = list(works)
    if not works:
        return []
    deadline = works[0]._runtime.deadline(timeout)
    results: list[Any] = []
    first: BaseException | None = None
    for work in works:
        try:
            results.append(work.wait(deadline.remaining(work._runtime.now())))
        except Exception as error:  # a user's own reduce operation may raise anything
            first = first if first is not None else error
    if first is not None:
        raise first
    return results
