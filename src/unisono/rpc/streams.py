"""Streams: the items of a generator on another rank, as they are made.

Knows the order of items and how many may be under way. Does not know how a frame travels. A generator runs
only so far ahead as its reader allows; when the reader goes, it is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from unisono.errors import DeadlineExceeded
from unisono.rpc.frames import More, encode
from unisono.rpc.post import Awaited

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent
    from unisono.rpc.calls import Calling

__all__ = ["WINDOW", "Arrivals", "Credit", "Stream"]

# Items that a generator may be ahead of its reader; half of them are asked for at a time.
WINDOW: Final = 16


class Credit(Awaited):
    """How many more items a reader allows; the generator's side waits for it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count


class Arrivals(Awaited):
    """The items of a call that have come and were not read, by their place.

    They come in any order: a long one takes a while, and several threads may bring them.
    """

    def __init__(self, wake: Callable[[Awaited], None]) -> None:
        super().__init__()
        self.items: dict[int, tuple[Any, BaseException | None]] = {}
        self._wake = wake
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

    def look(self) -> None:
        """Something has changed."""
        self.is_done = True
        self._wake(self)


class Stream(Iterator[Any]):
    """The items of a call, in order. Who does not read to the end closes it, or leaves its `with` block."""

    def __init__(self, agent: Agent, calling: Calling, arrivals: Arrivals, timeout: float | None) -> None:
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
            if calling.is_done and calling.wait() <= self._next:  # it raises what ended it, if not well
                raise StopIteration
            self._agent.wait_for(arrivals, deadline, calling.waiting())
            if not arrivals.is_done and deadline.has_passed(runtime.now()):
                self.close()
                raise DeadlineExceeded(
                    f"no item came within {self._timeout:.3g} s",
                    waiting_on=(calling.peer.world_rank,),
                    where=calling.location(),
                )

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
            self._agent.post.send(calling.peer.rank, encode(More(calling.number, WINDOW // 2)))
        if error is not None:
            self.close()
            raise error
        return value
