"""Between the bytes of a socket and the join protocol: TLS 1.3, or nothing.

TLS runs in memory, without a socket. Certificate and key are loaded from memory: no key is written to a disk.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Final, Protocol

from unisono.bootstrap.protocol import ALPN
from unisono.errors import ProtocolError

__all__ = ["PlainStream", "Stream", "TlsStream", "client_context", "server_context"]

_PIECE_BYTES: Final = 16 * 1024
# The attribute of a TLS object that keeps the server name (SNI) of its client hello.
_NAME: Final = "server_name_sent"


class Stream(Protocol):
    """Bytes of a socket in, plain bytes out; and back."""

    @property
    def name(self) -> str:
        """The server name (SNI) in the client hello; empty without TLS."""

    @property
    def is_open(self) -> bool:
        """Whether plain bytes can be sent."""

    def receive(self, raw: bytes) -> bytes:
        """Take bytes from the socket; the plain bytes in them."""

    def send(self, plain: bytes | memoryview) -> None:
        """Take plain bytes to be sent. Only while `is_open`."""

    def to_send(self) -> bytes:
        """The bytes that the socket must send now."""


class PlainStream:
    """No encryption: on loopback, or with insecure=True."""

    is_open = True
    name = ""

    def __init__(self) -> None:
        self._out = bytearray()

    def receive(self, raw: bytes) -> bytes:
        """The same bytes."""
        return raw

    def send(self, plain: bytes | memoryview) -> None:
        """The same bytes."""
        self._out += plain

    def to_send(self) -> bytes:
        """The same bytes."""
        out = bytes(self._out)
        self._out.clear()
        return out


class TlsStream:
    """One TLS connection, on the server's side."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_open = False

    @property
    def name(self) -> str:
        """The server name (SNI) in the client hello; empty before it has come."""
        return str(vars(self._tls).get(_NAME, ""))

    def receive(self, raw: bytes) -> bytes:
        """Decrypt.

        Raises:
            ProtocolError: it is not TLS 1.3 with our protocol inside.
        """
        self._incoming.write(raw)
        try:
            if not self.is_open:
                self._tls.do_handshake()
                if self._tls.selected_alpn_protocol() != ALPN:
                    raise ProtocolError("it speaks TLS, but not the join protocol inside")
                self.is_open = True
            plain = b""
            while True:
                piece = self._tls.read(_PIECE_BYTES)
                if not piece:
                    return plain
                plain += piece
        except ssl.SSLWantReadError:
            return plain if self.is_open else b""
        except ssl.SSLError as error:
            raise ProtocolError("it does not speak TLS 1.3", cause=error.reason or "") from None

    def send(self, plain: bytes | memoryview) -> None:
        """Encrypt."""
        self._tls.write(plain)

    def to_send(self) -> bytes:
        """The records that are ready."""
        return self._outgoing.read()


def server_context(
    certificate_pem: bytes, key_pem: bytes, is_served: Callable[[str], bool] = lambda name: True
) -> ssl.SSLContext:
    """TLS 1.3 only, our protocol only, no resumption.

    `is_served` gets the server name of a client hello, before anything is computed for it; False refuses it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.num_tickets = 0

    def on_client_hello(
        tls: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext
    ) -> int | None:
        vars(tls)[_NAME] = name or ""
        return None if is_served(name or "") else int(ssl.ALERT_DESCRIPTION_ACCESS_DENIED)

    context.sni_callback = on_client_hello
    descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, key_pem + certificate_pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def client_context() -> ssl.SSLContext:
    """TLS 1.3 only. The caller must compare the certificate's hash before it sends anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    # No chain and no name to check: the ticket pins the one right certificate.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
