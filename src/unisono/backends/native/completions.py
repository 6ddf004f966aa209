"""Completions: which request a finished operation of the engine belongs to, and which thread dispatches it.

Two threads may dispatch. A thread that waits makes progress in the engine without the GIL and dispatches what
has ended. While no thread waits, a pump thread sleeps in the engine and dispatches, so that tasks without a
waiter go on. How operations are started is the business of backend.py.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from unisono import _native
from unisono.backends.native.signals import DEFERRED
from unisono.core.envelope import UNTYPED, Any_, Envelope
from unisono.core.request import HeaderMismatch, LengthMismatch, Request
from unisono.errors import ClosedError, UnisonoError
from unisono.messaging.backend import PeerDown
from unisono.messaging.matching import Posted, refusal

__all__ = ["CompletionDispatcher", "NativeRequest", "RunRequest"]

# What stands in news for the number of an operation: see _native.Engine.
_UNCLAIMED = -2
# native/messaging/message.hpp: Outcome
_DONE, _CANCELLED, _PEER_DOWN, _REFUSED, _CLOSED, _NO_MEMORY = range(6)


class NativeRequest(Request):
    """A request with its operation's handle; it keeps the buffer until the engine is done with it."""

    __slots__ = ("buffer", "desk", "dtype", "handle", "number")

    def __init__(
        self, peer: int | Any_, desk: CompletionDispatcher, buffer: memoryview | None, dtype: int = UNTYPED
    ) -> None:
        super().__init__(peer)
        self.desk = desk
        self.buffer = buffer
        self.dtype = dtype
        self.handle = 0
        self.number = next(desk.numbers)

    def cancel(self) -> bool:
        """Withdraw it from the engine."""
        if self.done or not self.handle or not self.desk.engine.cancel(self.handle):
            return False
        self.desk.requests.pop(self.number, None)
        self.cancelled()
        return True


# The peer of a request that concerns several.
_NOBODY = -1


class RunRequest(NativeRequest):
    """A plan under way in the engine; it keeps the plan's memory."""

    __slots__ = ("memory",)

    def __init__(self, desk: CompletionDispatcher, memory: tuple[Any, ...]) -> None:
        super().__init__(_NOBODY, desk, None)
        self.memory: tuple[Any, ...] | None = memory

    def peers_awaited(self) -> tuple[int, ...]:
        """The peers of messages under way."""
        if self.done or not self.handle:
            return ()
        here = self.rank_here
        ranks = self.desk.engine.awaited(self.handle)
        return tuple(ranks if here is None else map(here, ranks))

    def cancel(self) -> bool:
        """Take back what can be taken back; it ends when the engine has let go of its memory."""
        return not self.done and bool(self.handle) and self.desk.engine.cancel(self.handle)

    def end(self, outcome: int, details: tuple[Any, ...] | None = None) -> None:
        """End as the run ended."""
        self.memory = None
        if outcome == _DONE:
            self.complete()
            return
        assert details is not None
        peer, is_header, came, awaited, header = details
        if outcome == _CANCELLED:
            self.cancelled()
        elif outcome != _REFUSED:
            self.fail(_broken(outcome))
        elif is_header:
            self.fail(HeaderMismatch(peer, header))
        else:
            self.fail(LengthMismatch(peer, came, awaited))


