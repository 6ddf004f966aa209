"""Completions: which request a finished operation of the engine belongs to, and which thread dispatches it.

A thread that waits makes progress in the engine without the GIL, and dispatches what has ended. While no
thread waits, a pump thread sleeps in the engine and dispatches, so that tasks without a waiter go on. The
engine gives completions to one thread at a time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono import _native
from unisono.backends.native.signals import DEFERRED
from unisono.core.envelope import UNTYPED, Any_, Envelope
from unisono.core.request import HeaderMismatch, LengthMismatch, Request
from unisono.errors import ClosedError, UnisonoError
from unisono.messaging.backend import GroupListener
from unisono.messaging.matching import Posted, refusal
from unisono.messaging.peer_down import PeerDown

__all__ = ["CompletionDispatcher", "Listening", "NativeRequest", "RunRequest"]

# In a completion, this stands for the number of an operation: see _native.Engine.
_UNCLAIMED = -2
# The number of the receive that a listener keeps posted; requests have numbers from 1 on.
_LISTENING = 0
# native/messaging/message.hpp: Outcome
_DONE, _CANCELLED, _PEER_DOWN, _REFUSED, _CLOSED, _NO_MEMORY = range(6)


class NativeRequest(Request):
    """A request with its operation's handle; it keeps the buffer until the engine is done with it."""

    __slots__ = ("buffer", "completions", "dtype", "engine_peer", "handle", "memory", "number")

    def __init__(
        self,
        peer: int | Any_,
        completions: CompletionDispatcher,
        buffer: memoryview | None,
        dtype: int = UNTYPED,
        memory: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__(peer)
        self.engine_peer = peer  # `peer` becomes the rank of a group, if one has called
        self.memory = memory
        self.completions = completions
        self.buffer = buffer
        self.dtype = dtype
        self.handle = 0
        self.number = next(completions.numbers)

    def cancel(self) -> bool:
        """Withdraw it from the engine."""
        if self.done or not self.handle or not self.completions.engine.cancel(self.handle):
            return False
        self.completions.requests.pop(self.number, None)
        self.cancelled()
        return True


# The peer of a request that concerns several.
_NO_PEER = -1


class RunRequest(NativeRequest):
    """A plan under way in the engine; it keeps the plan's memory."""

    __slots__ = ()

    def __init__(self, completions: CompletionDispatcher, memory: tuple[Any, ...]) -> None:
        super().__init__(_NO_PEER, completions, None, memory=memory)

    def peers_awaited(self) -> tuple[int, ...]:
        """The peers of messages under way."""
        if self.done or not self.handle:
            return ()
        return tuple(map(self.rank_here, self.completions.engine.awaited(self.handle)))

    def cancel(self) -> bool:
        """Withdraw its messages where possible; it ends when the engine no longer uses its memory."""
        return not self.done and bool(self.handle) and self.completions.engine.cancel(self.handle)

    def end(self, outcome: int, details: tuple[Any, ...] | None = None) -> None:
        """End with the outcome of the run."""
        self.memory = None
        if outcome == _DONE:
            self.complete()
            return
        assert details is not None
        peer, is_header, nbytes, nbytes_expected, header = details
        if outcome == _CANCELLED:
            self.cancelled()
        elif outcome != _REFUSED:
            self.fail(_broken(outcome))
        elif is_header:
            self.fail(HeaderMismatch(peer, header))
        else:
            self.fail(LengthMismatch(peer, nbytes, nbytes_expected))


class Listening(NamedTuple):
    """The receiver of all messages of a context and tag."""

    context: int
    tag: int
    on_message: Callable[[int, bytes], None]
    on_end: Callable[[UnisonoError], None]


class CompletionDispatcher:
    """The requests under way in the engine, and the dispatch of their completions."""

    def __init__(self, engine: _native.Engine, recv_bytes_max: int) -> None:
        self.engine = engine
        self._recv_bytes_max = recv_bytes_max
        self.numbers = itertools.count(1)
        # By number; of a message that was posted, its memory.
        self.requests: dict[int, NativeRequest | memoryview] = {}
        self.is_closed = False
        self._lock = threading.Lock()
        self._down: dict[int, PeerDown] = {}
        self._completions: deque[tuple[Any, ...]] = deque()
        self._dispatcher = 0  # the thread that dispatches
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._listening: Listening | None = None
        # By context, until the group is ended.
        self.listeners_of_groups: dict[int, weakref.ref[GroupListener]] = {}

    def dispatch(self, completions: list[tuple[Any, ...]]) -> None:
        """Dispatch completions that the engine gave to this thread, and those that have come since.

        The order matters: the verdict that a peer is dead comes after all that the peer sent. A callback that
        waits dispatches the rest itself. The first error of a callback is raised after all were dispatched.
        """
        is_nested = self.is_dispatching()
        self._completions.extend(completions)
        failure: BaseException | None = None
        while True:
            self._dispatcher = threading.get_ident()
            while self._completions:
                try:
                    self._dispatch_one(*self._completions.popleft())
                except BaseException as error:  # the other completions must still be dispatched
                    failure = failure or error
            if is_nested:
                break
            self._dispatcher = 0
            self._completions.extend(self.engine.more(True))
            if not self._completions:
                break
        if failure is not None:
            raise failure

    def is_dispatching(self) -> bool:
        """Whether the calling thread is dispatching, further up its stack."""
        return self._dispatcher == threading.get_ident()

    def end(
        self,
        request: NativeRequest,
        outcome: int,
        envelope: tuple[Any, ...] | None = None,
        data: bytes | bytearray | None = None,
    ) -> None:
        """End a request with the outcome of its operation."""
        matched = None if envelope is None else Envelope(*envelope)
        request.memory = None
        if outcome == _DONE:
            request.buffer = None
            request.complete(matched, data)
        elif outcome == _CANCELLED:
            request.cancelled()
        else:
            request.fail(self._error(request, outcome, matched), matched)

    def add_listener(self, listener: Callable[[PeerDown], None]) -> list[PeerDown]:
        """Notify the listener of every rank that goes down from now on; returns those that are down."""
        with self._lock:
            if not self.is_closed:
                self._listeners.append(listener)
            return list(self._down.values())

    def listen(self, listening: Listening) -> None:
        """See Backend.listen. One listens at a time."""
        self._listening = listening
        self._receive_next()

    def _receive_next(self, *message: Any) -> None:
        """Pass on a message that has come, and those after it; then post a receive for the next one."""
        listening = self._listening
        failure: BaseException | None = None
        assert listening is not None, "it has not ended"
        while True:
            if message:
                outcome, envelope, data = message
                if outcome == _DONE:
                    try:
                        listening.on_message(envelope[0], bytes(data))
                    except BaseException as error:  # the next message must still be received
                        failure = failure or error
                elif outcome != _PEER_DOWN:  # the sender of a message died while the message was on its way
                    self._listening = None
                    listening.on_end(_broken(outcome))
                    return
            # In order: what ends at once is dispatched after all that has ended earlier.
            posted = self.engine.receive(
                _LISTENING, -1, listening.context, listening.tag, None, UNTYPED, True
            )
            if isinstance(posted, int):
                break
            message = posted[1:]
        if failure is not None:
            raise failure

    def adopt_overdue(self) -> None:
        """Let Python look at started operations that stall, or whose deadline is over."""
        for known in list(self.listeners_of_groups.values()):
            listener = known()
            if listener is not None:
                listener.adopt_overdue()

    def close(self) -> None:
        """Dispatch what ended with the engine; listeners are no longer notified."""
        with self._lock:
            self.is_closed = True
            self._listeners.clear()
        with DEFERRED:
            self.dispatch(self.engine.wait(0.0, 0, self.is_dispatching()))
        self.engine.interrupt_wait()

    def _dispatch_one(self, number: int, *details: Any) -> None:
        if number == _LISTENING:
            self._receive_next(*details)
            return
        if number > 0:
            request = self.requests.pop(number, None)
            if isinstance(request, RunRequest):
                request.end(*details)
            elif isinstance(request, NativeRequest):
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
        known = self.listeners_of_groups.get(context)
        listener = None if known is None else known()
        if listener is None or not listener.on_unclaimed(source, sequence, header):
            self.engine.ignore_context(context)

    def _error(self, request: NativeRequest, outcome: int, envelope: Envelope | None) -> UnisonoError:
        if outcome == _PEER_DOWN:
            assert isinstance(request.engine_peer, int)
            return self._down_of(request.engine_peer).error()
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
            "no memory for the message", next_step="send it in parts, or free memory on this host"
        )
    return ClosedError("the backend is closed")
