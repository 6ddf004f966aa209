"""The control messages: what ranks send each other about their operations, beside the data.

Three families share one wire format: messages about a group (failure, goodbye, stall query), about services
(is there an agent?), and about waits (deadlock detection). Every field is bounded when it is read, and cut to
the same bound when it is written: the longest message that can be made is shorter than CONTROL_BYTES_MAX.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from unisono.comm.deadlock import RankState
from unisono.core.envelope import Lane
from unisono.errors import (
    CollectiveMismatch,
    DeadlineExceeded,
    Deadlock,
    Location,
    PeerAborted,
    PeerLost,
    ProtocolError,
    UnisonoError,
)
from unisono.messaging.stage import FINGERPRINT_BYTES

__all__ = [
    "CALLED_MAX",
    "CALLS_MAX",
    "CONTEXTS_MAX",
    "GOODBYES_MAX",
    "RANKS_MAX",
    "CallReport",
    "ControlMessage",
    "DeadlockFound",
    "DeadlockMessage",
    "Goodbye",
    "Goodbyes",
    "GroupFailure",
    "GroupMessage",
    "Marker",
    "ServiceFound",
    "ServiceMessage",
    "ServiceMissing",
    "ServiceQuery",
    "StallQuery",
    "StallReply",
    "WaitQuery",
    "WaitReport",
    "decode",
    "encode",
    "printable",
]

# Text from a peer is shown to people and logged: 4096 characters are enough for a long error message.
_TEXT_MAX: Final = 4096
RANKS_MAX: Final = 1 << 13
# A goodbye holds the last calls of its sender, a mismatch its own call and two that differ.
CALLS_MAX: Final = 4
CONTEXTS_MAX: Final = 64
# Groups in one message: 9 bytes each, and no more than a few milliseconds of closing.
GOODBYES_MAX: Final = 512
# Those of them with calls, of up to 3.2 KB each.
CALLED_MAX: Final = 64
# What a report shows of a call, in characters.
_WORDS_MAX: Final = 512
_LINE_MAX: Final = 256

Text: TypeAlias = Annotated[str, Meta(max_length=_TEXT_MAX)]
Record: TypeAlias = Annotated[bytes, Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
Ranks: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=RANKS_MAX)]
Progress: TypeAlias = Annotated[dict[int, int], Meta(max_length=CONTEXTS_MAX)]


# -- about a group ----------------------------------------------------------------------------------------


class CallReport(msgspec.Struct, frozen=True, array_like=True):
    """A collective call in a report: its fingerprint, and what only the rank that made it knows.

    `words` say more than the fingerprint; they are empty if unknown. `line` is where the call stands in the
    program. None: the rank has not said; empty: it does not know.
    """

    fingerprint: Record
    words: Annotated[str, Meta(max_length=_WORDS_MAX)] = ""
    line: Annotated[str, Meta(max_length=_LINE_MAX)] | None = None

    @staticmethod
    def of(fingerprint: bytes, words: str, line: str) -> CallReport:
        """The report of the rank that made the call, cut to what may travel."""
        if len(words) > _WORDS_MAX:  # a digest of the whole stands for the end: what differs there shows
            digest = hashlib.blake2b(words.encode(errors="replace"), digest_size=8).hexdigest()
            words = f"{words[: _WORDS_MAX - len(digest) - 1]}~{digest}"
        return CallReport(fingerprint, words, line[-_LINE_MAX:])


Calls: TypeAlias = Annotated[dict[int, CallReport], Meta(max_length=CALLS_MAX)]


class GroupFailure(msgspec.Struct, frozen=True, tag="group_failure"):
    """A communicator is broken, and why: the root cause, passed on as itself.

    `is_abort`: the sender gives up for good, which ends messages as well as collectives. If members called
    different collectives, `calls` holds the sender's call and two that differ, by world rank.
    """

    context: int
    kind: Text
    what: Text
    cause: Text = ""
    report: Text = ""
    ranks: Ranks = ()
    operation: Text | None = None
    communicator: Text | None = None
    sequence: int | None = None
    is_abort: bool = False
    calls: Calls = {}

    @staticmethod
    def of(
        error: UnisonoError,
        context: int,
        is_abort: bool = False,
        calls: Mapping[int, CallReport] | None = None,
    ) -> GroupFailure:
        """The message that carries an error to the other members."""
        ranks: tuple[int, ...] = ()
        if isinstance(error, PeerLost):
            ranks = error.ranks
        elif isinstance(error, DeadlineExceeded):
            ranks = error.waiting_on
        elif isinstance(error, PeerAborted):
            ranks = (error.rank,)
        elif isinstance(error, CollectiveMismatch):
            ranks = error.culprits
        report = error.report if isinstance(error, CollectiveMismatch) else ""
        where = error.where
        return GroupFailure(
            context,
            _cut(type(error).__name__),
            _cut(error.what),
            _cut(error.cause or ""),
            _cut(report),
            ranks[:RANKS_MAX],
            where.operation and _cut(where.operation),
            where.communicator and _cut(where.communicator),
            where.sequence,
            is_abort,
            dict(itertools.islice((calls or {}).items(), CALLS_MAX)),
        )

    def error(self, sender: int) -> UnisonoError:
        """The error as the receiver raises it; a kind that is not passed on becomes the sender's abort."""
        what, cause, report = printable(self.what), printable(self.cause), printable(self.report)
        where = Location(self.operation, self.communicator, None, self.sequence)
        match self.kind:
            case "PeerLost":  # the sender's operation says nothing about the receiver's
                return PeerLost(what, ranks=self.ranks, cause=cause)
            case "DeadlineExceeded":
                return DeadlineExceeded(what, waiting_on=self.ranks, where=where, cause=cause)
            case "CollectiveMismatch":
                # The members called different verbs under this number; the sender's is only one of them.
                where = replace(where, operation="collective")
                return CollectiveMismatch(what, report=report, culprits=self.ranks, where=where, cause=cause)
            case "Deadlock":
                return Deadlock(what, where=where, cause=cause)
            case "PeerAborted":
                rank = self.ranks[0] if self.ranks and self.ranks[0] >= 0 else sender
                return PeerAborted(what, rank=rank, where=where, cause=cause)
            case _:
                text = f"{self.kind}: {what}" + (f": {cause}" if cause else "")
                return PeerAborted(f"rank {sender} gave up", rank=sender, where=where, cause=text)


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender has closed this communicator; everything it sent on it in this lane came before.

    The sender counts as gone once both lanes have said goodbye: data and its confirmations use different
    lanes. `calls` holds its last collectives by number, so that a rank that still waits in one of them can
    detect a mismatch.
    """

    context: int
    lane: Lane
    calls: Calls = {}


class Goodbyes(msgspec.Struct, frozen=True, tag="goodbyes"):
    """The sender has closed these communicators: a goodbye of each.

    `calls` are by context. Where all members are known to have made the same calls there are none.
    """

    contexts: Annotated[tuple[int, ...], Meta(max_length=GOODBYES_MAX)]
    lane: Lane
    calls: Annotated[dict[int, Calls], Meta(max_length=CALLED_MAX)] = {}


class StallQuery(msgspec.Struct, frozen=True, tag="stall_query"):
    """The sender's collective does not end: has the receiver called the one with this number?"""

    context: int
    sequence: int
    fingerprint: Record


