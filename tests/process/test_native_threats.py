"""The threats of SECURITY.md at the engine's listener and on its links: strangers, forgeries, bombs, crowds.

At the end of every test the ranks still work together.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import random
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.credentials import Issuer, unfit_credentials
from tests.support.member import BULK, CONTROL, Member, connected, context, exactly, greet, hello
from tests.support.native_ranks import (
    BOMBS,
    CONTEXT,
    PATIENCE_S,
    RTS,
    SECRET,
    WITHDRAW,
    Make,
    call,
    connect,
    ended,
    exchange,
    head,
    make,
    memory_kib,
    random_frame,
)
from tests.support.ranks import IS_SANITIZED, wait_until
from tests.support.system import need_root

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card, Credentials
from unisono.backends.native.refusals import NAMED_MAX
from unisono.config import Config
from unisono.errors import PeerLost, ProtocolError, UsageError
from unisono.messaging.peer_down import BROKEN, PeerDown

__all__ = ["make"]


def exchange_for_ever(one: NativeBackend, other: NativeBackend) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        exchange(one, other)


def refused(backend: NativeBackend) -> int:
    return backend._engine.refused()


# -- strangers at a listener with TLS ------------------------------------------------------------------


def said_nothing(sock: socket.socket) -> bool:
    """Whether the listener closed the connection, or sent an alert, without any data inside TLS."""
    return exactly(sock, 1) == b""


def as_rank(
    card: Card, shown: Credentials | None, rank: int, change: Callable[[ssl.SSLContext], None]
) -> bool:
    """Connect with these credentials and claim to be `rank`; return whether the call is admitted."""
    client = context(shown)
    change(client)
    with connected(card) as sock:
        try:
            with client.wrap_socket(sock) as inside:
                return greet(inside, SECRET, hello(rank, 0, 3, CONTROL)) is not None
        except (ssl.SSLError, ConnectionError):
            return False


def old_version(client: ssl.SSLContext) -> None:
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2


def other_protocol(client: ssl.SSLContext) -> None:
    client.set_alpn_protocols(["h2", "unisono-link/0"])


YEAR = datetime.timedelta(days=365)
STRANGERS: dict[str, tuple[Callable[[Issuer], Credentials | None], Callable[[ssl.SSLContext], None], str]] = {
    "no certificate": (lambda _: None, lambda _: None, "peer did not return a certificate"),
    "another authority": (lambda _: Issuer(3).credentials(1), lambda _: None, "not from this job's seed"),
    "expired": (lambda i: i.credentials(1, age=YEAR), lambda _: None, "expired"),
    "an earlier incarnation": (
        lambda i: i.credentials(1, incarnation=2),
        lambda _: None,
        "names no rank of this job",
    ),
    "a rank that there is not": (lambda i: i.credentials(7), lambda _: None, "names no rank of this job"),
    "another rank": (lambda i: i.credentials(2), lambda _: None, "rank 2's, but it says that it is rank 1"),
    "old TLS": (lambda i: i.credentials(1), old_version, "unsupported protocol"),
    "another protocol": (lambda i: i.credentials(1), other_protocol, "no application protocol"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_refused_and_named(make: Make, caplog: pytest.LogCaptureFixture, stranger: str) -> None:
    shown, change, reason = STRANGERS[stranger]
    issuer = Issuer(3)
    backends = make(3, (0, 1), tls=True)
    cards = [b.card() for b in backends]
    connect(backends, issuer, [*cards, cards[0]])
    with caplog.at_level(logging.WARNING, logger="unisono.native"):
        assert not as_rank(cards[0], shown(issuer), 1, change)
        wait_until(lambda: refused(backends[0]) == 1, "it is counted")
        wait_until(lambda: reason in caplog.text, "it is logged")
    assert "127.0.0.1" in caplog.text
    # The same call of a member is admitted, so the stranger's credentials were the reason.
    assert as_rank(cards[0], issuer.credentials(2), 2, lambda _: None)
    exchange(*backends)


def test_no_message_without_tls_is_answered(make: Make) -> None:
    issuer = Issuer(2)
    backends = make(2, tls=True)
    connect(backends, issuer)
    card = backends[0].card()
    glut = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(16_000)  # a hello of 16 KiB
    for junk in (hello(1, 0, 2, CONTROL), b"GET / HTTP/1.0\r\n\r\n", os.urandom(3000), glut):
        with connected(card) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(junk)
            answer = exactly(sock, 100)
            assert len(answer) < 100, "at most an alert"
    wait_until(lambda: refused(backends[0]) == 4, "they are counted")
    exchange(*backends)


def test_a_stranger_gets_less_than_4_kib(make: Make) -> None:
    issuer = Issuer(2)
    backends = make(2, tls=True)
    connect(backends, issuer)
    card = backends[0].card()
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context(None).wrap_bio(inward, outward)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    with connected(card) as sock:
        sock.sendall(outward.read())
        # The stranger never replies, so it gets all bytes that the listener sends before authentication.
        assert 0 < len(exactly(sock, 1 << 20)) < 4096


def test_credentials_that_do_not_fit_are_refused_at_once(make: Make) -> None:
    backend = make(2, (0,), tls=True)[0]
    issuer = Issuer(2)
    mine, cards = issuer.credentials(0), [backend.card()] * 2
    for wrong in (*unfit_credentials(issuer), None):
        with pytest.raises(UsageError, match="credentials"):
            backend.connect(cards, wrong)
    assert mine.key_pem.decode() not in repr(mine)
    backend.connect(cards, mine)


# -- a man in the middle -------------------------------------------------------------------------------


class Between:
    """A port that forwards to an engine the result of `change(number, direction, data)`."""

    def __init__(self, card: Card, change: Callable[[int, int, bytes], bytes]) -> None:
        self._change = change
        self._card = card
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.card = card._replace(port=self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                inner = socket.create_connection((self._card.address, self._card.port))
                number = len(self._sockets) // 2
                self._sockets += [outer, inner]
                for direction, ends in enumerate(((outer, inner), (inner, outer))):
                    thread = threading.Thread(target=self._pass, args=(number, direction, *ends))
                    thread.start()
                    self._threads.append(thread)

    def _pass(self, number: int, direction: int, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                b.sendall(self._change(number, direction, data))
            b.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Between:  # noqa: PYI034 - private
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()


def test_a_man_in_the_middle_with_a_certificate_of_its_own_gets_no_frame(make: Make) -> None:
    issuer, foreign = Issuer(2), Issuer(2)
    backends = make(2, tls=True)
    received: list[bytes] = []
    server = context(foreign.credentials(0), is_server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            outer, _ = listener.accept()
            try:
                with server.wrap_socket(outer, server_side=True) as inside:
                    received.append(inside.recv(100))
            except (ssl.SSLError, ConnectionError):
                outer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        cards = [b.card() for b in backends]
        cards[0] = cards[0]._replace(port=listener.getsockname()[1])
        connect(backends, issuer, cards)
        error = ended(backends[1], backends[1].start_send(0, CONTEXT, 0, memoryview(b"x"))).error
        thread.join()
    assert isinstance(error, PeerLost)
    assert "not from this job's seed" in str(error)
    assert received in ([], [b""])


def test_a_rank_at_the_address_of_another_is_not_accepted_in_its_place(make: Make) -> None:
    issuer = Issuer(3)
    backends = make(3, tls=True)
    cards = [b.card() for b in backends]
    swapped = [cards[0], cards[2], cards[2]]
    backends[0].connect(swapped, issuer.credentials(0))
    for backend in backends[1:]:
        backend.connect(cards, issuer.credentials(backend.rank))
    error = ended(backends[0], backends[0].start_send(1, CONTEXT, 0, memoryview(b"x"))).error
    assert isinstance(error, PeerLost)
    assert "its certificate is rank 2's" in str(error)
    exchange(backends[1], backends[2])


def test_a_recorded_handshake_cannot_be_replayed(make: Make) -> None:
    backends = make(2)
    record: dict[int, bytes] = {}

    def listen(number: int, direction: int, data: bytes) -> bytes:
        if direction == 0:
            record[number] = record.get(number, b"") + data
        return data

    card = backends[0].card()
    with Between(card, listen) as between:
        connect(backends, cards=[between.card, backends[1].card()])
        call(backends[1], backends[0])
        with connected(card) as sock:
            sock.sendall(record[0][:128])  # hello and proof
            assert len(exactly(sock, 1000)) == 64, "only a new challenge"
        wait_until(lambda: refused(backends[0]) == 1, "the old proof does not answer it")
        exchange(*backends)


LINKS: dict[str, dict[str, Any]] = {"checksums": {"hosts": True}, "tls": {"tls": True}}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Flip a thousand bits with --long, few otherwise."""
    if metafunc.function is test_a_flipped_bit_ends_the_link_and_never_becomes_a_value:
        metafunc.parametrize("seed", range(500 if metafunc.config.getoption("--long") else 12))


