"""An inbox: the receiving side of a rank for backends that have no matching of their own.

Knows arrivals, posted receives, peers that are gone and in which order their news may be told. Does not know
how a message travels: a parcel does, and is asked to deliver itself once it has met its receive.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, UnisonoError
from unisono.messaging.backend import PeerDown
from unisono.messaging.credit import ENDED_CONTEXTS_MAX
from unisono.messaging.matching import Arrived, Matcher, Posted, refusal

__all__ = ["InboundMessage", "Inbox"]


class InboundMessage(ABC):
    """A message on its way. Its methods are called without any lock held."""

    @abstractmethod
    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Bring the bytes into the receive that was met, then end its request and the sender's."""

    @abstractmethod
    def refuse(self, error: UnisonoError) -> None:
        """The receiver is gone: end the sender's request with the error."""

    def is_whole(self) -> bool:
        """Whether all of it is here and nobody waits for its receive. Called with the inbox's lock held."""
        return False

    def drop(self) -> None:  # noqa: B027 - only who counts credit cares
        """Nobody will ever receive it, and it was whole: give its credit back."""


class Inbox:
    """Where messages for one rank meet its receives.

    Requests are completed after the lock is released, because their callbacks may call anything.
    """

    def __init__(self, rank: int, recv_bytes_max: int = Config.recv_bytes_max) -> None:
        self.rank = rank
        self._recv_bytes_max = recv_bytes_max
        self._lock = threading.Lock()
        self._matcher: Matcher[InboundMessage] = Matcher()
        self._queued: dict[InboundMessage, Arrived[InboundMessage]] = {}
        self._down: dict[int, PeerDown] = {}
        self._closed: UnisonoError | None = None
        self._ended: OrderedDict[int, None] = OrderedDict()

    def arrive(self, envelope: Envelope, parcel: InboundMessage) -> None:
        """A message has come: it meets the first fitting receive, or waits for one."""
        todo: list[Callable[[], None]] = []
        with self._lock:
            if self._closed is not None:
                error = self._closed
                todo.append(lambda: parcel.refuse(error))
            else:
                self._place(envelope, parcel, todo)
        for action in todo:
            action()

    def receive(
        self, source: int | Any_, context: int, tag: int | Any_, into: memoryview | None, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive."""
        return self._post(Posted(source, context, tag, Request(source), into, dtype))

    def probe(self, source: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe: it ends when a fitting message is queued, and leaves it there."""
        return self._post(Posted(source, context, tag, Request(source), is_probe=True))

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone: receives that only it could serve end; what it sent before stays receivable.

        A wildcard receive goes on, because another rank may serve it; who knows the members of a
        communicator decides about those.
        """
        with self._lock:
            if down.rank in self._down:
                return
            self._down[down.rank] = down
            doomed = [p for p in self._matcher.all_posted() if p.source == down.rank]
            for posted in doomed:
                self._matcher.withdraw(posted)
        for posted in doomed:
            posted.request.fail(down.error())

    def close(self, error: ClosedError, to_senders: UnisonoError) -> None:
        """End every receive with `error` and every sender that still waits with `to_senders`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = to_senders
            posted, arrived = list(self._matcher.all_posted()), list(self._matcher.all_arrived())
            self._matcher = Matcher()
            self._queued.clear()
        for receive in posted:
            receive.request.fail(error)
        for message in arrived:
            message.payload.refuse(to_senders)

    def end_context(self, context: int) -> None:
        """Nobody will receive in this context any more: drop what came whole, now and later."""
        with self._lock:
            self._ended[context] = None
            if len(self._ended) > ENDED_CONTEXTS_MAX:
                self._ended.popitem(last=False)
            dropped = [m for m in self._matcher.arrived_in(context) if m.payload.is_whole()]
            for message in dropped:
                self._take(message)
        for message in dropped:
            message.payload.drop()

    def withdraw_parcel(self, wanted: InboundMessage) -> bool:
        """Take back a queued message that its sender cancels; False if it has met its receive."""
        with self._lock:
            message = self._queued.get(wanted)
            if message is not None:
                self._take(message)
        return message is not None

    def inbound_from(self, source: int) -> list[InboundMessage]:
        """The queued messages of a rank."""
        with self._lock:
            return [m.payload for m in self._matcher.all_arrived() if m.envelope.source == source]

    def is_awaited(self) -> bool:
        """Whether a receive or probe waits here, beside those for control messages."""
        with self._lock:
            tags = [posted.tag for posted in self._matcher.all_posted()]
        return any(tag is ANY or not tag & Tags.CONTROL for tag in tags)

    def post_again(self, posted: Posted) -> None:
        """A receive whose message was taken back by its sender waits again, at its old place."""
        self._post(posted)

    def is_idle(self) -> bool:
        """Whether nothing waits here: a leak check."""
        with self._lock:
            return self._matcher.is_empty()

    def _place(self, envelope: Envelope, parcel: InboundMessage, todo: list[Callable[[], None]]) -> None:
        while (posted := self._matcher.find_posted(envelope)) is not None:
            self._matcher.withdraw(posted)
            if posted.is_probe:
                todo.append(partial(posted.request.complete, envelope))
            elif (reason := refusal(posted, envelope, self._recv_bytes_max)) is not None:
                todo.append(partial(posted.request.fail, reason, envelope))
            else:
                todo.append(partial(parcel.deliver, posted, envelope))
                return
        if envelope.context in self._ended and parcel.is_whole():
            todo.append(parcel.drop)
        else:
            self._queued[parcel] = message = Arrived(envelope, parcel)
            self._matcher.queue(message)

    def _take(self, message: Arrived[InboundMessage]) -> None:
        """Take a message out of the queue; the caller holds the lock."""
        self._matcher.take(message)
        del self._queued[message.payload]

    def _post(self, posted: Posted) -> Request:
        request = posted.request
        request.withdraw_by(lambda _: self._withdraw(posted))
        message: Arrived[InboundMessage] | None = None
        error: UnisonoError | None = None
        with self._lock:
            if self._closed is not None:
                error = ClosedError("the backend is closed")
            elif (message := self._matcher.find_arrived(posted)) is None:
                down = None if posted.source is ANY else self._down.get(posted.source)
                if down is not None:
                    error = down.error()
                else:
                    self._matcher.post(posted)
            elif posted.is_probe:
                pass
            elif (reason := refusal(posted, message.envelope, self._recv_bytes_max)) is not None:
                error = reason
            else:
                self._take(message)
        if error is not None:
            request.fail(error, None if message is None else message.envelope)
        elif message is not None:
            if posted.is_probe:
                request.complete(message.envelope)
            else:
                message.payload.deliver(posted, message.envelope)
        return request

    def _withdraw(self, posted: Posted) -> bool:
        with self._lock:
            if not self._matcher.withdraw(posted):
                return False
        posted.request.cancelled()
        return True
