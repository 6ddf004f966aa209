"""Every limit of the join port, and how text from a stranger is shown.

A stranger is a connection that has not proven the token.
"""

from __future__ import annotations

from typing import Final

__all__ = ["printable"]

# Before the token is proven: a TLS client hello with a post-quantum share has 1.8 KiB, our handshake 72
# bytes.
UNPROVEN_BYTES_MAX: Final = 4096
UNPROVEN_S: Final = 5.0
PENDING_MAX: Final = 256
# A host with more ranks than this loses some connections of a burst; they are retried 50 ms later.
PENDING_PER_ADDRESS_MAX: Final = 128
FAILURES_PER_MINUTE_MAX: Final = 20
# From an address that fails more often, a failed handshake is answered this late. No other address waits.
FAILURE_DELAY_S: Final = 1.0
FAILURES_HELD_MAX: Final = 64
# How long after an eviction TLS handshakes are made only with connections that show a worker's tag.
CROWDED_S: Final = 1.0
# From this many dropped strangers on, errors and the log name the crowd.
CROWD_MIN: Final = 20
# Addresses whose failures are remembered; the oldest is forgotten first.
FAILURE_ADDRESSES_MAX: Final = 1024

# After the token is proven.
CARD_BYTES_MAX: Final = 16 * 1024
REQUEST_BYTES_MAX: Final = 64 * 1024
REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
REQUEST_S: Final = 10.0
# Processes whose refusal is logged once, however often they ask.
REFUSED_REMEMBERED_MAX: Final = 1024
# Nonces of workers that are remembered, so that a replayed one is worth nothing.
TAGS_REMEMBERED_MAX: Final = 65536

# Characters of text from another process that a log or an error shows.
TEXT_MAX: Final = 256
RANKS_MAX: Final = 65536


def printable(text: str, limit: int = TEXT_MAX) -> str:
    """Text from another process on one line: control and bidirectional characters escaped, cut off."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
