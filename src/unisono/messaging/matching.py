"""Matching of receives and messages by (context, source, tag): posted receives, unexpected messages.

The caller holds a lock and moves the data. A *posted* receive waits for a message; an *unexpected* message
arrived before its receive. For one receive, messages are considered in the order of arrival; for one message,
receives in the order of posting. So messages of one sender with one tag never overtake each other, wildcards
included.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from unisono.core.dtypes import DTYPES
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Tags
from unisono.core.request import Request
from unisono.errors import UsageError

__all__ = ["Matcher", "Posted", "UnexpectedMessage", "refusal"]

P = TypeVar("P")


@dataclass(slots=True, eq=False)
class Posted:
    """A receive or probe that waits. Without `into` a receive takes any length; a probe takes nothing."""

    source: int | Any_
    context: int
    tag: int | Any_
    request: Request
    into: memoryview | None = None
    dtype: int = UNTYPED
    is_probe: bool = False
    number: int = -1

    def meets(self, envelope: Envelope) -> bool:
        """Whether a message with this envelope matches."""
        return (
            self.context == envelope.context
            and (self.source is ANY or self.source == envelope.source)
            and (Tags.is_users(envelope.tag) if self.tag is ANY else self.tag == envelope.tag)
        )


@dataclass(slots=True, eq=False)
class UnexpectedMessage(Generic[P]):
    """A message that waits for its receive; `payload` is opaque here, the backend's own."""

    envelope: Envelope
    payload: P
    number: int = -1


@dataclass(slots=True)
class _Queues(Generic[P]):
    """The posted receives and unexpected messages of one context."""

    posted: OrderedDict[int, Posted] = field(default_factory=OrderedDict)
    unexpected: OrderedDict[int, UnexpectedMessage[P]] = field(default_factory=OrderedDict)
    posted_exact: dict[tuple[int, int], OrderedDict[int, Posted]] = field(default_factory=dict)
    posted_wild: OrderedDict[int, Posted] = field(default_factory=OrderedDict)
    unexpected_exact: dict[tuple[int, int], OrderedDict[int, UnexpectedMessage[P]]] = field(
        default_factory=dict
    )


def refusal(posted: Posted, envelope: Envelope, bytes_max: int | None = None) -> UsageError | None:
    """Why a matching message does not fit this receive; None if it does.

    `bytes_max` bounds a user's receive without a buffer, before memory is allocated. It does not apply to
    control messages, which are bounded on arrival: refused here, one would block all that follow.
    """
    if posted.into is None:
        if bytes_max is None or envelope.nbytes <= bytes_max or Tags.is_control(envelope.tag):
            return None
        return _too_long(envelope, bytes_max)
    if envelope.nbytes > posted.into.nbytes:
        return UsageError(
            f"the message from rank {envelope.source} with tag {envelope.tag} has {envelope.nbytes} bytes, "
            f"the buffer {posted.into.nbytes}; it stays queued",
            next_step=f"receive it into {envelope.nbytes} bytes or more, or by recv_bytes",
        )
    types = (envelope.dtype, posted.dtype)
    if types[0] != types[1] and not any(code in (UNTYPED, DTYPES["uint8"].code) for code in types):
        sent, wanted = (list(DTYPES)[code] if code < len(DTYPES) else f"type {code}" for code in types)
        return UsageError(
            f"the message from rank {envelope.source} with tag {envelope.tag} holds {sent}, "
            f"the buffer is {wanted}; it stays queued",
            next_step=f"receive it into {sent}, or by recv_bytes",
        )
    return None


def _too_long(envelope: Envelope, bytes_max: int) -> UsageError:
    return UsageError(
        f"the message from rank {envelope.source} with tag {envelope.tag} has {envelope.nbytes} bytes; "
        f"allowed without a buffer: {bytes_max} (recv_bytes_max); it stays queued",
        next_step="receive it with recv into a buffer of its size, or set Config(recv_bytes_max=...) or "
        "UNISONO_RECV_BYTES_MAX alike on all ranks",
    )


