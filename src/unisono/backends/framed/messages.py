"""Messages of a FramedBackend: those that have arrived, and the two sides of a rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.core.envelope import Envelope, Lane
from unisono.core.request import Request
from unisono.errors import UnisonoError
from unisono.messaging.inbox import InboundMessage
from unisono.messaging.matching import Posted

__all__ = ["EagerMessage", "OwnMessage", "Reassembly", "RendezvousSend", "RtsMessage"]


@dataclass(slots=True)
class RendezvousSend:
    """A message whose bytes wait for a CTS. Its RTS may not have been sent yet."""

    rendezvous_id: int
    peer: int
    lane: Lane
    data: memoryview
    request: Request
    envelope: Envelope
    is_rts_sent: bool = False
    has_cts: bool = False

    @property
    def awaits_cts(self) -> bool:
        """Whether a CTS would be valid now."""
        return self.is_rts_sent and not self.has_cts


@dataclass(slots=True)
class Reassembly:
    """A receive that has sent a CTS: its pieces arrive in any order.

    `offsets` are those of the pieces that were announced; `filling` pieces are being written into the memory
    right now, and `filled` bytes are in it. If the RTS was withdrawn meanwhile, the receive is posted again
    (`is_posted`). `is_unwanted`: its user has tried to cancel it.
    """

    posted: Posted
    envelope: Envelope
    memory: memoryview
    data: bytearray | None
    offsets: set[int] = field(default_factory=set)
    filled: int = 0
    filling: int = 0
    is_unwanted: bool = False
    is_posted: bool = False


class EagerMessage(InboundMessage):
    """A message that came with its bytes; `return_credit` gives its credit back to the sender."""

    def __init__(self, data: bytes, return_credit: Callable[[], None]) -> None:
        self._data, self._return_credit = data, return_credit

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Copy the bytes into the receive."""
        self._return_credit()
        posted.request.complete(envelope, _filled(posted, envelope, self._data))

    def refuse(self, error: UnisonoError) -> None:
        """Nothing to do: the send has ended long ago."""

    def is_whole(self) -> bool:
        """Always."""
        return True

    def drop(self) -> None:
        """It will never be received."""
        self._return_credit()


class RtsMessage(InboundMessage):
    """A message whose bytes are still at the sender; `on_match` sends the CTS."""

    def __init__(self, on_match: Callable[[Posted, Envelope], None]) -> None:
        self._on_match = on_match

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Ask for the bytes."""
        self._on_match(posted, envelope)

    def refuse(self, error: UnisonoError) -> None:
        """Nothing to do: the goodbye of this rank ends the send."""


class OwnMessage(InboundMessage):
    """A message of a rank to itself.

    `request` is the sender's, if it waits for the receive; otherwise `return_credit` gives the credit back.
    """

    def __init__(
        self, data: bytes | memoryview, request: Request | None, return_credit: Callable[[], None]
    ) -> None:
        self._data, self.request, self._return_credit = data, request, return_credit

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Copy the bytes into the receive, then end the send: its memory is free by then."""
        if self.request is None:
            self._return_credit()
        data = _filled(posted, envelope, self._data)
        if self.request is not None:
            self.request.complete()
        posted.request.complete(envelope, data)

    def refuse(self, error: UnisonoError) -> None:
        """This rank is closed: end the send."""
        if self.request is not None:
            self.request.fail(error)

    def is_whole(self) -> bool:
        """Whether no send waits for it."""
        return self.request is None

    def drop(self) -> None:
        """It will never be received."""
        self._return_credit()


def _filled(posted: Posted, envelope: Envelope, data: bytes | memoryview) -> bytearray | None:
    """Write the bytes into the buffer of a receive; return them if it has none."""
    if posted.into is None:
        return bytearray(data)
    if envelope.nbytes:
        posted.into.cast("B")[: envelope.nbytes] = data
    return None