@pytest.mark.parametrize("links", LINKS)
def test_a_flipped_bit_ends_the_link_and_never_becomes_a_value(make: Make, links: str, seed: int) -> None:
    """One bit, anywhere after the handshake, in either direction of either connection."""
    issuer = Issuer(2) if links == "tls" else None
    backends = make(2, **LINKS[links])
    rng = random.Random(seed)
    number, direction = rng.randrange(2), rng.randrange(2)  # the first connection is the control lane
    at = 2500 + rng.randrange(200 if number == 0 else 400_000)
    bit, passed = 1 << rng.randrange(8), 0

    def flip(n: int, d: int, data: bytes) -> bytes:
        nonlocal passed
        if (n, d) != (number, direction):
            return data
        start, passed = passed, passed + len(data)
        if not start <= at < passed:
            return data
        return data[: at - start] + bytes([data[at - start] ^ bit]) + data[at - start + 1 :]

    def ends() -> list[PeerDown]:
        return [down for backend in backends for down in list(backend._completions._down.values())]

    def broken() -> list[PeerDown]:
        return [down for down in ends() if down.cause.startswith(BROKEN)]

    with Between(backends[0].card(), flip) as between:
        connect(backends, issuer, [between.card, backends[1].card()])
        call(backends[1], backends[0])
        with pytest.raises(PeerLost):
            exchange_for_ever(backends[1], backends[0])
        wait_until(lambda: bool(broken()) or len(ends()) == 2, "both know of the end")
    assert broken(), ends()
    down = broken()[0]
    assert "damaged" in down.cause
    assert isinstance(down.error().__cause__, ProtocolError)


