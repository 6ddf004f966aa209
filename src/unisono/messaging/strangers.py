"""Limits on a stranger: a connection that has not proven yet that it belongs to the job.

The join port (bootstrap/) and every rank's port (the native engine) take their numbers from here.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BYTES_MAX", "PER_ADDRESS_MAX", "STRANGERS_MAX", "STRANGER_S"]

# Bytes that a stranger may send. A TLS client hello with a post-quantum share has 1.8 KiB, the messages of
# our own handshakes less than 0.3 KiB.
BYTES_MAX: Final = 4096
# Seconds to prove itself: several round trips and a TLS handshake on a busy machine.
STRANGER_S: Final = 5.0
# Connections of strangers held at a time, in all and of one address (IPv6: one /64 network). A host with more
# ranks than this loses some connections of a burst; they come again 50 ms later.
STRANGERS_MAX: Final = 256
PER_ADDRESS_MAX: Final = 128
