"""The byte layout of frames: a head of fixed length, a header, and for an eager message its bytes."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from unisono.config import Config
from unisono.core.envelope import HEADER_BYTES_MAX, UNTYPED, Envelope, Lane
from unisono.errors import ProtocolError
from unisono.messaging.credit import eager_limits

__all__ = ["Head", "Kind", "frame_bytes_max", "head_of", "parse"]


class Kind(IntEnum):
    """What a frame is."""

    EAGER = 1  # a message with its bytes
    RTS = 2  # ready to send: a message's envelope; its bytes wait at the sender
    CTS = 3  # clear to send: a receive has matched the RTS
    DATA = 4  # one piece of the bytes follows as payload
    FIN = 5  # the receiver has all bytes
    RTS_GONE = 6  # the answer to a CTS whose RTS was withdrawn
    WITHDRAW = 7  # the sender withdraws an RTS
    CREDIT = 8  # nothing but the credit that every frame may return
    GOODBYE = 9  # the sender leaves; nothing follows
    GOODBYE_ACK = 10  # the answer to a goodbye; nothing follows from this side either


class Head(NamedTuple):
    """The fixed part of a frame. Credit is what the receiver of the frame may use again, by lane."""

    kind: int
    lane: int = 0
    dtype: int = UNTYPED
    header_bytes: int = 0
    rendezvous_id: int = 0
    context: int = 0
    tag: int = 0
    nbytes: int = 0
    offset: int = 0
    credit_bulk: int = 0
    credit_control: int = 0

    def packed(self) -> bytes:
        """The bytes of the head."""
        return _LAYOUT.pack(*self)


_LAYOUT: Final = struct.Struct("<BBBxHxxQQQQQII")


def head_of(kind: Kind, envelope: Envelope, lane: Lane, rendezvous_id: int = 0) -> Head:
    """The head of a frame that carries an envelope."""
    return Head(
        kind,
        lane,
        envelope.dtype,
        rendezvous_id=rendezvous_id,
        context=envelope.context,
        tag=envelope.tag,
        nbytes=envelope.nbytes,
    )


def parse(frame: memoryview) -> tuple[Head, memoryview]:
    """The head of a frame and what follows it.

    Raises:
        ProtocolError: the frame is shorter than a head.
    """
    if len(frame) < _LAYOUT.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at least {_LAYOUT.size} are needed")
    return Head(*_LAYOUT.unpack_from(frame)), frame[_LAYOUT.size :]


def frame_bytes_max(config: Config) -> int:
    """The length of the longest frame: the longest header and the longest eager message."""
    return _LAYOUT.size + HEADER_BYTES_MAX + max(eager_limits(config, lane)[0] for lane in Lane)
