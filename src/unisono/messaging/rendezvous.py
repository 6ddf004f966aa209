"""The two sides of a rendezvous: states, events, actions and the tables between them.

The sender announces a message by an RTS; a receive that matches it answers CTS; the bytes follow as DATA, in
pieces; the receiver confirms them by FIN. A short message is copied at the CTS, so that its send ends without
a further way to the receiver and back. A receiver that can read the sender's memory needs no CTS and no
states: it queues the message like an eager one, copies the bytes and sends the FIN. Other bytes lie in the
users' memory at both ends.

docs/machines.md draws the tables. A pair of state and event that is missing is impossible, unless a peer
breaks the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Final, TypeAlias

from unisono.core.envelope import Envelope, Lane
from unisono.core.request import Request
from unisono.errors import ProtocolError
from unisono.messaging.matching import Posted, UnexpectedMessage

__all__ = [
    "RECEIVE_TABLE",
    "SEND_TABLE",
    "ReceiveAction",
    "ReceiveEvent",
    "ReceiveState",
    "RendezvousReceive",
    "RendezvousSend",
    "SendAction",
    "SendEvent",
    "SendState",
]


class SendState(IntEnum):
    """Where a send by rendezvous is."""

    HELD = auto()  # the RTS is not sent: the peer holds RTS_MAX of them
    OFFERED = auto()  # the RTS is sent
    LENT = auto()  # the RTS is sent, and the receiver may read the bytes
    SENDING = auto()  # a receive has matched: the bytes are on their way
    COPIED = auto()  # the same, but a copy travels, and the request has ended
    OVER = auto()


class SendEvent(IntEnum):
    """What happens to a send by rendezvous."""

    ROOM = auto()  # the peer may hold one more RTS
    LEND = auto()  # the same, if the peer can read this rank's memory
    CTS = auto()
    CTS_SHORT = auto()  # the same, for a message that is short enough to be copied
    FIN = auto()
    CANCEL = auto()  # its user withdraws it
    PEER_DOWN = auto()
    CLOSE = auto()  # this rank leaves: what was matched may still be sent
    CUT = auto()  # the time for that is over


class SendAction(IntEnum):
    """What a transition of a send asks for."""

    NONE = auto()
    SEND_RTS = auto()
    SEND_DATA = auto()
    SEND_COPY = auto()  # and complete: the user's memory is free
    SEND_WITHDRAW = auto()  # and end the request as withdrawn
    REVOKE = auto()  # send WITHDRAW, and fail: the memory is lent no more
    END_WITHDRAWN = auto()
    COMPLETE = auto()
    FAIL = auto()


SendRow: TypeAlias = tuple[SendState, SendAction]

SEND_TABLE: Final[dict[tuple[SendState, SendEvent], SendRow]] = {
    (SendState.HELD, SendEvent.ROOM): (SendState.OFFERED, SendAction.SEND_RTS),
    (SendState.HELD, SendEvent.LEND): (SendState.LENT, SendAction.SEND_RTS),
    (SendState.HELD, SendEvent.CANCEL): (SendState.OVER, SendAction.END_WITHDRAWN),
    (SendState.HELD, SendEvent.PEER_DOWN): (SendState.OVER, SendAction.FAIL),
    (SendState.HELD, SendEvent.CLOSE): (SendState.OVER, SendAction.FAIL),
    (SendState.OFFERED, SendEvent.CTS): (SendState.SENDING, SendAction.SEND_DATA),
    (SendState.OFFERED, SendEvent.CTS_SHORT): (SendState.COPIED, SendAction.SEND_COPY),
    (SendState.OFFERED, SendEvent.CANCEL): (SendState.OVER, SendAction.SEND_WITHDRAW),
    (SendState.OFFERED, SendEvent.PEER_DOWN): (SendState.OVER, SendAction.FAIL),
    (SendState.OFFERED, SendEvent.CLOSE): (SendState.OVER, SendAction.FAIL),
    (SendState.LENT, SendEvent.FIN): (SendState.OVER, SendAction.COMPLETE),
    (SendState.LENT, SendEvent.CANCEL): (SendState.OVER, SendAction.SEND_WITHDRAW),
    (SendState.LENT, SendEvent.PEER_DOWN): (SendState.OVER, SendAction.FAIL),
    (SendState.LENT, SendEvent.CLOSE): (SendState.OVER, SendAction.REVOKE),
    (SendState.SENDING, SendEvent.FIN): (SendState.OVER, SendAction.COMPLETE),
    (SendState.SENDING, SendEvent.CANCEL): (SendState.SENDING, SendAction.NONE),
    (SendState.SENDING, SendEvent.PEER_DOWN): (SendState.OVER, SendAction.FAIL),
    (SendState.SENDING, SendEvent.CLOSE): (SendState.SENDING, SendAction.NONE),
    (SendState.SENDING, SendEvent.CUT): (SendState.OVER, SendAction.FAIL),
    (SendState.COPIED, SendEvent.FIN): (SendState.OVER, SendAction.NONE),
    (SendState.COPIED, SendEvent.CANCEL): (SendState.COPIED, SendAction.NONE),
    (SendState.COPIED, SendEvent.PEER_DOWN): (SendState.OVER, SendAction.NONE),
    (SendState.COPIED, SendEvent.CLOSE): (SendState.COPIED, SendAction.NONE),
    (SendState.COPIED, SendEvent.CUT): (SendState.OVER, SendAction.NONE),
}


class ReceiveState(IntEnum):
    """Where the receiving side of a rendezvous is."""

    QUEUED = auto()  # the RTS waits in the unexpected-message queue
    READING = auto()  # the CTS is sent: pieces arrive
    CANCELLING = auto()  # as READING, but its user wants it no more
    CLOSING = auto()  # this rank leaves while a piece is being written into the user's memory
    OVER = auto()


class ReceiveEvent(IntEnum):
    """What happens to the receiving side of a rendezvous."""

    MATCH = auto()
    LAST_PIECE = auto()
    CANCEL = auto()
    WITHDRAW = auto()  # crosses the CTS if a receive has matched: RTS_GONE will follow
    RTS_GONE = auto()
    PEER_DOWN = auto()
    CLOSE = auto()
    IDLE = auto()  # no piece is being written, and more are missing
    CUT = auto()


class ReceiveAction(IntEnum):
    """What a transition of the receiving side asks for."""

    NONE = auto()
    SEND_CTS = auto()
    SEND_FIN = auto()  # and complete the receive
    DROP = auto()
    REPOST = auto()  # to its old place in the order
    END_WITHDRAWN = auto()
    FAIL = auto()


ReceiveRow: TypeAlias = tuple[ReceiveState, ReceiveAction]

RECEIVE_TABLE: Final[dict[tuple[ReceiveState, ReceiveEvent], ReceiveRow]] = {
    (ReceiveState.QUEUED, ReceiveEvent.MATCH): (ReceiveState.READING, ReceiveAction.SEND_CTS),
    (ReceiveState.QUEUED, ReceiveEvent.WITHDRAW): (ReceiveState.OVER, ReceiveAction.DROP),
    (ReceiveState.QUEUED, ReceiveEvent.PEER_DOWN): (ReceiveState.OVER, ReceiveAction.DROP),
    (ReceiveState.QUEUED, ReceiveEvent.CLOSE): (ReceiveState.OVER, ReceiveAction.DROP),
    (ReceiveState.READING, ReceiveEvent.LAST_PIECE): (ReceiveState.OVER, ReceiveAction.SEND_FIN),
    (ReceiveState.READING, ReceiveEvent.CANCEL): (ReceiveState.CANCELLING, ReceiveAction.NONE),
    (ReceiveState.READING, ReceiveEvent.WITHDRAW): (ReceiveState.READING, ReceiveAction.NONE),
    (ReceiveState.READING, ReceiveEvent.RTS_GONE): (ReceiveState.OVER, ReceiveAction.REPOST),
    (ReceiveState.READING, ReceiveEvent.PEER_DOWN): (ReceiveState.OVER, ReceiveAction.FAIL),
    (ReceiveState.READING, ReceiveEvent.CLOSE): (ReceiveState.CLOSING, ReceiveAction.NONE),
    (ReceiveState.CANCELLING, ReceiveEvent.LAST_PIECE): (ReceiveState.OVER, ReceiveAction.SEND_FIN),
    (ReceiveState.CANCELLING, ReceiveEvent.CANCEL): (ReceiveState.CANCELLING, ReceiveAction.NONE),
    (ReceiveState.CANCELLING, ReceiveEvent.WITHDRAW): (ReceiveState.CANCELLING, ReceiveAction.NONE),
    (ReceiveState.CANCELLING, ReceiveEvent.RTS_GONE): (ReceiveState.OVER, ReceiveAction.END_WITHDRAWN),
    (ReceiveState.CANCELLING, ReceiveEvent.PEER_DOWN): (ReceiveState.OVER, ReceiveAction.FAIL),
    (ReceiveState.CANCELLING, ReceiveEvent.CLOSE): (ReceiveState.CLOSING, ReceiveAction.NONE),
    (ReceiveState.CLOSING, ReceiveEvent.LAST_PIECE): (ReceiveState.OVER, ReceiveAction.SEND_FIN),
    (ReceiveState.CLOSING, ReceiveEvent.CANCEL): (ReceiveState.CLOSING, ReceiveAction.NONE),
    (ReceiveState.CLOSING, ReceiveEvent.PEER_DOWN): (ReceiveState.OVER, ReceiveAction.FAIL),
    (ReceiveState.CLOSING, ReceiveEvent.IDLE): (ReceiveState.OVER, ReceiveAction.FAIL),
    (ReceiveState.CLOSING, ReceiveEvent.CUT): (ReceiveState.OVER, ReceiveAction.FAIL),
}


@dataclass(slots=True, eq=False)
class RendezvousSend:
    """The sending side: a message whose bytes wait for a CTS."""

    rendezvous_id: int
    peer: int
    lane: Lane
    data: memoryview
    request: Request
    envelope: Envelope
    state: SendState = SendState.HELD

    def step(self, event: SendEvent) -> SendAction:
        """Make a transition.

        Raises:
            ProtocolError: the event, which the peer caused, is impossible now.
        """
        row = SEND_TABLE.get((self.state, event))
        if row is None:
            raise ProtocolError(f"a {event.name} for a message that is {self.state.name.lower()}")
        self.state, action = row
        return action


@dataclass(slots=True, eq=False)
class RendezvousReceive:
    """The receiving side. Once it is matched, `memory` is that of the receive: pieces arrive in any order.

    `queued` is its place in the unexpected-message queue, if it had to wait there. `offsets` are those of the
    pieces that were announced; `filling` pieces are being written into the memory right now, and `filled`
    bytes are in it. `data` is the memory of a receive without a buffer.
    """

    rendezvous_id: int
    peer: int
    lane: Lane
    envelope: Envelope
    state: ReceiveState = ReceiveState.QUEUED
    queued: UnexpectedMessage[Any] | None = None
    posted: Posted | None = None
    memory: memoryview | None = None
    data: bytearray | None = None
    offsets: set[int] | None = None
    filled: int = 0
    filling: int = 0

    def step(self, event: ReceiveEvent) -> ReceiveAction:
        """Make a transition.

        Raises:
            ProtocolError: the event, which the peer caused, is impossible now.
        """
        row = RECEIVE_TABLE.get((self.state, event))
        if row is None or (event is ReceiveEvent.RTS_GONE and self.offsets):
            raise ProtocolError(f"a {event.name} for a message that is {self.state.name.lower()}")
        self.state, action = row
        return action

    def match(self, posted: Posted) -> None:
        """Take the memory of the receive that has matched."""
        self.posted = posted
        nbytes = self.envelope.nbytes
        if posted.into is None:
            self.data = bytearray(nbytes)
            self.memory = memoryview(self.data)
        else:
            into = posted.into if posted.into.format == "B" or not nbytes else posted.into.cast("B")
            self.memory = into if into.nbytes == nbytes else into[:nbytes]

    def announce(self, offset: int, nbytes: int, piece_bytes: int) -> memoryview:
        """A piece arrives: the memory for it.

        Raises:
            ProtocolError: there is no such piece, or it has come before.
        """
        expected = min(piece_bytes, self.envelope.nbytes - offset)
        if self.offsets is None:
            self.offsets = set()
        if self.memory is None or offset % piece_bytes or nbytes != expected or offset in self.offsets:
            raise ProtocolError(f"a wrong or repeated piece of {nbytes} bytes at {offset}")
        self.offsets.add(offset)
        self.filling += 1
        return self.memory[offset : offset + nbytes] if nbytes else self.memory[:0]

    def is_last(self, nbytes: int) -> bool:
        """A piece is in its memory; True if it was the last that was missing."""
        self.filling -= 1
        self.filled += nbytes
        return self.filled == self.envelope.nbytes
