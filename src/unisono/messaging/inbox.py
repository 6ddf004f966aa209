"""The inbox of a rank: its posted receives and its unexpected-message queue. Pure; the caller holds a lock.

It decides which receive gets which message, which message does not fit and stays queued, and what a probe
sees. How the bytes travel is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from unisono.config import Config
from unisono.core.envelope import ANY, Envelope, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError
from unisono.messaging.actions import Action, End
from unisono.messaging.credit import ENDED_CONTEXTS_MAX
from unisono.messaging.matching import Matcher, Posted, UnexpectedMessage, refusal
from unisono.messaging.peer_down import PeerDown

__all__ = ["Inbox"]

P = TypeVar("P")


class Inbox(Generic[P]):
    """Matches the messages for one rank with its receives. Requests that end are appended to `out`."""

    def __init__(self, recv_bytes_max: int = Config.recv_bytes_max) -> None:
        self.matcher: Matcher[P] = Matcher()
        self._recv_bytes_max = recv_bytes_max
        self._posted: dict[Request, Posted] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def arrive(self, envelope: Envelope, out: list[Action]) -> Posted | None:
        """Match a message with the first receive that it fits, and return that; None if there is none."""
        while (posted := self.matcher.find_posted(envelope)) is not None:
            self._remove(posted)
            if posted.is_probe:
                out.append(End(posted.request, envelope))
            elif (reason := refusal(posted, envelope, self._recv_bytes_max)) is not None:
                out.append(End(posted.request, envelope, reason))
            else:
                return posted
        return None

    def queue(self, message: UnexpectedMessage[P]) -> None:
        """Keep a message that no receive has matched."""
        self.matcher.queue(message)

    def post(self, posted: Posted, down: PeerDown | None, out: list[Action]) -> UnexpectedMessage[P] | None:
        """Take the first queued message that a receive matches; without one, post the receive.

        `down` is the end of its source, if that is gone: then nothing is posted.
        """
        message = self.matcher.find_unexpected(posted)
        if message is None:
            if down is not None:
                out.append(End(posted.request, error=down.error()))
            else:
                self._posted[posted.request] = posted
                self.matcher.post(posted)
        elif posted.is_probe:
            out.append(End(posted.request, message.envelope))
        elif (reason := refusal(posted, message.envelope, self._recv_bytes_max)) is not None:
            out.append(End(posted.request, message.envelope, reason))
        else:
            self.matcher.take(message)
            return message
        return None

    def withdraw(self, request: Request) -> bool:
        """Remove a receive or probe; False if it is not posted."""
        posted = self._posted.get(request)
        if posted is not None:
            self._remove(posted)
        return posted is not None

    def remove(self, message: UnexpectedMessage[P]) -> None:
        """Remove a message that can no longer be received."""
        self.matcher.take(message)

    def peer_down(self, down: PeerDown, out: list[Action]) -> None:
        """A rank is gone: receives from it end with PeerLost; messages that arrived stay receivable.

        A wildcard receive goes on, because another rank may send; the group decides about those.
        """
        for posted in [p for p in self.matcher.all_posted() if p.source == down.rank]:
            self._remove(posted)
            out.append(End(posted.request, error=down.error()))

    def close(self, error: ClosedError, out: list[Action]) -> None:
        """End every receive, and forget every message."""
        out += [End(posted.request, error=error) for posted in self.matcher.all_posted()]
        self.matcher = Matcher()
        self._posted.clear()

    def end_context(self, context: int) -> list[UnexpectedMessage[P]]:
        """A context is closed here: remember that, and return its messages, which stay queued."""
        self._ended[context] = None
        if len(self._ended) > ENDED_CONTEXTS_MAX:
            self._ended.popitem(last=False)
        return self.matcher.unexpected_in(context)

    def has_ended(self, context: int) -> bool:
        """Whether a context was closed here, so that no receive will be posted in it."""
        return context in self._ended

    def is_awaited(self) -> bool:
        """Whether a receive or probe is posted, other than those for control messages."""
        return any(p.tag is ANY or not p.tag & Tags.CONTROL for p in self._posted.values())

    def is_idle(self) -> bool:
        """Whether nothing is posted or queued; for leak checks."""
        return self.matcher.is_empty()

    def _remove(self, posted: Posted) -> None:
        self.matcher.withdraw(posted)
        del self._posted[posted.request]