# -- members that break the protocol -------------------------------------------------------------------


def test_a_forged_length_ends_its_link_and_takes_no_memory(make: Make) -> None:
    size = len(BOMBS) + 2
    first, last = backends = make(size, (0, size - 1))
    connect(backends, cards=[first.card()] * (size - 1) + [last.card()])
    exchange(*backends)
    before = memory_kib()
    for rank, (name, bomb) in enumerate(BOMBS.items(), 1):
        repeat = 8 if "credit" in name and "beyond" in name else 1
        with Member(first.card(), SECRET, rank, 0, size) as member:
            member.send(bomb * repeat)
            assert member.is_dropped(), name
            error = ended(first, first.start_send(rank, CONTEXT, 0, memoryview(b"x"))).error
            assert isinstance(error, PeerLost), name
            assert isinstance(error.__cause__, ProtocolError), name
    assert memory_kib() - before < 8 * 1024
    exchange(*backends)


def test_a_peer_that_queries_and_reads_nothing_is_dropped_and_takes_little_memory(make: Make) -> None:
    """Each RTS and its withdrawal are answered; a peer that never reads would queue answers without bound."""
    first, last = backends = make(3, (0, 2))
    connect(backends, cards=[first.card()] * 2 + [last.card()])
    exchange(*backends)
    before = memory_kib()
    with Member(first.card(), SECRET, 1, 0, 3) as member:
        member.lanes[CONTROL].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        uses, is_up = 0, True
        with contextlib.suppress(ConnectionError):
            while is_up and uses < 4_000_000:
                frames = []
                for _ in range(2000):
                    uses += 1
                    rendezvous_id = uses << 32
                    frames.append(
                        head(RTS, context=CONTEXT, nbytes=100_000) + struct.pack("<QQ", rendezvous_id, 0)
                    )
                    frames.append(head(WITHDRAW, context=rendezvous_id))
                member.lanes[BULK].sendall(b"".join(frames))
                is_up = first.links()[1] != "down"
        error = ended(first, first.start_send(1, CONTEXT, 0, memoryview(b"x"))).error
    assert isinstance(error, PeerLost)
    assert "does not read the replies" in str(error)
    assert IS_SANITIZED or memory_kib() - before < 64 * 1024
    exchange(*backends)


