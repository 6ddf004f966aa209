"""An inbox: the receiving side of a rank, for backends that have no matching of their own.

It matches messages with receives; how the bytes travel is known to the message, which delivers itself once it
is matched.
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
from unisono.messaging.matching import Matcher, Posted, UnexpectedMessage, refusal

__all__ = ["InboundMessage", "Inbox"]


class InboundMessage(ABC):
    """A message that has arrived, whole or only its envelope. Methods are called without a lock held."""

    @abstractmethod
    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Bring the bytes into the matched receive, then end its request and the sender's."""

    @abstractmethod
    def refuse(self, error: UnisonoError) -> None:
        """The receiver is closed: end the sender's request with this error."""

    def is_whole(self) -> bool:
        """Whether all bytes are here and the sender does not wait. Called with the inbox's lock held."""
        return False

    def drop(self) -> None:  # noqa: B027 - a backend without credit needs nothing
        """The message, which was whole, will never be received: return its credit."""


class Inbox:
    """Matches the messages for one rank with its receives.

    Requests end after the lock is released, because their callbacks may call anything.
    """

    def __init__(self, rank: int, recv_bytes_max: int = Config.recv_bytes_max) -> None:
        self.rank = rank
        self._recv_bytes_max = recv_bytes_max
        self._lock = threading.Lock()
        self._matcher: Matcher[InboundMessage] = Matcher()
        self._queued: dict[InboundMessage, UnexpectedMessage[InboundMessage]] = {}
        self._down: dict[int, PeerDown] = {}
        self._closed: UnisonoError | None = None
        self._ended: OrderedDict[int, None] = OrderedDict()

    def arrive(self, envelope: Envelope, message: InboundMessage) -> None:
        """A message has arrived: match it with the first fitting receive, or queue it."""
        todo: list[Callable[[], None]] = []
        with self._lock:
            if self._closed is not None:
                error = self._closed
                todo.append(lambda: message.refuse(error))
            else:
                self._match(envelope, message, todo)
        for action in todo:
            action()

    def receive(
        self, source: int | Any_, context: int, tag: int | Any_, into: memoryview | None, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive."""
        return self._post(Posted(source, context, tag, Request(source), into, dtype))

    def probe(self, source: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe: it ends when a matching message is queued, and leaves it there."""
        return self._post(Posted(source, context, tag, Request(source), is_probe=True))

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone: receives from it end with PeerLost; messages that arrived stay receivable.

        A wildcard receive goes on, because another rank may send; the group decides about those.
        """
        with self._lock:
            if down.rank in self._down:
                return
            self._down[down.rank] = down
            affected = [p for p in self._matcher.all_posted() if p.source == down.rank]
            for posted in affected:
                self._matcher.withdraw(posted)
        for posted in affected:
            posted.request.fail(down.error())

    def close(self, error: ClosedError, to_senders: UnisonoError) -> None:
        """End every receive with `error`, and the request of every sender that waits with `to_senders`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = to_senders
            posted, arrived = list(self._matcher.all_posted()), list(self._matcher.all_unexpected())
            self._matcher = Matcher()
            self._queued.clear()
        for receive in posted:
            receive.request.fail(error)
        for message in arrived:
            message.payload.refuse(to_senders)

    def end_context(self, context: int) -> None:
        """A context is closed here: drop its whole messages, now and when they arrive."""
        with self._lock:
            self._ended[context] = None
            if len(self._ended) > ENDED_CONTEXTS_MAX:
                self._ended.popitem(last=False)
            dropped = [m for m in self._matcher.unexpected_in(context) if m.payload.is_whole()]
            for message in dropped:
                self._take(message)
        for message in dropped:
            message.payload.drop()

    def withdraw_message(self, wanted: InboundMessage) -> bool:
        """Remove a queued message that its sender cancels; False if it was matched."""
        with self._lock:
            message = self._queued.get(wanted)
            if message is not None:
                self._take(message)
        return message is not None

    def inbound_from(self, source: int) -> list[InboundMessage]:
        """The queued messages of a rank."""
        with self._lock:
            return [m.payload for m in self._matcher.all_unexpected() if m.envelope.source == source]

    def is_awaited(self) -> bool:
        """Whether a receive or probe is posted, other than those for control messages."""
        with self._lock:
            tags = [posted.tag for posted in self._matcher.all_posted()]
        return any(tag is ANY or not tag & Tags.CONTROL for tag in tags)

    def post_again(self, posted: Posted) -> None:
        """Post a receive again, at its old place in the order, after its sender withdrew the message."""
        self._post(posted)

    def is_idle(self) -> bool:
        """Whether nothing is posted or queued; for leak checks."""
        with self._lock:
            return self._matcher.is_empty()

    def _match(self, envelope: Envelope, message: InboundMessage, todo: list[Callable[[], None]]) -> None:
        while (posted := self._matcher.find_posted(envelope)) is not None:
            self._matcher.withdraw(posted)
            if posted.is_probe:
                todo.append(partial(posted.request.complete, envelope))
            elif (reason := refusal(posted, envelope, self._recv_bytes_max)) is not None:
                todo.append(partial(posted.request.fail, reason, envelope))
            else:
                todo.append(partial(message.deliver, posted, envelope))
                return
        if envelope.context in self._ended and message.is_whole():
            todo.append(message.drop)
        else:
            self._queued[message] = unexpected = UnexpectedMessage(envelope, message)
            self._matcher.queue(unexpected)

    def _take(self, message: UnexpectedMessage[InboundMessage]) -> None:
        """Remove a message from the queue; the caller holds the lock."""
        self._matcher.take(message)
        del self._queued[message.payload]

    def _post(self, posted: Posted) -> Request:
        request = posted.request
        request.withdraw_by(lambda _: self._withdraw(posted))
        message: UnexpectedMessage[InboundMessage] | None = None
        error: UnisonoError | None = None
        with self._lock:
            if self._closed is not None:
                error = ClosedError("the backend is closed")
            elif (message := self._matcher.find_unexpected(posted)) is None:
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
