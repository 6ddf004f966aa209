"""A peer in Python that knows the secret and the handshake, and sends the bytes that a test gives it."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Iterator
from typing import Any, Self

from unisono.backends.native.card import Card, Credentials

__all__ = ["BULK", "CONTROL", "HEAD", "HELLO", "Member", "connected", "context", "exactly", "greet", "hello"]

ALPN = "unisono-link/2"
BULK, CONTROL = 0, 1
# native/connect/handshake.hpp: magic, version, size, from, to, medium, lane, checksum, eager credit, nonce
HELLO = struct.Struct("<8sIIIIBBB5xQ32s")
# frame.hpp: kind and flags, dtype, core, header bytes, context, tag, bytes
HEAD = struct.Struct("<IBBHQQQ")
_PROBE = bytes(24)
_CREDIT_BYTES = 256 * 1024


def hello(rank: int, to: int, size: int, lane: int, **other: Any) -> bytes:
    """The first message of the side that opens the connection."""
    fields = {"magic": b"unisono\n", "version": 2, "medium": 1, "checksum": 0, **other}
    return HELLO.pack(
        fields["magic"],
        fields["version"],
        size,
        rank,
        to,
        fields["medium"],
        lane,
        fields["checksum"],
        _CREDIT_BYTES,
        os.urandom(32),
    )


def exactly(sock: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer if the other side closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while len(data) < count and (piece := sock.recv(count - len(data))):
            data += piece
    return data


def greet(sock: socket.socket, secret: bytes, said: bytes) -> int | None:
    """Prove the secret; returns the reply (0: admitted), or None if the connection was closed."""
    sock.sendall(said)
    challenge = exactly(sock, 64)
    if len(challenge) < 64:
        return None
    nonce, proof = challenge[:32], challenge[32:]
    assert hmac.compare_digest(proof, hmac.digest(secret, b"acceptor" + said + nonce, "sha256"))
    sock.sendall(hmac.digest(secret, b"opener" + said + nonce, "sha256") + _PROBE)
    reply = exactly(sock, 32)
    return struct.unpack("<I", reply[:4])[0] if len(reply) == 32 else None


def context(shown: Credentials | None, *, is_server: bool = False) -> ssl.SSLContext:
    """The TLS settings of a rank, but without verification of the peer's certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.set_alpn_protocols([ALPN])
    if shown is not None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(shown.key_pem + shown.certificate_pem)
            file.flush()
            made.load_cert_chain(file.name)
    return made


class Member:
    """Both connections of a link without TLS, from `rank` to the engine that a card names."""

    def __init__(self, card: Card, secret: bytes, rank: int, to: int, size: int) -> None:
        self.lanes: dict[int, socket.socket] = {}
        for lane in (CONTROL, BULK):
            sock = socket.create_connection((card.address, card.port), timeout=30)
            self.lanes[lane] = sock
            assert greet(sock, secret, hello(rank, to, size, lane)) == 0

    def send(self, data: bytes, lane: int = BULK) -> None:
        """Send any bytes; a closed connection is not an error."""
        with contextlib.suppress(ConnectionError):
            self.lanes[lane].sendall(data)

    def is_dropped(self, lane: int = BULK) -> bool:
        """Wait until the other side closes the connection; False if it still sends after 100 reads."""
        with contextlib.suppress(ConnectionError):
            return any(not self.lanes[lane].recv(1 << 16) for _ in range(100))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self.lanes.values():
            sock.close()


@contextlib.contextmanager
def connected(card: Card) -> Iterator[socket.socket]:
    """A connection to an engine's port."""
    with socket.create_connection((card.address, card.port), timeout=30) as sock:
        yield sock
