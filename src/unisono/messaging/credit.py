"""Flow control: how much may be sent before it is received, and how long any one message may be.

Every backend takes its limits from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from unisono.config import Config
from unisono.core.envelope import Lane, Tags
from unisono.errors import ProtocolError

__all__ = [
    "CONTROL_BYTES_MAX",
    "CONTROL_EAGER_BYTES",
    "ENDED_CONTEXTS_MAX",
    "ENVELOPE_BYTES",
    "OWN_CREDIT_BYTES",
    "RTS_MAX",
    "Credit",
    "OwnCredit",
    "bytes_max",
    "eager_limits",
]

# What a queued message costs beyond its payload, so that empty messages use up credit, too.
ENVELOPE_BYTES: Final = 64

# Closed contexts that are remembered: a message for one of them is late, and dropped. Any other unknown
# context may still be made here, and its messages are kept.
ENDED_CONTEXTS_MAX: Final = 1 << 16


# A control message is a few lines of text, and an RPC frame at most 16 KiB (native/python/rpc_frame.cpp). A
# longer one is a protocol error, found before any memory is allocated for it.
CONTROL_BYTES_MAX: Final = 256 * 1024
# Eager limit and credit of the control lane: most control messages are much shorter, and 100 of them may
# wait. Every link of the engine has room for it (_native.CONTROL_EAGER_BYTES_SHM, _SOCKET; a test compares).
CONTROL_EAGER_BYTES: Final = 16 * 1024
_CONTROL_CREDIT_BYTES: Final = 100 * CONTROL_EAGER_BYTES

# What a rank may send to itself before it posts a receive: a blocking send cannot wait for a receive that the
# same thread posts later. One message of any length is always allowed. Beyond this a send waits as any other.
OWN_CREDIT_BYTES: Final = 64 << 20

# Rendezvous envelopes (RTS) of one peer that may wait for their receives; the peer holds back further ones.
RTS_MAX: Final = 1 << 16


def eager_limits(config: Config, lane: Lane) -> tuple[int, int]:
    """The eager limit of a lane, and the credit: eager bytes that may wait at a peer for their receives.

    The control lane has a minimum, whatever the user set: a rank that aborts and leaves at once sends its
    reason as one eager message, which needs nothing from the receiver.
    """
    if lane is Lane.CONTROL:
        return (
            max(config.eager_bytes, CONTROL_EAGER_BYTES),
            max(config.eager_credit_bytes, _CONTROL_CREDIT_BYTES),
        )
    return config.eager_bytes, config.eager_credit_bytes


def bytes_max(config: Config, tag: int) -> int:
    """The longest message with this tag; the user's limit does not apply to control messages."""
    return CONTROL_BYTES_MAX if Tags.is_control(tag) else config.message_bytes_max


class Credit:
    """The credit between this rank and one peer on one lane, in both directions. The caller holds a lock.

    `used` is ours at the peer. `held` are the bytes of the peer's eager messages that wait here, and `owed`
    is what the peer may use again but has not been told yet.
    """

    __slots__ = ("eager_bytes", "held", "limit", "owed", "used")

    def __init__(self, eager_bytes: int, limit: int) -> None:
        self.eager_bytes = eager_bytes
        self.limit = limit
        self.used = self.held = self.owed = 0

    def take(self, nbytes: int) -> bool:
        """Use credit for a message to the peer; False if it must wait for its receive."""
        cost = nbytes + ENVELOPE_BYTES
        if nbytes > self.eager_bytes or self.used + cost > self.limit:
            return False
        self.used += cost
        return True

    def regain(self, returned: int) -> None:
        """The peer returns credit.

        Raises:
            ProtocolError: it returned more than was used.
        """
        if returned > self.used:
            raise ProtocolError("it returned more credit than was used")
        self.used -= returned

    def hold(self, nbytes: int) -> None:
        """Count an eager message of the peer against its credit, which a correct peer never exceeds.

        Raises:
            ProtocolError: the peer exceeds its credit.
        """
        self.held += nbytes + ENVELOPE_BYTES
        if nbytes > self.eager_bytes or self.held > self.limit:
            raise ProtocolError(f"it sent {self.held} bytes of eager messages; its credit is {self.limit}")

    def release(self, nbytes: int) -> bool:
        """An eager message of the peer was received or dropped; True if its credit must be returned now.

        Every frame returns what is owed. Without a frame to send, a quarter of the limit may wait for one.
        """
        self.held -= nbytes + ENVELOPE_BYTES
        self.owed += nbytes + ENVELOPE_BYTES
        return self.owed * 4 >= self.limit


class OwnCredit(Credit):
    """The credit of a rank at itself, in all lanes. The first message may have any length."""

    __slots__ = ()

    def __init__(self, config: Config) -> None:
        super().__init__(0, max(OWN_CREDIT_BYTES, config.eager_credit_bytes))

    def take(self, nbytes: int) -> bool:
        """Use credit for a message; False if it must wait for its receive."""
        cost = nbytes + ENVELOPE_BYTES
        if self.used and self.used + cost > self.limit:
            return False
        self.used += cost
        return True

    def hold(self, nbytes: int) -> None:
        """Count a message: this rank trusts itself."""
        self.held += nbytes + ENVELOPE_BYTES

    def release(self, nbytes: int) -> bool:
        """A message was received or dropped: a blocking send that follows must not wait for its credit."""
        super().release(nbytes)
        return True
