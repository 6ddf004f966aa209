"""What the eager/rendezvous protocol wants done: frames to transmit, receives to fill, requests to end.

A driver transmits frames in the order it got them. It fills and ends requests without holding a lock, because
their callbacks may call anything.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

from unisono.core.envelope import Envelope, Lane
from unisono.core.request import Request
from unisono.messaging.matching import Posted

__all__ = ["Action", "End", "Fill", "Frame", "Kind", "Transmit", "finish"]


class Kind(IntEnum):
    """What a frame is."""

    EAGER = 1  # a message with its bytes
    RTS = 2  # ready to send: a message's envelope; its bytes wait at the sender
    CTS = 3  # clear to send: a receive has matched the RTS
    DATA = 4  # one piece of the bytes
    FIN = 5  # the receiver has all bytes
    RTS_GONE = 6  # the answer to a CTS whose RTS was withdrawn
    WITHDRAW = 7  # the sender withdraws an RTS
    CREDIT = 8  # nothing but the credit that every frame may return
    GOODBYE = 9  # the sender leaves; nothing follows
    GOODBYE_ACK = 10  # the answer to a goodbye; nothing follows from this side either


class Frame(NamedTuple):
    """What one rank sends another. All frames of a rendezvous travel in the lane of its message.

    The envelope is that of the message; on a wire only EAGER and RTS carry it. EAGER and DATA have bytes,
    those of DATA from `offset` on; an RTS has them if the receiver can read the sender's memory. `credit` is
    what the receiver of the frame may use again, by lane.
    """

    kind: Kind
    lane: Lane = Lane.BULK
    rendezvous_id: int = 0
    envelope: Envelope | None = None
    data: bytes | memoryview = b""
    offset: int = 0
    credit: tuple[int, int] = (0, 0)


class Transmit(NamedTuple):
    """Send a frame from rank `source`, the caller, to rank `peer`, which may be the caller itself."""

    source: int
    peer: int
    frame: Frame


class Fill(NamedTuple):
    """Copy the bytes of a message into the receive that it matched, and end that.

    They may be the sender's memory, which is lent until its request ends: that follows.
    """

    posted: Posted
    envelope: Envelope
    data: bytes | memoryview


class End(NamedTuple):
    """End a request: with an error, or well. `data` are the bytes of a receive without a buffer."""

    request: Request
    envelope: Envelope | None = None
    error: BaseException | None = None
    data: bytearray | None = None


Action: TypeAlias = Transmit | Fill | End


def finish(actions: list[Fill | End]) -> None:
    """Fill and end requests, in order; the caller holds no lock."""
    for action in actions:
        if type(action) is Fill:
            posted, envelope, data = action
            if posted.into is None:
                posted.request.complete(envelope, bytearray(data))
                continue
            if envelope.nbytes:
                into = posted.into if posted.into.format == "B" else posted.into.cast("B")
                into[: envelope.nbytes] = data
            posted.request.complete(envelope)
        elif type(action) is End:
            if action.error is None:
                action.request.complete(action.envelope, action.data)
            else:
                action.request.fail(action.error, action.envelope)
