"""The end of a peer, as a backend reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unisono.errors import PeerLost, ProtocolError, lost_text

__all__ = ["BROKEN", "PeerDown"]

# How the cause of a PeerDown begins if the peer sent damaged or malformed bytes.
BROKEN: Final = "broke the protocol"


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A backend's verdict that a rank is gone for good: nothing will come from it any more.

    `left` is True if the rank closed its backend, False if it died or was declared dead.
    """

    rank: int
    cause: str
    left: bool = False

    def error(self) -> PeerLost:
        """The error of a request that needs this rank; its `__cause__` is a ProtocolError if that is why."""
        lost = PeerLost(lost_text((self.rank,), self.cause), ranks=(self.rank,), cause=self.cause)
        if self.cause.startswith(BROKEN):
            lost.__cause__ = ProtocolError(f"rank {self.rank} {self.cause}")
        return lost
