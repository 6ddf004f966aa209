"""How `async def` handlers run: on one event loop per agent; in virtual time on the thread of the call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from unisono.core.clock import Runtime, Waiting
from unisono.errors import UsageError

__all__ = ["Loop", "run_virtual"]


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._loop = asyncio.new_event_loop()
        self._ident = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = runtime.event()
        runtime.start_thread(self._run_thread, name)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.get_ident() == self._ident

    def run(self, job: Coroutine[Any, Any, None], on_task: Callable[[Callable[[], object]], None]) -> None:
        """Run a coroutine; `on_task` is called with a function that cancels it from any thread."""

        def begin() -> None:
            task = self._loop.create_task(job)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            on_task(lambda: self._loop.call_soon_threadsafe(task.cancel))

        self._loop.call_soon_threadsafe(begin)

    def close(self, timeout: float, waiting: Waiting) -> None:
        """Cancel what runs, and end the thread."""

        def end() -> None:
            for task in list(self._tasks):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        if not self.is_mine:
            self._runtime.block(self._is_over, timeout, lambda: waiting)

    def _run_thread(self) -> None:
        self._ident = threading.get_ident()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
            self._is_over.set()


def run_virtual(made: Any) -> Any:
    """The result of a coroutine, or the items of an async generator, that awaits works only.

    In virtual time works block instead of suspending the coroutine.

    Raises:
        UsageError: it awaits something else.
    """
    if hasattr(made, "__anext__"):
        return _items(made)
    try:
        made.send(None)
    except StopIteration as stop:
        return stop.value
    made.close()
    raise UsageError(
        "an async handler awaits something that is not a Work; the simulator has no event loop",
        next_step="await only agent.start(...) there",
    )


def _items(made: Any) -> Iterator[Any]:
    try:
        while True:
            try:
                item = run_virtual(made.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_virtual(made.aclose())
