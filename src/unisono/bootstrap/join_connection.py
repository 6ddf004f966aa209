"""One connection to the join port: socket, stream (plain or TLS), handshake and unsent bytes."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

from unisono.bootstrap.protocol import JoinServer
from unisono.bootstrap.rendezvous import Join
from unisono.bootstrap.tls_stream import Stream

__all__ = ["JoinConnection"]

# The largest piece given to TLS at once: one record.
_PIECE_BYTES: Final = 16 * 1024


class JoinConnection:
    """State of one connection, known to the port and the seed by `key`."""

    def __init__(
        self, key: int, sock: socket.socket, host: str, handshake: JoinServer, expires_at: float
    ) -> None:
        self.key = key
        self.sock = sock
        self.host = host
        self.handshake = handshake
        self.stream: Stream | None = None  # made for the first byte: idle strangers do not cost one
        self.expires_at: float | None = expires_at
        self.events = 0  # what the selector watches
        self.bytes_in = 0
        self.is_known = False  # it has shown a worker's tag or proven the token
        self.was_proven = False
        self.proven_at = 0.0
        self.answer = b""  # to a failed handshake, sent when `expires_at` has come
        self.is_ending = False
        self.is_shut = False  # nothing more is sent
        self.join: Join | None = None  # set by the seed when it admits a rank
        self.certificate_pem = b""
        self._plain: deque[memoryview] = deque()
        self._raw = b""

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._raw or self._plain)

    def send_plain(self, data: bytes) -> None:
        """Queue bytes."""
        self._plain.append(memoryview(data))

    def send_frame(self, body: bytes) -> None:
        """Queue a frame. The body is not copied: that of a view is shared by all connections."""
        assert self.handshake.frames is not None
        self.send_plain(self.handshake.frames.seal(body))
        self.send_plain(body)

    def flush(self) -> None:
        """Send what the socket takes."""
        while self.stream is not None:
            if not self._raw:
                self._raw = self.stream.to_send()
            if not self._raw:
                if not self._plain or not self.stream.is_open:
                    return
                piece = self._plain.popleft()
                if len(piece) > _PIECE_BYTES:
                    self._plain.appendleft(piece[_PIECE_BYTES:])
                    piece = piece[:_PIECE_BYTES]
                self.stream.send(piece)
                continue
            try:
                sent = self.sock.send(self._raw)
            except BlockingIOError:
                return
            self._raw = self._raw[sent:]
