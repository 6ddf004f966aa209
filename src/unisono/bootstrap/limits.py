"""Every limit of the join port, in one place, and how a stranger's text is shown.

Knows numbers. Does not know who enforces them.
"""

from __future__ import annotations

from typing import Final

from unisono.messaging import strangers

__all__ = ["printable"]

# Before the token is proven: as at the port of a rank.
UNPROVEN_BYTES_MAX: Final = strangers.BYTES_MAX
UNPROVEN_S: Final = strangers.STRANGER_S
PENDING_MAX: Final = strangers.STRANGERS_MAX
PENDING_PER_ADDRESS_MAX: Final = strangers.PER_ADDRESS_MAX
FAILURES_PER_MINUTE_MAX: Final = 20
# How long a wrong word waits for its answer then. Nobody else waits.
FAILURE_DELAY_S: Final = 1.0
FAILURES_HELD_MAX: Final = 64
# For so long after a stranger had to go for another, no TLS handshake is made with who does not show the tag.
CROWDED_S: Final = 1.0
# So many dropped strangers are worth a word in an error.
CROWD_MIN: Final = 20
# Addresses whose failures are remembered; the oldest is forgotten first.
FAILURE_ADDRESSES_MAX: Final = 1024

# After it.
CARD_BYTES_MAX: Final = 16 * 1024
REQUEST_BYTES_MAX: Final = 64 * 1024
REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
REQUEST_S: Final = 10.0
# Processes whose refusal is logged once, however often they ask.
REFUSED_REMEMBERED_MAX: Final = 1024
# First words of workers that are remembered, so that a recorded one is worth nothing.
TAGS_REMEMBERED_MAX: Final = 65536

# A worker sends so much of a stranger's text to a log or an error.
TEXT_MAX: Final = 256
RANKS_MAX: Final = 65536


def printable(text: str, limit: int = TEXT_MAX) -> str:
    """Show text from elsewhere on one line: control and bidirectional characters escaped, cut off."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