class Matcher(Generic[P]):
    """The posted-receive and unexpected-message queues of one rank, by context."""

    def __init__(self) -> None:
        self._contexts: dict[int, _Queues[P]] = {}
        self._numbers = itertools.count()

    def find_unexpected(self, posted: Posted) -> UnexpectedMessage[P] | None:
        """The first unexpected message that matches a receive; it stays queued."""
        queues = self._contexts.get(posted.context)
        if queues is None:
            return None
        if posted.source is not ANY and posted.tag is not ANY:
            exact = queues.unexpected_exact.get((posted.source, posted.tag))
            return next(iter(exact.values())) if exact else None
        return next((m for m in queues.unexpected.values() if posted.meets(m.envelope)), None)

    def find_posted(self, envelope: Envelope) -> Posted | None:
        """The first posted receive or probe that matches a message; it stays posted."""
        queues = self._contexts.get(envelope.context)
        if queues is None:
            return None
        named = queues.posted_exact.get((envelope.source, envelope.tag))
        exact = next(iter(named.values())) if named else None
        if not queues.posted_wild:
            return exact
        wild = next((p for p in queues.posted_wild.values() if p.meets(envelope)), None)
        return wild if exact is None or (wild is not None and wild.number < exact.number) else exact

    def post(self, posted: Posted) -> None:
        """Queue a receive or probe; one that was posted before returns to its old place in the order."""
        queues = self._queues(posted.context)
        queue = _queue_of(queues, posted)
        if posted.number < 0:
            posted.number = next(self._numbers)
            queues.posted[posted.number] = queue[posted.number] = posted
            return
        for ordered in (queues.posted, queue):
            later = [number for number in ordered if number > posted.number]
            ordered[posted.number] = posted
            for number in later:
                ordered.move_to_end(number)

    def queue(self, message: UnexpectedMessage[P]) -> None:
        """Queue an unexpected message."""
        message.number = next(self._numbers)
        envelope = message.envelope
        queues = self._queues(envelope.context)
        queues.unexpected[message.number] = message
        key = (envelope.source, envelope.tag)
        queues.unexpected_exact.setdefault(key, OrderedDict())[message.number] = message

    def withdraw(self, posted: Posted) -> bool:
        """Remove a receive or probe; False if it is no longer posted."""
        queues = self._contexts.get(posted.context)
        if queues is None or queues.posted.pop(posted.number, None) is None:
            return False
        queue = _queue_of(queues, posted)
        del queue[posted.number]
        if not queue and posted.source is not ANY and posted.tag is not ANY:
            del queues.posted_exact[posted.source, posted.tag]
        self._forget_if_empty(posted.context)
        return True

    def take(self, message: UnexpectedMessage[P]) -> bool:
        """Remove an unexpected message; False if it is no longer queued."""
        envelope = message.envelope
        queues = self._contexts.get(envelope.context)
        if queues is None or queues.unexpected.pop(message.number, None) is None:
            return False
        key = (envelope.source, envelope.tag)
        del queues.unexpected_exact[key][message.number]
        if not queues.unexpected_exact[key]:
            del queues.unexpected_exact[key]
        self._forget_if_empty(envelope.context)
        return True

    def all_posted(self) -> Iterator[Posted]:
        """All posted receives and probes, in order of posting within a context."""
        return itertools.chain.from_iterable(list(q.posted.values()) for q in list(self._contexts.values()))

    def all_unexpected(self) -> Iterator[UnexpectedMessage[P]]:
        """All unexpected messages, in order of arrival within a context."""
        return itertools.chain.from_iterable(
            list(q.unexpected.values()) for q in list(self._contexts.values())
        )

    def unexpected_in(self, context: int) -> list[UnexpectedMessage[P]]:
        """The unexpected messages of one context, in order of arrival."""
        queues = self._contexts.get(context)
        return [] if queues is None else list(queues.unexpected.values())

    def is_empty(self) -> bool:
        """Whether nothing is posted or queued in any context."""
        return not self._contexts

    def _queues(self, context: int) -> _Queues[P]:
        queues = self._contexts.get(context)
        if queues is None:
            queues = self._contexts[context] = _Queues()
        return queues

    def _forget_if_empty(self, context: int) -> None:
        queues = self._contexts[context]
        if not queues.posted and not queues.unexpected:
            del self._contexts[context]


def _queue_of(queues: _Queues[P], posted: Posted) -> OrderedDict[int, Posted]:
    if posted.source is ANY or posted.tag is ANY:
        return queues.posted_wild
    return queues.posted_exact.setdefault((posted.source, posted.tag), OrderedDict())