class StallReply(msgspec.Struct, frozen=True, tag="stall_reply"):
    """Whether the sender has called that collective, and which ranks it waits for itself."""

    context: int
    sequence: int
    has_called: bool
    waiting_on: Ranks = ()


# -- about services ---------------------------------------------------------------------------------------


class ServiceQuery(msgspec.Struct, frozen=True, tag="service_query"):
    """Does the receiver have a service (an RPC agent) of this context? The sender has one named `name`.

    `progress` is the number of the sender's next collective, by context, when it made its service. A receiver
    that is beyond that and has no service will not make one.
    """

    context: int
    name: Text
    progress: Progress = {}


class ServiceFound(msgspec.Struct, frozen=True, tag="service_found"):
    """The sender has such a service, with this name."""

    context: int
    name: Text


class ServiceMissing(msgspec.Struct, frozen=True, tag="service_missing"):
    """The sender has no such service."""

    context: int


# -- about waits ------------------------------------------------------------------------------------------


class WaitQuery(msgspec.Struct, frozen=True, tag="wait_query"):
    """What do the threads of the receiver wait for?

    With `ranks`, the receiver exchanges markers with all of these before it reports.
    """

    check: int
    ranks: tuple[int, ...] = ()


class WaitReport(msgspec.Struct, frozen=True, tag="wait_report"):
    """The reply to a WaitQuery; `after_markers` if the sender has the markers of all ranks of the query."""

    check: int
    after_markers: bool
    state: RankState


class Marker(msgspec.Struct, frozen=True, tag="marker"):
    """All that the sender sent before this marker has arrived. It belongs to a check of rank `initiator`."""

    initiator: int
    check: int


class DeadlockFound(msgspec.Struct, frozen=True, tag="deadlock_found"):
    """These operations of the receiver, by their numbers, can never end, and why."""

    numbers: tuple[int, ...]
    cause: str


GroupMessage: TypeAlias = GroupFailure | Goodbye | StallQuery | StallReply
ServiceMessage: TypeAlias = ServiceQuery | ServiceFound | ServiceMissing
DeadlockMessage: TypeAlias = WaitQuery | WaitReport | Marker | DeadlockFound
ControlMessage: TypeAlias = GroupMessage | Goodbyes | ServiceMessage | DeadlockMessage

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ControlMessage).decode


def decode(data: bytes) -> ControlMessage:
    """Read a control message.

    Raises:
        ProtocolError: the bytes are not a control message, or a field is longer than allowed.
    """
    try:
        message: ControlMessage = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("a malformed control message", cause=str(error)) from None
    return message


def printable(text: str) -> str:
    """A peer's text, safe to show: of bounded length, without control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:_TEXT_MAX])


def _cut(text: str) -> str:
    return text[:_TEXT_MAX]
