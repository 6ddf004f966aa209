"""Streams: the items of a generator on another rank, in order, as they are made.

Items may arrive in any order: an item with blobs takes longer, and several threads may receive them. A
generator runs ahead of its reader by at most the credit that the reader gives; it is closed with the stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from unisono.core.runtime import Runtime
from unisono.errors import DeadlineExceeded, ProtocolError
from unisono.rpc.transport import Waitable

if TYPE_CHECKING:
    import asyncio

    from unisono.rpc.pending_call import PendingCall

__all__ = ["WINDOW", "Credit", "ItemBuffer", "Signal", "Stream", "wake_loop"]

# Items that a generator may be ahead of its reader; half of them are requested at a time.
WINDOW: Final = 16


class Signal(Waitable):
    """Something that changes many times: the thread or coroutine that waits for it looks again each time."""

    def __init__(self, wake: Callable[[Waitable], None]) -> None:
        super().__init__()
        self._wake = wake
        self._callback: Callable[[], None] | None = None

    def notify(self) -> None:
        """It has changed."""
        self.is_done = True
        self._wake(self)
        if (callback := self._callback) is not None:
            callback()

    def next_change(self) -> asyncio.Future[None]:
        """Done at the next change. The caller has to look once more before it waits."""
        future, resolve = wake_loop()

        def on_change() -> None:
            self._callback = None
            resolve()

        self._callback = on_change
        return future


class Credit(Signal):
    """How many more items a reader allows; the generator's side waits for it. `sent` is how many it got."""

    def __init__(self, count: int, wake: Callable[[Waitable], None]) -> None:
        super().__init__(wake)
        self.count = count
        self.sent = 0


class ItemBuffer(Signal):
    """The items of a stream that have arrived and were not read, by their index."""

    def __init__(self, wake: Callable[[Waitable], None]) -> None:
        super().__init__(wake)
        self.items: dict[int, tuple[Any, BaseException | None]] = {}
        self._lock = threading.Lock()
        self._expected = set(range(WINDOW))
        self._requested = WINDOW
        self._arrived = 0
        self.total: int | None = None
        self.error: BaseException | None = None  # that ended the generator

    def expect(self, count: int) -> None:
        """The reader asks for more items."""
        with self._lock:
            self._expected.update(range(self._requested, self._requested + count))
            self._requested += count

    def announce(self, index: int) -> None:
        """An item comes.

        Raises:
            ProtocolError: the reader did not ask for it, or it came before.
        """
        with self._lock:
            if index not in self._expected:
                raise ProtocolError("an item that its reader did not ask for")
            self._expected.remove(index)

    def add(self, index: int, value: Any, error: BaseException | None = None) -> None:
        """An item has arrived, or never will."""
        self.items[index] = (value, error)
        with self._lock:
            self._arrived += 1
        self.notify()

    def end_at(self, total: int, error: BaseException | None = None) -> None:
        """The generator has ended after this many items; some may still be on their way."""
        with self._lock:
            self.total, self.error = total, error

    @property
    def is_complete(self) -> bool:
        """Whether the generator has ended and all its items have arrived."""
        with self._lock:
            return self.total is not None and self._arrived >= self.total


class Stream(Iterator[Any], AsyncIterator[Any]):
    """The items of a call, in order, by `for` or `async for`.

    A reader that does not read to the end closes it, or uses it in a `with` block.
    """

    def __init__(
        self, runtime: Runtime, pending: PendingCall, buffer: ItemBuffer, timeout: float | None
    ) -> None:
        self._runtime = runtime
        self._pending = pending
        self._buffer = buffer
        self._timeout = timeout
        self._next = 0
        self.owner: object = None  # what has to live until the stream is dropped
        self._finalizer = runtime.finalizer(self, partial(_end, pending))

    def close(self) -> None:
        """End the stream: the generator is closed, too."""
        self._pending.cancel()
        self._finalizer.detach()  # not earlier: a signal may have come before the call was cancelled

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        runtime, buffer = self._runtime, self._buffer
        deadline = runtime.deadline(self._timeout)
        while True:
            buffer.is_done = False
            has_ended = self._pending.is_done  # first: the items that came before the end are here by then
            if self._next in buffer.items:
                return self._take()
            if has_ended and self._is_over():
                raise StopIteration
            self._pending.wait_outside_slot(buffer, deadline)
            if not buffer.is_done and deadline.has_passed(runtime.now()):
                raise self._expired()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        runtime, buffer = self._runtime, self._buffer
        if runtime.is_virtual:  # a blocking wait lets virtual time pass
            try:
                return next(self)
            except StopIteration:
                raise StopAsyncIteration from None
        import asyncio

        deadline = runtime.deadline(self._timeout)
        while True:
            changed = buffer.next_change()
            has_ended = self._pending.is_done
            if self._next in buffer.items:
                return self._take()
            if has_ended and self._is_over():
                raise StopAsyncIteration
            try:
                await asyncio.wait_for(changed, deadline.remaining(runtime.now()))
            except TimeoutError:
                raise self._expired() from None
            except asyncio.CancelledError:
                self.close()
                raise

    def _is_over(self) -> bool:
        """Whether the call, which has ended, has no more items.

        Raises:
            UnisonoError: that ended it.
        """
        self._finalizer.detach()
        return bool(self._pending.wait() <= self._next)

    def _expired(self) -> DeadlineExceeded:
        pending = self._pending
        self.close()
        return DeadlineExceeded(
            f"no item came within {self._timeout:.3g} s",
            waiting_on=(pending.peer.world_rank,),
            where=pending.location(),
        )

    async def aclose(self) -> None:
        """As `close`, under the name that async generators have."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> Any:
        value, error = self._buffer.items.pop(self._next)
        self._next += 1
        if self._next % (WINDOW // 2) == 0 and not self._pending.is_done:
            self._buffer.expect(WINDOW // 2)
            self._pending.request_items(WINDOW // 2)
        if error is not None:
            self.close()
            raise error
        return value


def _end(pending: PendingCall) -> None:
    """The reader has dropped the stream."""
    pending.cancel()


def wake_loop() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running event loop, and a function that any thread may call to resolve it."""
    import asyncio  # loaded only by programs with an event loop

    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has no waiters
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

    return future, resolve
