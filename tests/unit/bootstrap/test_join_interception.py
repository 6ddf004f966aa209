"""A man in the middle of a join learns nothing and changes nothing.

The numbers T1 to T16 are those of the threat model in SECURITY.md.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pytest
from tests.support.joining_ranks import (
    PATIENCE_S,
    VERSION,
    MakeSeed,
    connected,
    is_closed_by_seed,
)

from unisono.bootstrap.address import Address
from unisono.bootstrap.identity import Authority
from unisono.bootstrap.join import join
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.bootstrap.tls_stream import server_context
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.errors import RendezvousError

# -- in the middle (T3, T5) --------------------------------------------------------------------------------


class Proxy:
    """A proxy between a rank and the seed, with its own certificate or none, that records all bytes."""

    def __init__(self, target: Address, context: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.raw = bytearray()
        self.plain = bytearray()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with (
                near,
                contextlib.suppress(OSError),
                socket.create_connection((self._target.host, self._target.port)) as far,
            ):
                if self._context is None:
                    self._forward(near, far)
                else:
                    self._intercept(near)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        def back() -> None:
            with contextlib.suppress(OSError):
                while data := far.recv(4096):
                    near.sendall(data)
                near.shutdown(socket.SHUT_WR)

        returning = threading.Thread(target=back)
        returning.start()
        with contextlib.suppress(OSError):
            while data := near.recv(4096):
                self.raw += data
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)
        returning.join()

    def _intercept(self, near: socket.socket) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        assert self._context is not None
        line = self._context.wrap_bio(incoming, outgoing, server_side=True)
        is_open = False
        while data := near.recv(4096):
            self.raw += data
            incoming.write(data)
            with contextlib.suppress(ssl.SSLWantReadError):
                if not is_open:
                    line.do_handshake()
                    is_open = True
                while piece := line.read(4096):
                    self.plain += piece
            near.sendall(outgoing.read())


def test_a_man_in_the_middle_with_its_own_certificate_learns_nothing(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2, tls=True)
    own = Authority("ee" * 16, datetime.datetime.now(datetime.UTC))
    with Proxy(seed.ticket.address, server_context(own.certificate_pem, own.key_pem())) as proxy:
        source = TicketSource(seed.ticket.at(proxy.address).text())
        with pytest.raises(
            RendezvousError, match=r"certificate is not the one in the ticket.*a man in the middle"
        ):
            ranks.start(1, source=source).result(PATIENCE_S)
    assert len(proxy.raw) > 200  # the handshake did take place
    assert proxy.plain == b""
    for secret in (seed.ticket.token, seed.ticket.token.hex().encode(), b"PRIVATE KEY"):
        assert secret not in proxy.raw
    assert seed.counts["proven"] == 0
    assert len(ranks.all()) == 2


def test_a_recorded_join_cannot_be_replayed(make_seed: MakeSeed, tls: bool) -> None:
    seed, ranks = make_seed(2, tls=tls)
    with Proxy(seed.ticket.address) as proxy:
        source = TicketSource(seed.ticket.at(proxy.address).text())
        with pytest.raises(RendezvousError, match="missing: 0"):
            ranks.start(1, source=source, timeout=1.0).result(PATIENCE_S)
    assert seed.counts["admitted"] == 1
    assert seed.ticket.token not in proxy.raw
    with connected(seed) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(proxy.raw)
        assert is_closed_by_seed(sock)
    assert seed.counts["admitted"] == 1
    assert seed.counts["wrong token"] + seed.counts["garbage"] == 1
    assert len(ranks.all()) == 2


def test_a_forwarding_proxy_is_harmless_and_blind(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(1, tls=True)
    with Proxy(seed.ticket.address) as proxy:
        view = ranks.start(0, source=TicketSource(seed.ticket.at(proxy.address).text())).result(PATIENCE_S)
    assert view.size == 1
    assert b"card 0" not in proxy.raw


def test_an_impostor_without_the_token_learns_no_card() -> None:
    """On loopback without TLS: a process that took the port of a seed cannot prove the token (T3)."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        ticket = Ticket.create(Address("127.0.0.1", impostor.getsockname()[1]))
        received = bytearray()

        def pretend() -> None:
            sock, _ = impostor.accept()
            with sock:
                received.extend(sock.recv(40, socket.MSG_WAITALL))
                sock.sendall(b"UNISONO1" + bytes(32))
                received.extend(sock.recv(32, socket.MSG_WAITALL))
                sock.sendall(bytes(33))
                received.extend(sock.recv(1000))

        pretending = pool.submit(pretend)
        with pytest.raises(RendezvousError, match="does not know the token"):
            join(
                TicketSource(ticket.text()),
                rank=0,
                size=2,
                card=b"my card",
                config=Config(),
                version=VERSION,
                deadline=RealRuntime().deadline(PATIENCE_S),
            )
        pretending.result(PATIENCE_S)
    assert len(received) == 72
    assert ticket.token not in received
    assert b"my card" not in received
