"""Flow control: how much may be sent before it is received, and how long any one message may be.

Every backend takes its limits from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from unisono.config import Config
from unisono.core.envelope import Lane, Tags

__all__ = [
    "CONTROL_BYTES_MAX",
    "ENDED_CONTEXTS_MAX",
    "ENVELOPE_BYTES",
    "OFFERS_MAX",
    "OWN_CREDIT_BYTES",
    "OwnCredit",
    "bytes_max",
    "eager_limits",
]

# What a queued message costs beyond its bytes: an endless stream of empty ones must meet a limit too.
ENVELOPE_BYTES: Final = 64

# So many contexts that were closed here are remembered: what comes for them is late, not early.
ENDED_CONTEXTS_MAX: Final = 1 << 16


# News between ranks and frames of calls are a few lines of text. No longer one is accepted, whoever sends it:
# more than this breaks the protocol, before any memory is taken for it.
CONTROL_BYTES_MAX: Final = 256 * 1024
# Most are much shorter than this, and travel at once; a hundred such may wait.
_CONTROL_EAGER_BYTES: Final = 16 * 1024
_CONTROL_CREDIT_BYTES: Final = 100 * _CONTROL_EAGER_BYTES

# A rank may send itself this much, and always one message of any length, before a receive is posted: a
# blocking send could never wait for its own receive. Beyond, it waits for its receive like any other.
OWN_CREDIT_BYTES: Final = 64 << 20

# Offers of one peer that may wait for their receives: the peer holds further ones back.
OFFERS_MAX: Final = 1 << 16


def eager_limits(config: Config, lane: Lane) -> tuple[int, int]:
    """The longest message that travels before it is asked for, and the bytes of them that may wait.

    Why a rank gives up must arrive although it leaves at once, however little data may travel.
    """
    if lane is Lane.CONTROL:
        return (
            max(config.eager_bytes, _CONTROL_EAGER_BYTES),
            max(config.eager_credit_bytes, _CONTROL_CREDIT_BYTES),
        )
    return config.eager_bytes, config.eager_credit_bytes


def bytes_max(config: Config, tag: int) -> int:
    """The longest message that may come under a tag; what users set for theirs does not bound control."""
    return CONTROL_BYTES_MAX if Tags.is_control(tag) else config.message_bytes_max


class OwnCredit:
    """What a rank has sent itself and not received, in bytes. Whoever uses it holds a lock."""

    def __init__(self, config: Config) -> None:
        self._limit = max(OWN_CREDIT_BYTES, config.eager_credit_bytes)
        self._used = 0

    def take(self, nbytes: int) -> bool:
        """Keep a message; False if it must wait for its receive instead. The first may have any length."""
        cost = nbytes + ENVELOPE_BYTES
        if self._used and self._used + cost > self._limit:
            return False
        self._used += cost
        return True

    def give_back(self, nbytes: int) -> None:
        """A message was received, or never will be."""
        self._used -= nbytes + ENVELOPE_BYTES
