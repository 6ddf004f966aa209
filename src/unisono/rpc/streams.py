"""Streams: the items of a generator on another rank, as they are made.

Knows the order of items and how many may be under way. Does not know how a frame travels. A generator runs
only so far ahead as its reader allows; when the reader goes, it is closed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from unisono.errors import DeadlineExceeded
from unisono.rpc.frames import More, encode
from unisono.rpc.post import Waitable

if TYPE_CHECKING:
    import asyncio

    from unisono.rpc.agent import Agent
    from unisono.rpc.calls import PendingCall

__all__ = ["WINDOW", "Arrivals", "Credit", "Stream"]

# Items that a generator may be ahead of its reader; half of them are asked for at a time.
WINDOW: Final = 16


class Changing(Waitable):
    """What changes now and then: who waits for it, a thread or a coroutine, looks again each time."""

    def __init__(self, wake: Callable[[Waitable], None]) -> None:
        super().__init__()
        self._wake = wake
        self._listener: Callable[[], None] | None = None

    def look(self) -> None:
        """It has changed."""
        self.is_done = True
        self._wake(self)
        if (listener := self._listener) is not None:
            listener()

    def next_change(self) -> asyncio.Future[None]:
        """Done at the next change. Whoever asks looks once more before it waits."""
        import asyncio  # only who has a loop needs it

        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def tell() -> None:
            self._listener = None
            with contextlib.suppress(RuntimeError):  # nobody waits on a loop that is closed
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

        self._listener = tell
        return future


class Credit(Changing):
    """How many more items a reader allows; the generator's side waits for it."""

    def __init__(self, count: int, wake: Callable[[Waitable], None]) -> None:
        super().__init__(wake)
        self.count = count


class Arrivals(Changing):
    """The items of a call that have come and were not read, by their place.

    They come in any order: a long one takes a while, and several threads may bring them.
    """

    def __init__(self, wake: Callable[[Waitable], None]) -> None:
        super().__init__(wake)
        self.items: dict[int, tuple[Any, BaseException | None]] = {}
        self._lock = threading.Lock()
        self._seen = 0
        self.total: int | None = None

    def add(self, index: int, value: Any, error: BaseException | None = None) -> None:
        """One is here, or never will be."""
        self.items[index] = (value, error)
        with self._lock:
            self._seen += 1
        self.look()

    def end_at(self, total: int) -> None:
        """There are so many in all; some may still be on their way, or in another thread's hands."""
        with self._lock:
            self.total = total

    @property
    def is_complete(self) -> bool:
        """Whether all that there are have come."""
        with self._lock:
            return self.total is not None and self._seen >= self.total


class Stream(Iterator[Any], AsyncIterator[Any]):
    """The items of a call, in order, by `for` or `async for`.

    Who does not read to the end closes it, or leaves its `with` block.
    """

    def __init__(self, agent: Agent, calling: PendingCall, arrivals: Arrivals, timeout: float | None) -> None:
        self._agent = agent
        self._calling = calling
        self._arrivals = arrivals
        self._timeout = timeout
        self._next = 0

    def close(self) -> None:
        """Want no more: the generator is closed, too."""
        self._calling.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        runtime, arrivals, calling = self._agent.runtime, self._arrivals, self._calling
        deadline = runtime.deadline(self._timeout)
        while True:
            arrivals.is_done = False
            if self._next in arrivals.items:
                return self._take()
            if self._is_over():
                raise StopIteration
            self._agent.wait_for(arrivals, deadline, calling.waiting())
            if not arrivals.is_done and deadline.has_passed(runtime.now()):
                raise self._too_late()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._agent.runtime.is_virtual:  # time passes by itself there
            try:
                return next(self)
            except StopIteration:
                raise StopAsyncIteration from None
        import asyncio

        runtime, arrivals = self._agent.runtime, self._arrivals
        deadline = runtime.deadline(self._timeout)
        while True:
            changed = arrivals.next_change()
            if self._next in arrivals.items:
                return self._take()
            if self._is_over():
                raise StopAsyncIteration
            try:
                await asyncio.wait_for(changed, deadline.remaining(runtime.now()))
            except TimeoutError:
                raise self._too_late() from None
            except asyncio.CancelledError:
                self.close()
                raise

    def _is_over(self) -> bool:
        calling = self._calling
        return calling.is_done and calling.wait() <= self._next  # it raises what ended it, if not well

    def _too_late(self) -> DeadlineExceeded:
        calling = self._calling
        self.close()
        return DeadlineExceeded(
            f"no item came within {self._timeout:.3g} s",
            waiting_on=(calling.peer.world_rank,),
            where=calling.location(),
        )

    async def aclose(self) -> None:
        """As `close`: for those who end what they iterate over by this name."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        calling = getattr(self, "_calling", None)
        if calling is not None and not calling.is_done:
            self._agent.runtime.call_soon(calling.cancel)

    def _take(self) -> Any:
        calling = self._calling
        value, error = self._arrivals.items.pop(self._next)
        self._next += 1
        if self._next % (WINDOW // 2) == 0 and not calling.is_done:
            self._agent.tell(calling.peer.rank, encode(More(calling.number, WINDOW // 2)))
        if error is not None:
            self.close()
            raise error
        return value
