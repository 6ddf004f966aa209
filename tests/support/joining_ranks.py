"""A seed with real sockets, ranks that join it on threads, and unauthenticated clients of its protocol."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from unisono.bootstrap import protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.entry import Entry, ListenSpec, enter
from unisono.bootstrap.join import View, join
from unisono.bootstrap.launch_info import LaunchInfo
from unisono.bootstrap.protocol import Frames, JoinClient
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.config import Config
from unisono.core.clock import RealRuntime

__all__ = [
    "PATIENCE_S",
    "VERSION",
    "MakeSeed",
    "Ranks",
    "a_request",
    "authenticated",
    "connected",
    "enter_by",
    "first_reply",
    "is_closed_by_seed",
    "join_alone",
    "make_seed",
    "ticket_without_seed",
    "tls",
    "with_tls",
]

PATIENCE_S = 30.0
VERSION = "1.0"


class Ranks:
    """Ranks that join on threads, one thread per rank."""

    def __init__(self, ticket: Ticket, size: int) -> None:
        self._source = TicketSource(ticket.text())
        self._size = size
        self._pool = ThreadPoolExecutor(2 * size + 4, thread_name_prefix="rank")

    def start(self, rank: int, **changes: Any) -> Future[View]:
        timeout = changes.pop("timeout", PATIENCE_S)
        given: dict[str, Any] = {
            "rank": rank,
            "size": self._size,
            "card": b"card %d" % rank,
            "config": Config(),
            "version": VERSION,
            "deadline": RealRuntime().deadline(timeout),
            **changes,
        }
        return self._pool.submit(join, given.pop("source", self._source), **given)

    def all(self) -> list[View]:
        return [future.result(PATIENCE_S) for future in [self.start(rank) for rank in range(self._size)]]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


MakeSeed = Callable[..., tuple[Seed, Ranks]]


@pytest.fixture
def make_seed() -> Iterator[MakeSeed]:
    with contextlib.ExitStack() as stack:

        def make(size: int, **options: Any) -> tuple[Seed, Ranks]:
            seed = Seed(size, version=VERSION, **options)
            ranks = Ranks(seed.ticket, size)
            stack.callback(ranks.close)
            stack.enter_context(seed)
            return seed, ranks

        yield make


def connected(seed: Seed) -> socket.socket:
    sock = socket.create_connection((seed.ticket.address.host, seed.ticket.address.port), PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


def is_closed_by_seed(sock: socket.socket) -> bool:
    """Wait until the seed closes the connection; everything received before that is discarded."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def with_tls(sock: socket.socket, **options: Any) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if "maximum" in options:
        context.maximum_version = options["maximum"]
    if "alpn" in options:
        context.set_alpn_protocols([options["alpn"]])
    return context.wrap_socket(sock)


def authenticated(seed: Seed) -> tuple[socket.socket, Frames]:
    """A connection that has proven that it knows the token, and has sent no request yet."""
    sock = connected(seed)
    if not seed.ticket.is_plain:
        sock = with_tls(sock, alpn=protocol.ALPN)
    client = JoinClient(seed.ticket.token, seed.ticket.ca_fingerprint or bytes(32), secrets.token_bytes(32))
    sock.sendall(client.hello())
    sock.sendall(client.proof(sock.recv(client.greeting_bytes, socket.MSG_WAITALL * seed.ticket.is_plain)))
    return sock, client.frames(sock.recv(client.answer_bytes))


def first_reply(sock: socket.socket, frames: Frames) -> protocol.Reply:
    """Wait for the seed's first reply."""
    bodies: list[bytes] = []
    while not bodies:
        data = sock.recv(4096)
        assert data
        bodies = frames.receive(data)
    return protocol.parse_reply(bodies[0])


def a_request(**changes: Any) -> protocol.Request:
    given: dict[str, Any] = {
        "rank": 0,
        "size": 2,
        "version": VERSION,
        "config_digest": Config().digest(),
        "settings": {},
        "card": b"",
        "csr": b"",
        "host": "h",
        "pid": 1,
        "instance": "i",
        **changes,
    }
    return protocol.Request(**given)


def ticket_without_seed() -> Ticket:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return Ticket.create(Address("127.0.0.1", port))


def join_alone(given: str, timeout: float) -> View:
    return join(
        TicketSource(given),
        rank=1,
        size=2,
        card=b"",
        config=Config(),
        version=VERSION,
        deadline=RealRuntime().deadline(timeout),
    )


# -- entering (rank 0 hosts the seed) ----------------------------------------------------------------------


def enter_by(
    info: LaunchInfo, timeout: float = PATIENCE_S, config: Config | None = None
) -> tuple[View, ListenSpec]:
    listens: list[ListenSpec] = []

    def card(listen: ListenSpec) -> bytes:
        listens.append(listen)
        return b"card %d" % listen.rank

    entry: Entry = enter(info, make_card=card, config=config or Config(), version=VERSION, timeout=timeout)
    with entry:
        return entry.view, listens[0]
