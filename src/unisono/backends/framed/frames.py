"""The byte layout of frames: a head of fixed length, a header, and for an eager message its bytes."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from unisono.config import Config
from unisono.core.envelope import HEADER_BYTES_MAX, UNTYPED, Envelope, Lane, Tags
from unisono.errors import ProtocolError
from unisono.messaging.actions import Frame, Kind
from unisono.messaging.credit import bytes_max, eager_limits

__all__ = ["Head", "Kind", "frame_bytes_max", "packed", "parse", "unpacked"]


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


def packed(frame: Frame) -> bytes:
    """A frame of the protocol as bytes; those of DATA follow as payload."""
    bulk, control = frame.credit
    if frame.kind is Kind.EAGER or frame.kind is Kind.RTS:
        about = frame.envelope
        assert about is not None
        head = Head(
            frame.kind,
            frame.lane,
            about.dtype,
            len(about.header),
            frame.rendezvous_id,
            about.context,
            about.tag,
            about.nbytes,
            credit_bulk=bulk,
            credit_control=control,
        )
        return b"".join((head.packed(), about.header, frame.data))
    return Head(
        frame.kind,
        frame.lane,
        rendezvous_id=frame.rendezvous_id,
        nbytes=len(frame.data),
        offset=frame.offset,
        credit_bulk=bulk,
        credit_control=control,
    ).packed()


def unpacked(peer: int, head: Head, body: memoryview, config: Config) -> Frame:
    """The frame of a peer.

    Raises:
        ProtocolError: the frame is invalid.
    """
    if head.lane not in tuple(Lane) or head.kind not in tuple(Kind):
        raise ProtocolError(f"a frame of unknown kind {head.kind} or lane {head.lane}")
    kind, lane, credit = Kind(head.kind), Lane(head.lane), (head.credit_bulk, head.credit_control)
    if kind is not Kind.EAGER and kind is not Kind.RTS:
        return Frame(kind, lane, head.rendezvous_id, None, b"", head.offset, credit)
    expected = head.header_bytes + (head.nbytes if kind is Kind.EAGER else 0)
    if len(body) != expected or head.header_bytes > HEADER_BYTES_MAX:
        raise ProtocolError(f"a message of {head.nbytes} bytes in a frame of {len(body)}")
    if head.nbytes > (limit := bytes_max(config, head.tag)):
        name = "control_bytes_max" if Tags.is_control(head.tag) else "message_bytes_max"
        raise ProtocolError(f"a message of {head.nbytes} bytes exceeds {name} ({limit})")
    header = bytes(body[: head.header_bytes])
    data: bytes | memoryview = body[head.header_bytes :] if kind is Kind.EAGER else b""
    envelope = Envelope(peer, head.context, head.tag, head.nbytes, head.dtype, header)
    return Frame(kind, lane, head.rendezvous_id, envelope, data, 0, credit)


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