def test_random_frames_of_a_peer_end_only_its_own_link(make: Make) -> None:
    turns = 120
    size = turns + 2
    first, last = backends = make(size, (0, size - 1))
    connect(backends, cards=[first.card()] * (size - 1) + [last.card()])
    rng = random.Random(7)
    before = memory_kib()
    for rank in range(1, turns + 1):
        with Member(first.card(), SECRET, rank, 0, size) as member:
            for _ in range(rng.randrange(1, 12)):
                member.send(random_frame(rng, size), rng.choice((BULK, CONTROL)))
    exchange(*backends)
    assert memory_kib() - before < 16 * 1024


def test_a_peer_that_does_not_read_does_not_grow_the_senders_memory(make: Make) -> None:
    """The sender stops at the credit of a peer that reads nothing, and loses the peer by its silence."""
    first = make(2, (0,), config=Config())[0]
    connect([first], cards=[first.card()] * 2)
    with Member(first.card(), SECRET, 1, 0, 2):
        data = memoryview(bytes(16 * 1024))
        before = memory_kib()
        sends = [first.start_send(1, CONTEXT, 0, data) for _ in range(4096)]  # 64 MiB
        grown = memory_kib() - before
        assert grown < 24 * 1024, f"{grown} KiB"
        error = ended(first, sends[-1]).error
        assert isinstance(error, PeerLost)
        assert "silent" in str(error) or "closed" in str(error)


# -- crowds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_many_connections_at_the_listener_keep_no_rank_out(make: Make, tls: bool) -> None:
    issuer = Issuer(2) if tls else None
    backends = make(2, tls=tls)
    card = backends[0].card()
    connect(backends, issuer)
    before = memory_kib()
    with contextlib.ExitStack() as stack:
        crowd = []
        for i in range(400):
            sock = stack.enter_context(socket.create_connection((card.address, card.port), timeout=30))
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\x16\x03\x01"[: i % 4])  # the start of a handshake, or nothing
            crowd.append(sock)
        wait_until(lambda: refused(backends[0]) >= 400 - 128, "the oldest of one address go first")
        # 128 strangers wait, and each takes less than 64 KiB.
        assert IS_SANITIZED or memory_kib() - before < 128 * 64 + 4096
        exchange(*backends)
        # After 5 s all strangers are dropped.
        wait_until(lambda: refused(backends[0]) >= 400, "strangers have a time")
        assert all(said_nothing(sock) for sock in crowd)


def test_refused_callers_are_named_a_few_times_and_then_counted(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    backends = make(2)
    connect(backends)
    with caplog.at_level(logging.WARNING, logger="unisono.native"):
        for turn in range(3 * NAMED_MAX):
            with connected(backends[0].card()) as sock:
                sock.sendall(os.urandom(72))
                assert said_nothing(sock)
            wait_until(lambda turn=turn: refused(backends[0]) == turn + 1, "it is counted")
        exchange(*backends)
        backends[0].close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == NAMED_MAX + 1, lines
    assert all("127.0.0.1" in line for line in lines[:-1])
    assert f"{2 * NAMED_MAX} more" in lines[-1]


# -- open ports ----------------------------------------------------------------------------------------


def listening() -> set[str]:
    """The TCP ports on which this process listens, as the kernel writes them."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1])
    return found


def test_a_rank_listens_on_one_port_of_one_address(make: Make) -> None:
    before = listening()
    backend = make(2, (0,), bind="127.0.0.2")[0]
    port = backend.card().port
    assert listening() - before == {f"0200007F:{port:04X}"}


def as_nobody(path: str) -> bytes:
    """The reply to another user that connects to a unix socket."""
    inward, outward = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                os.write(outward, b"said %r" % sock.recv(1))
        except OSError as error:
            os.write(outward, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(outward)
    os.waitpid(child, 0)
    with open(inward, "rb") as pipe:
        return pipe.read()


def test_another_user_cannot_reach_shared_memory() -> None:
    need_root("be another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        backends = [NativeBackend(rank, 2, folder, SECRET, neighbours=False) for rank in range(2)]
        try:
            connect(backends)
            path = backends[0].card().unix_path
            assert as_nobody(path) == b"PermissionError"
            # Even with an open folder and an open socket: the kernel reports the user of the caller.
            Path(folder).chmod(0o755)
            Path(path).chmod(0o777)
            assert as_nobody(path) in (b"said b''", b"ConnectionResetError")
            wait_until(lambda: refused(backends[0]) == 1, "it is counted")
            exchange(*backends)
        finally:
            for backend in backends:
                backend.close()