class CompletionDispatcher:
    """The requests under way, and what is told of them."""

    def __init__(self, engine: _native.Engine, recv_bytes_max: int) -> None:
        self.engine = engine
        self._recv_bytes_max = recv_bytes_max
        self.numbers = itertools.count(1)
        self.requests: dict[int, NativeRequest] = {}
        self.is_closed = False
        self._lock = threading.Lock()
        self._down: dict[int, PeerDown] = {}
        self._news: deque[tuple[Any, ...]] = deque()
        self._teller = 0
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._unclaimed: dict[int, weakref.WeakMethod[Callable[[int, int, bytes], bool]]] = {}

    def tell(self, news: list[tuple[Any, ...]]) -> None:
        """Tell news that the engine gave to this thread, and whatever more there is by then.

        The order counts: who hears that a peer is gone must have heard of all that came from it. A callback
        that waits, here and now, tells the rest itself.
        """
        is_nested = self.is_teller()
        self._news.extend(news)
        failure: BaseException | None = None
        while True:
            self._teller = threading.get_ident()
            while self._news:
                try:
                    self._tell_one(*self._news.popleft())
                except BaseException as error:  # the others must not pay for it
                    failure = failure or error
            if is_nested:
                break
            self._teller = 0
            self._news.extend(self.engine.more(True))
            if not self._news:
                break
        if failure is not None:
            raise failure

    def is_teller(self) -> bool:
        """Whether this very thread is telling, further up its stack."""
        return self._teller == threading.get_ident()

    def end(
        self,
        request: NativeRequest,
        outcome: int,
        envelope: tuple[Any, ...] | None = None,
        data: bytes | bytearray | None = None,
    ) -> None:
        """End a request as its operation ended."""
        met = None if envelope is None else Envelope(*envelope)
        if outcome == _DONE:
            request.buffer = None
            request.complete(met, data)
        elif outcome == _CANCELLED:
            request.cancelled()
        else:
            request.fail(self._error(request, outcome, met), met)

    def add_listener(self, listener: Callable[[PeerDown], None]) -> list[PeerDown]:
        """Call back for every rank that goes down from now on; those that are down are returned."""
        with self._lock:
            if not self.is_closed:
                self._listeners.append(listener)
            return list(self._down.values())

    def on_unclaimed(self, context: int, hear: Callable[[int, int, bytes], bool]) -> None:
        """Let a group hear of messages that wait here although their senders do not, as long as it lives."""
        self._unclaimed[context] = weakref.WeakMethod(hear, lambda _: self._unclaimed.pop(context, None))

    def close(self) -> None:
        """Tell what ended with the engine; nobody listens any more."""
        with self._lock:
            self.is_closed = True
            self._listeners.clear()
        with DEFERRED:
            self.tell(self.engine.wait(0.0, 0, self.is_teller()))
        self.engine.interrupt_wait()

    def _tell_one(self, number: int, *details: Any) -> None:
        if number >= 0:
            request = self.requests.pop(number, None)
            if isinstance(request, RunRequest):
                request.end(*details)
            elif request is not None:
                self.end(request, *details)
            return
        if number == _UNCLAIMED:
            self._dispatch_unclaimed(*details)
            return
        down = PeerDown(*details)
        with self._lock:
            self._down[down.rank] = down
            listeners = list(self._listeners)
        for listener in listeners:
            listener(down)

    def _dispatch_unclaimed(self, context: int, source: int, sequence: int, header: bytes) -> None:
        known = self._unclaimed.get(context)
        hear = None if known is None else known()
        if hear is None or not hear(source, sequence, header):
            self.engine.ignore_context(context)

    def _error(self, request: NativeRequest, outcome: int, envelope: Envelope | None) -> UnisonoError:
        if outcome == _PEER_DOWN:
            assert isinstance(request.peer, int)
            return self._down_of(request.peer).error()
        if outcome == _REFUSED and envelope is not None:
            posted = Posted(
                envelope.source, envelope.context, envelope.tag, request, request.buffer, request.dtype
            )
            if (reason := refusal(posted, envelope, self._recv_bytes_max)) is not None:
                return reason
        return _broken(outcome)

    def _down_of(self, rank: int) -> PeerDown:
        known = self._down.get(rank)
        if known is not None:
            return known
        cause, left = self.engine.down_of(rank)
        return PeerDown(rank, cause, left)


def _broken(outcome: int) -> UnisonoError:
    if outcome in (_NO_MEMORY, _REFUSED):
        return UnisonoError(
            "there is no memory for the message", next_step="send it in parts, or free memory on this host"
        )
    return ClosedError("the backend is closed")
