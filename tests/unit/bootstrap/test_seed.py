"""The join port, with real sockets: good ranks join whatever strangers do there.

The numbers T1 to T16 are those of the threat model in SECURITY.md.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import resource
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
from tests.support.metronome import stopwatch

from unisono.bootstrap import limits, protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.entry import Entry, ListenSpec, enter
from unisono.bootstrap.identity import Authority, verified_name
from unisono.bootstrap.join import View, join, report_ended
from unisono.bootstrap.launch_info import LaunchInfo, decide
from unisono.bootstrap.protocol import NO_ENTRY, Frames, JoinClient
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.bootstrap.tls_stream import server_context
from unisono.config import Config, Launch, Network
from unisono.core.clock import RealRuntime
from unisono.errors import RendezvousError, UsageError

PATIENCE_S = 30.0
VERSION = "1.0"


class Ranks:
    """Workers on threads, one per rank."""

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


def is_hung_up(sock: socket.socket) -> bool:
    """Wait until the seed ends the connection; whatever it says before is dropped."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def secured(sock: socket.socket, **options: Any) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if "maximum" in options:
        context.maximum_version = options["maximum"]
    if "alpn" in options:
        context.set_alpn_protocols([options["alpn"]])
    return context.wrap_socket(sock)


def proven(seed: Seed) -> tuple[socket.socket, Frames]:
    """A connection that has proven the token, and says nothing yet."""
    sock = connected(seed)
    if not seed.ticket.is_plain:
        sock = secured(sock, alpn=protocol.ALPN)
    client = JoinClient(seed.ticket.token, seed.ticket.ca_fingerprint or bytes(32), secrets.token_bytes(32))
    sock.sendall(client.hello())
    sock.sendall(client.proof(sock.recv(client.greeting_bytes, socket.MSG_WAITALL * seed.ticket.is_plain)))
    return sock, client.frames(sock.recv(client.answer_bytes))


def answer(sock: socket.socket, frames: Frames) -> protocol.Reply:
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


# -- good ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_rank_gets_the_same_view(make_seed: MakeSeed, tls: bool, host: str) -> None:
    seed, ranks = make_seed(5, address=Address(host), tls=tls)
    views = ranks.all()
    assert seed.report() == "all 5 ranks joined"
    assert {view.members for view in views} == {views[0].members}
    assert {view.secret for view in views} == {views[0].secret}
    for rank, view in enumerate(views):
        assert (view.rank, view.size, view.job, view.incarnation) == (rank, 5, seed.job, 0)
        assert view.cards == [b"card %d" % r for r in range(5)]
        assert view.members[rank].pid == os.getpid()
        assert view.members[rank].address == host


def test_every_rank_gets_a_certificate_that_names_it(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(3, tls=True)
    now = datetime.datetime.now(datetime.UTC)
    for rank, view in enumerate(ranks.all()):
        assert view.identity is not None
        name = verified_name(view.identity.certificate_pem, view.identity.ca_pem, now)
        assert (name.job, name.rank, name.incarnation) == (seed.job, rank, 0)


def test_ranks_can_talk_tls_with_their_certificates(make_seed: MakeSeed, tmp_path: Path) -> None:
    """What the engine does with them: TLS 1.3 with both sides authenticated; an outsider is refused (T1)."""
    _, ranks = make_seed(2, tls=True)
    views = ranks.all()
    identities = [view.identity for view in views if view.identity is not None]
    foreign = Authority("cd" * 16, datetime.datetime.now(datetime.UTC))

    def context(side: int, certificate: bytes, key: bytes) -> ssl.SSLContext:
        made = ssl.SSLContext(side)
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=identities[0].ca_pem.decode())
        file = tmp_path / secrets.token_hex(4)
        file.write_bytes(key + certificate)
        made.load_cert_chain(file)
        return made

    server = context(ssl.PROTOCOL_TLS_SERVER, identities[0].certificate_pem, identities[0].key_pem)
    for certificate, key, is_welcome in (
        (identities[1].certificate_pem, identities[1].key_pem, True),
        (foreign.certificate_pem, foreign.key_pem(), False),
    ):
        ours, theirs = socket.socketpair()
        with ThreadPoolExecutor(1) as pool, ours, theirs:
            accepted = pool.submit(server.wrap_socket, theirs, True)
            with context(ssl.PROTOCOL_TLS_CLIENT, certificate, key).wrap_socket(ours):
                if is_welcome:
                    accepted.result(PATIENCE_S).close()
                else:
                    with pytest.raises(ssl.SSLError):
                        accepted.result(PATIENCE_S)


def test_a_rank_that_gave_up_may_come_again(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(2, tls=tls)
    with pytest.raises(RendezvousError, match="missing: 0"):
        ranks.start(1, timeout=0.5).result(PATIENCE_S)
    views = ranks.all()
    assert [view.incarnation for view in views] == [0, 1]
    assert [member.incarnation for member in views[0].members] == [0, 1]


def test_a_name_with_two_families_is_tried_in_both(
    make_seed: MakeSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, ranks = make_seed(1)
    port = seed.ticket.address.port
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
    ticket = seed.ticket.at(Address("node7", port))
    with pytest.raises(UsageError, match="without a certificate"):
        TicketSource(ticket.text()).read()
    source = TicketSource(ticket.text(), insecure=True)
    assert ranks.start(0, source=source).result(PATIENCE_S).size == 1


def test_what_is_advertised_beyond_the_host_is_encrypted() -> None:
    with Seed(1, version=VERSION, address=Address("127.0.0.1"), advertise=Address("gate.example", 9)) as seed:
        assert not seed.ticket.is_plain
        assert seed.ticket.address == Address("gate.example", 9)


def test_an_advertised_address_stands_in_the_ticket(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(1, address=Address("127.0.0.1"), advertise=Address("127.0.0.2", 0), tls=True)
    assert seed.ticket.address.host == "127.0.0.2"
    assert seed.local_ticket.address == Address("127.0.0.1", seed.ticket.address.port)
    source = TicketSource(seed.local_ticket.text())
    assert ranks.start(0, source=source).result(PATIENCE_S).size == 1


# -- exposure (T2, T16) ------------------------------------------------------------------------------------


def listening() -> set[str]:
    """Local addresses of the TCP sockets of this process that are not connections."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{entry}"))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if f"socket:[{columns[9]}]" in inodes:
                found.add(f"{table} {columns[1]} {columns[3]}")
    return found


def test_the_seed_opens_one_socket_on_loopback_and_ranks_keep_none(make_seed: MakeSeed) -> None:
    before = listening()
    seed, ranks = make_seed(3)
    port = seed.ticket.address.port
    assert listening() - before == {f"tcp 0100007F:{port:04X} 0A"}
    ranks.all()
    deadline = time.monotonic() + PATIENCE_S
    while listening() - before != {f"tcp 0100007F:{port:04X} 0A"}:  # closed connections go away at once
        assert time.monotonic() < deadline, listening() - before
    seed.close()
    assert listening() - before == set()


def test_a_wildcard_needs_an_address_to_advertise_and_tls(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match="ranks do not know which one to join"):
        Seed(1, version=VERSION, address=Address("0.0.0.0"))
    with pytest.raises(UsageError, match="wildcard"):
        Seed(1, version=VERSION, address=Address("0.0.0.0"), advertise=Address("h"), insecure=True)
    assert caplog.text == ""


def test_insecure_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    # A documentation address: nothing here has it, so binding fails, after the warning.
    with pytest.raises(RendezvousError, match="cannot listen"):
        Seed(1, version=VERSION, address=Address("192.0.2.99"), insecure=True)
    assert "insecure: ranks join and talk without encryption" in caplog.text


def test_a_taken_port_is_said_to_be_taken(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(1)
    with pytest.raises(
        RendezvousError, match=rf"127\.0\.0\.1:{seed.ticket.address.port}: the port is in use"
    ):
        Seed(1, version=VERSION, address=Address("127.0.0.1", seed.ticket.address.port))


def test_old_tls_and_other_protocols_are_refused(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2, tls=True)
    with pytest.raises(ssl.SSLError), connected(seed) as sock:
        secured(sock, alpn=protocol.ALPN, maximum=ssl.TLSVersion.TLSv1_2)
    for options in ({}, {"alpn": "h2"}):
        with connected(seed) as sock, secured(sock, **options) as line:
            assert is_hung_up(line)
    with connected(seed) as sock, secured(sock, alpn=protocol.ALPN) as line:
        line.sendall(b"UNISONO0" + bytes(32))
        assert is_hung_up(line)
    assert seed.counts["garbage"] == 4
    assert len(ranks.all()) == 2


# -- strangers (T1, T4, T9, T10, T11) ----------------------------------------------------------------------

GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(512),
    b"\xff" * 100,
    b"\x00",
    b"UNISONO2" + bytes(32),
    b"UNISONO1" + bytes(100_000),
    b"UNISONO1" + bytes(32) + b"\xff" * 32,
]


def test_strangers_are_refused_and_the_world_forms(make_seed: MakeSeed, tls: bool) -> None:
    seed, ranks = make_seed(3, tls=tls)
    first = [ranks.start(0), ranks.start(1)]
    for garbage in GARBAGE:
        with connected(seed) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
            assert is_hung_up(sock)
    assert seed.counts["garbage"] + seed.counts["wrong token"] >= 5
    assert not seed.is_formed
    views = [*(future.result(PATIENCE_S) for future in [*first, ranks.start(2)])]
    assert [view.rank for view in views] == [0, 1, 2]


def test_random_bytes_never_hurt(make_seed: MakeSeed, tls: bool) -> None:
    import random

    seed, ranks = make_seed(2, tls=tls)
    rng = random.Random(7)
    for _ in range(60):
        data = rng.randbytes(rng.randrange(1, 300))
        with connected(seed) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(data if rng.random() < 0.5 else b"UNISONO1"[: rng.randrange(9)] + data)
    assert len(ranks.all()) == 2


def test_a_wrong_token_is_refused_and_named(make_seed: MakeSeed, tls: bool) -> None:
    seed, ranks = make_seed(2, tls=tls)
    wrong = Ticket.create(seed.ticket.address, seed.ticket.ca_fingerprint)
    with pytest.raises(RendezvousError, match=r"rank 1 of 2 could not join: .* refused the token"):
        ranks.start(1, source=TicketSource(wrong.text())).result(PATIENCE_S)
    assert seed.counts["wrong token"] == 1
    assert "a process on 127.0.0.1: it does not know the token" in seed.report()
    assert len(ranks.all()) == 2


def test_every_wrong_token_hears_the_same(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(2)
    heard = set()
    for proof in (bytes(32), b"\xff" * 32, seed.ticket.token):
        with connected(seed) as sock:
            sock.sendall(b"UNISONO1" + bytes(32))
            sock.recv(40, socket.MSG_WAITALL)
            sock.sendall(proof)
            heard.add(sock.recv(100, socket.MSG_WAITALL))
    assert heard == {NO_ENTRY}


def test_a_client_that_guesses_is_slowed_down(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2)

    def guess() -> tuple[float, float]:
        began = time.monotonic()
        with stopwatch() as seconds, connected(seed) as sock:
            sock.sendall(b"UNISONO1" + bytes(64))
            assert is_hung_up(sock)
            return seconds(), time.monotonic() - began

    times = [guess()[0] for _ in range(limits.FAILURES_PER_MINUTE_MAX)]
    assert min(times) < limits.FAILURE_DELAY_S / 2
    assert guess()[1] >= limits.FAILURE_DELAY_S * 0.9
    # Whoever does not guess is served at once, from the same address too.
    with stopwatch() as seconds:
        greeted = proven(seed)[0]
        assert seconds() < limits.FAILURE_DELAY_S
    greeted.close()
    assert len(ranks.all()) == 2


def test_guesses_that_wait_for_their_answer_are_few(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2)
    with contextlib.ExitStack() as stack:
        guesses = []
        for _ in range(100 + limits.FAILURES_HELD_MAX):
            guesses.append(stack.enter_context(connected(seed)))
            guesses[-1].sendall(b"UNISONO1" + bytes(64))
        _until(lambda: seed.counts["wrong token"] == len(guesses))
        assert len(seed._port._held) <= limits.FAILURES_HELD_MAX
        assert len(ranks.all()) == 2
        assert all(is_hung_up(sock) for sock in guesses)
    assert not seed._port._held


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_idle_and_slow_connections_do_not_keep_ranks_out(make_seed: MakeSeed, tls: bool) -> None:
    seed, ranks = make_seed(8, tls=tls)
    dripping = threading.Event()
    with contextlib.ExitStack() as stack:
        crowd = min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1500)
        idle = [stack.enter_context(connected(seed)) for _ in range(crowd)]
        slow = [stack.enter_context(connected(seed)) for _ in range(500)]

        def drip() -> None:
            greeting = b"\x16" if tls else b"UNISONO1" + bytes(30)
            for i in range(len(greeting)):
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.send(greeting[i : i + 1])
                if dripping.wait(0.01):
                    return

        dripper = threading.Thread(target=drip)
        dripper.start()
        with stopwatch() as seconds:
            views = ranks.all()
            took = seconds()
        dripping.set()
        dripper.join()
        assert len(views) == 8
        assert took < 2 * 1.0
        assert len(seed._port._limiter) <= limits.PENDING_PER_ADDRESS_MAX
        assert seed.counts["evicted"] >= crowd + 500 - limits.PENDING_PER_ADDRESS_MAX
        assert is_hung_up(idle[0])


class Crowd:
    """Strangers without end from this very host, as fast as a process can: it keeps 600 connections open."""

    PROGRAM = """
import socket, sys
from collections import deque
address, first_word = ("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2])
for _ in range(25):
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
held = deque(maxlen=600)
number = 0
while True:
    sock = socket.create_connection(address)
    try:
        sock.sendall(first_word)
    except OSError:
        pass
    held.append(sock)
    number += 1
    if number == 300:
        print("crowded", flush=True)
"""

    def __init__(self, seed: Seed, first_word: bytes) -> None:
        port = str(seed.ticket.address.port)
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, port, first_word.hex()], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "crowded\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(
    "first_word",
    [b"", b"UNISONO1" + bytes(32), b"GET /\r\n\r\n", b"UNISONO1" + bytes(64)],
    ids=["idle", "greeting", "garbage", "guessing"],
)
def test_no_crowd_keeps_a_rank_out(make_seed: MakeSeed, tls: bool, first_word: bytes) -> None:
    """Garbage first, so that the address is one that guesses; then connections as fast as they come."""
    seed, ranks = make_seed(4, tls=tls)
    with Crowd(seed, first_word):
        assert [view.rank for view in ranks.all()] == [0, 1, 2, 3]
    assert seed.counts["connections"] > 300


def test_a_crowd_is_named_to_the_ranks_that_wait(
    make_seed: MakeSeed, caplog: pytest.LogCaptureFixture
) -> None:
    seed, ranks = make_seed(2)
    with (
        Crowd(seed, b""),
        pytest.raises(RendezvousError, match=r"missing: 0; the seed's port is crowded: .* 127\.0\.0\.1"),
    ):
        ranks.start(1, timeout=2.0).result(PATIENCE_S)
    assert len([record for record in caplog.records if "is crowded" in record.getMessage()]) == 1


def test_a_rank_that_was_evicted_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as full, ThreadPoolExecutor(1) as pool:

        def push_out() -> None:
            while True:
                try:
                    full.accept()[0].close()
                except OSError:
                    return

        pushing = pool.submit(push_out)
        ticket = Ticket.create(Address("127.0.0.1", full.getsockname()[1]))
        with pytest.raises(RendezvousError, match="before it answered, as a crowded seed does"):
            _join_alone(ticket.text(), 0.3)
        full.shutdown(socket.SHUT_RDWR)
        pushing.result(PATIENCE_S)


def test_a_recorded_tag_is_worth_nothing(make_seed: MakeSeed) -> None:
    """Who has seen a worker's first word can be pushed out like any stranger, and is not admitted (T5)."""
    seed, _ = make_seed(2)
    word = b"UNISONO1" + protocol.tagged_nonce(seed.ticket.token, bytes(16))
    with connected(seed) as first, connected(seed) as second:
        for sock in (first, second):
            sock.sendall(word)
            assert sock.recv(40, socket.MSG_WAITALL).startswith(b"UNISONO1")
        assert len(seed._port._limiter) == 1
        second.sendall(bytes(32))
        assert second.recv(33, socket.MSG_WAITALL) == NO_ENTRY


def test_a_silent_stranger_is_dropped_in_time(
    make_seed: MakeSeed, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNPROVEN_S", 0.3)
    seed, _ = make_seed(2, tls=tls)
    began = time.monotonic()
    with stopwatch() as seconds, connected(seed) as silent, connected(seed) as slow:
        slow.sendall(b"\x16\x03\x01" if tls else b"UNI")
        assert is_hung_up(silent)
        assert is_hung_up(slow)
        assert seconds() < 2 * (0.3 + 0.1) + 0.5
    assert time.monotonic() - began > 0.25
    assert seed.counts["silent"] == 2


def test_a_silent_holder_of_the_token_is_dropped_in_time(
    make_seed: MakeSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.3)
    seed, ranks = make_seed(2)
    sock, _ = proven(seed)
    with sock:
        assert is_hung_up(sock)
    assert len(ranks.all()) == 2


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("length", [2**31 - 1, 2**32 - 1, limits.REQUEST_BYTES_MAX + 1])
def test_a_huge_length_takes_no_memory(make_seed: MakeSeed, tls: bool, length: int) -> None:
    seed, ranks = make_seed(2, tls=tls)
    before = rss_bytes()
    for _ in range(20):
        sock, _ = proven(seed)
        with sock:
            sock.sendall(struct.pack(">I", length) + bytes(100))
            assert is_hung_up(sock)
    assert rss_bytes() - before < 8 << 20
    assert len(ranks.all()) == 2


def test_a_stranger_costs_a_bounded_amount_of_memory(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(2, tls=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([protocol.ALPN])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    hello = outgoing.read()
    with contextlib.ExitStack() as stack:
        before = rss_bytes()
        for _ in range(limits.PENDING_PER_ADDRESS_MAX):
            sock = stack.enter_context(connected(seed))
            sock.sendall(hello)
            assert sock.recv(1)  # the seed has done its part of the handshake
        # 43 KiB were measured.
        assert rss_bytes() - before < 2 * 43 * 1024 * limits.PENDING_PER_ADDRESS_MAX


def test_a_stranger_gets_4_kib_and_no_more(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(2)
    with connected(seed) as sock:
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                sock.sendall(b"UNISONO1" + bytes(1 << 16))
        assert is_hung_up(sock)
    assert seed.counts["garbage"] + seed.counts["wrong token"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff" + bytes(64),
        b"\x91" * 20_000,
        protocol.encode(protocol.Status("x")),
        protocol.encode(a_request())[:-1],
    ],
)
def test_a_malformed_request_ends_its_connection_only(make_seed: MakeSeed, body: bytes) -> None:
    seed, ranks = make_seed(2)
    sock, frames = proven(seed)
    with sock:
        sock.sendall(frames.seal(body) + body)
        assert is_hung_up(sock)
    assert seed.counts["garbage"] == 1
    assert len(ranks.all()) == 2


def test_an_altered_frame_is_refused(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2)
    sock, frames = proven(seed)
    body = bytearray(protocol.encode(a_request()))
    head = frames.seal(bytes(body))
    body[-1] ^= 1
    with sock:
        sock.sendall(head + body)
        assert is_hung_up(sock)
    assert seed.counts["admitted"] == 0
    assert len(ranks.all()) == 2


# -- in the middle (T3, T5) --------------------------------------------------------------------------------


class Proxy:
    """Stands between a worker and the seed, with a certificate of its own or none, and writes all down."""

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


def test_somebody_in_between_with_his_own_certificate_learns_nothing(make_seed: MakeSeed) -> None:
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
        assert is_hung_up(sock)
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
    """On loopback without TLS: whoever took the port of a seed cannot prove the token (T3)."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        ticket = Ticket.create(Address("127.0.0.1", impostor.getsockname()[1]))
        heard = bytearray()

        def pretend() -> None:
            sock, _ = impostor.accept()
            with sock:
                heard.extend(sock.recv(40, socket.MSG_WAITALL))
                sock.sendall(b"UNISONO1" + bytes(32))
                heard.extend(sock.recv(32, socket.MSG_WAITALL))
                sock.sendall(bytes(33))
                heard.extend(sock.recv(1000))

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
    assert len(heard) == 72
    assert ticket.token not in heard
    assert b"my card" not in heard


# -- bad members (T6, T11) ---------------------------------------------------------------------------------


def test_of_two_that_claim_a_rank_exactly_one_wins(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(3, tls=tls)
    claims = [ranks.start(2) for _ in range(3)]
    others = [ranks.start(0), ranks.start(1)]
    ends = [claim.exception(PATIENCE_S) for claim in claims]
    refused = [end for end in ends if end is not None]
    assert len(refused) == 2
    for error in refused:
        assert re.search(r"refused rank 2 of 3: .*rank 2 \(host .*, pid \d+, from 127\.0\.0\.1\)", str(error))
    assert [future.result(PATIENCE_S).rank for future in others] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.9"}, "unisono 0.9 cannot join a world of unisono 1.0"),
        ({"size": 4}, "it was started with size 4, this world has 2 ranks"),
        ({"rank": 7, "size": 2}, "rank 7; allowed: 0 to 1"),
        (
            {"config": Config(eager_bytes=1)},
            r"settings differ from rank 0's: eager_bytes=1 \(rank 0: 16384\)",
        ),
    ],
)
def test_a_misfit_is_refused_by_name_and_the_world_forms(
    make_seed: MakeSeed, tls: bool, changes: dict[str, Any], reason: str
) -> None:
    seed, ranks = make_seed(2, tls=tls)
    first = ranks.start(0)
    with pytest.raises(RendezvousError, match=reason):
        ranks.start(**{"rank": 1, **changes}).result(PATIENCE_S)
    assert not first.done()
    assert re.search(reason, seed.report())
    assert ranks.start(1).result(PATIENCE_S).size == 2
    assert first.result(PATIENCE_S).size == 2


def test_a_certificate_request_that_is_none_is_refused(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2, tls=True)
    sock, frames = proven(seed)
    body = protocol.encode(a_request(csr=b"\x30\x03\x02\x01\x00"))
    with sock:
        sock.sendall(frames.seal(body) + body)
        reply = answer(sock, frames)
    assert isinstance(reply, protocol.Refused)
    assert "certificate request is malformed" in reply.reason
    assert len(ranks.all()) == 2


def test_a_late_comer_hears_why(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(2, tls=tls)
    ranks.all()
    with pytest.raises(RendezvousError, match=r"world of 2 ranks is complete, and rank 1 \(host"):
        ranks.start(1).result(PATIENCE_S)


def test_a_late_comer_is_not_older_for_a_slow_answer(
    tmp_path: Path, make_seed: MakeSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world was complete before it came, so the next one may be its own: it tries until its deadline."""
    seed, ranks = make_seed(2)
    began = time.monotonic()
    ranks.all()
    source = TicketSource(str(tmp_path / "ticket"))
    source.write(seed.ticket)
    read = protocol.parse_reply
    # Longer than the world has been complete.
    delay_s = time.monotonic() - began + 0.5

    def read_late(body: bytes) -> protocol.Reply:
        time.sleep(delay_s)
        return read(body)

    monkeypatch.setattr(protocol, "parse_reply", read_late)
    monkeypatch.setattr("socket.gethostname", lambda: "another")  # else it is known as a rank of that world
    deadline = RealRuntime().deadline(1.5 * delay_s)
    with pytest.raises(RendezvousError, match=r"could not join within .* refused it: .* is complete"):
        join(source, rank=1, size=2, card=b"", config=Config(), version="1.0", deadline=deadline)


# -- time (what a timeout says) ----------------------------------------------------------------------------


def test_a_timeout_names_the_ranks_that_joined_and_the_missing_ones(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(5, tls=tls)
    with stopwatch() as seconds:
        joining = [ranks.start(rank, timeout=1.0) for rank in (1, 2)]
        refused = ranks.start(3, version="0.9")
        assert isinstance(refused.exception(PATIENCE_S), RendezvousError)
        texts = [str(future.exception(PATIENCE_S)) for future in joining]
        assert seconds() < 2 * 1.0
    assert any(
        "2 of 5 ranks joined (1-2); missing: 0, 3-4; refused: rank 3 (host" in text for text in texts
    ), texts
    assert all(
        "could not join within 1" in text and "Next: see why the missing ranks" in text for text in texts
    )


def nobody_there() -> Ticket:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return Ticket.create(Address("127.0.0.1", port))


def test_a_timeout_names_the_address_and_what_it_answered() -> None:
    ticket = nobody_there()
    with pytest.raises(RendezvousError) as caught:
        _join_alone(ticket.text(), 0.3)
    assert re.search(rf"tried {ticket.address} refused the connection \(\d+ times\)", str(caught.value))


def test_a_seed_that_says_nothing_is_described() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ticket = Ticket.create(Address("127.0.0.1", mute.getsockname()[1]))
        with pytest.raises(RendezvousError, match="accepted the connection, but did not answer"):
            _join_alone(ticket.text(), 0.3)


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    ticket = Ticket.create(Address("no-such-node", 1), bytes(32))
    with pytest.raises(
        RendezvousError, match=r"tried no-such-node:1 could not be resolved \(Name or service"
    ):
        _join_alone(ticket.text(), 0.2)


def test_a_missing_ticket_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.ticket"
    with pytest.raises(RendezvousError, match=f"ticket file {path} is not there"):
        _join_alone(str(path), 0.2)


@pytest.mark.parametrize("rest", ["", "unisono1://127.0.0.1:1/pl"])
def test_a_ticket_file_that_is_not_whole_is_read_again(
    make_seed: MakeSeed, tmp_path: Path, rest: str
) -> None:
    path = tmp_path / "job.ticket"
    path.touch(mode=0o600)
    path.write_text(rest)
    seed, ranks = make_seed(2)
    ranks.start(0)
    with pytest.raises(
        RendezvousError, match=rf"rank 0 has not started its seed: the ticket file {path} holds no whole"
    ):
        _join_alone(str(path), 0.2)
    copied = ranks.start(1, source=TicketSource(str(path)))
    text = seed.ticket.text()
    for end in (0, 9, len(text) // 2, len(text) - 1):
        assert not copied.done()
        path.write_text(text[:end])
    path.write_text(text)
    assert copied.result(PATIENCE_S).size == 2


def test_a_given_ticket_that_is_not_whole_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="malformed"):
        _join_alone("unisono1://127.0.0.1:1/plain/00", PATIENCE_S)


def test_a_rank_0_that_has_not_come_is_named(tmp_path: Path) -> None:
    started = Launch("the environment", 1, 2, is_one_host=True, job="the environment/127.0.0.1/29500")
    with pytest.raises(
        RendezvousError,
        match=r"rank 0 has not started its seed: the ticket file .* is not there. "
        r"Next: see whether rank 0 was started, with the same MASTER_ADDR and MASTER_PORT",
    ):
        _enter(decide(started, Network(folder=str(tmp_path))), timeout=0.2)


def test_a_seed_that_closes_names_the_missing_ranks(make_seed: MakeSeed, tls: bool) -> None:
    seed, ranks = make_seed(3, tls=tls)
    waiting = ranks.start(2)
    _until(lambda: seed.counts["admitted"] == 1)
    seed.close("the operator gave up")
    with pytest.raises(
        RendezvousError, match=r"the operator gave up; 1 of 3 ranks joined \(2\); missing: 0-1"
    ):
        waiting.result(PATIENCE_S)


def _join_alone(given: str, timeout: float) -> View:
    return join(
        TicketSource(given),
        rank=1,
        size=2,
        card=b"",
        config=Config(),
        version=VERSION,
        deadline=RealRuntime().deadline(timeout),
    )


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# -- logs and secrets (T15) --------------------------------------------------------------------------------


@pytest.mark.parametrize("evil", ["a\nWARNING all is well", "\x1b[2J", "\u202egnp.exe", "h" * 60_000])
def test_a_strange_host_name_is_one_log_line(
    make_seed: MakeSeed, caplog: pytest.LogCaptureFixture, evil: str
) -> None:
    seed, _ = make_seed(2)
    sock, frames = proven(seed)
    body = protocol.encode(a_request(version="0.9", host=evil))
    with sock:
        sock.sendall(frames.seal(body) + body)
        reply = answer(sock, frames)
    assert isinstance(reply, protocol.Refused)
    (record,) = [r for r in caplog.records if "join refused" in r.getMessage()]
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 1000
    assert seed.report().isprintable()


def test_no_secret_is_ever_logged_or_shown(make_seed: MakeSeed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seed, ranks = make_seed(2, tls=True)
    wrong = TicketSource(Ticket.create(seed.ticket.address, seed.ticket.ca_fingerprint).text())
    errors = [str(ranks.start(1, source=wrong).exception(PATIENCE_S)), seed.report()]
    views = ranks.all()
    identity = views[0].identity
    assert identity is not None
    shown = caplog.text + repr((seed, seed.ticket, views, identity, ranks._source)) + "".join(errors)
    key_lines = identity.key_pem.decode().splitlines()[1:-1]
    for secret in (seed.ticket.token.hex(), views[0].secret.hex(), *key_lines, "PRIVATE"):
        assert secret not in shown
    for secret_bytes in (seed.ticket.token, views[0].secret):
        assert repr(secret_bytes)[2:-1] not in shown


# -- entering (rank 0 hosts) -------------------------------------------------------------------------------


def _enter(
    place: LaunchInfo, timeout: float = PATIENCE_S, config: Config | None = None
) -> tuple[View, ListenSpec]:
    sites: list[ListenSpec] = []

    def card(site: ListenSpec) -> bytes:
        sites.append(site)
        return b"card %d" % site.rank

    entry: Entry = enter(place, make_card=card, config=config or Config(), version=VERSION, timeout=timeout)
    with entry:
        return entry.view, sites[0]


def test_ranks_of_one_job_meet_at_their_file(tmp_path: Path) -> None:
    def place(rank: int) -> LaunchInfo:
        started = Launch("Slurm", rank, 3, local_rank=rank, is_one_host=True, job="Slurm/1/0")
        return decide(started, Network(folder=str(tmp_path)))

    source = place(0).source
    assert source is not None
    source.write(nobody_there())  # an earlier job of the same name has left its ticket
    with ThreadPoolExecutor(3) as pool:
        entered = list(pool.map(lambda rank: _enter(place(rank)), (2, 1, 0)))
    for view, site in entered:
        assert view.cards == [b"card 0", b"card 1", b"card 2"]
        assert site.bind == site.advertise == Address("127.0.0.1")
        assert not site.is_encrypted
        assert site.secret == view.secret
        assert not site.folder.exists()  # removed by the last that left
    assert len({site.folder for _, site in entered}) == 1
    assert source.path is not None
    assert not source.path.exists()


def test_a_file_of_a_seed_that_is_complete_is_an_old_one(tmp_path: Path, make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(1)
    ranks.all()
    source = TicketSource.keyed(str(tmp_path), "job")
    source.write(seed.ticket)
    newer, _ = make_seed(1)
    made_for: list[Ticket] = []

    def card(ticket: Ticket) -> bytes:
        made_for.append(ticket)
        return b"card %d" % len(made_for)

    waiting = ranks.start(0, source=source, card=card)
    _until(lambda: seed.counts["refused"] > 1)
    source.write(newer.ticket)
    view = waiting.result(PATIENCE_S)
    # The engine's secret comes from the ticket, so that its card must be made for the right one, and once.
    assert (view.job, view.cards) == (newer.job, [b"card 2"])
    assert made_for == [seed.ticket, newer.ticket]


def test_the_end_of_a_process_that_is_older_than_the_seed_is_another_jobs(
    tmp_path: Path, make_seed: MakeSeed
) -> None:
    """The launcher of another host read the ticket file after the next job had put its ticket there."""
    before = time.monotonic()
    seed, _ = make_seed(2)
    after = time.monotonic()
    source = TicketSource(str(tmp_path / "ticket"))
    source.write(seed.ticket)

    def tell(rank: int, started_at: float) -> None:
        report_ended(
            source,
            rank,
            "exit code 0",
            started_at=started_at,
            version="1.0",
            deadline=RealRuntime().deadline(PATIENCE_S),
        )

    tell(1, before)
    assert seed.counts["proven"] == 1
    assert "has ended" not in seed.report()
    tell(1, after)
    assert "rank 1 has ended (exit code 0)" in seed.report()


def test_an_engine_that_cannot_start_is_no_fault_of_the_seed(make_seed: MakeSeed) -> None:
    _, ranks = make_seed(2)

    def card(ticket: Ticket) -> bytes:
        raise PermissionError("no memory for rings")

    with pytest.raises(PermissionError, match="no memory for rings"):
        ranks.start(0, card=card).result(PATIENCE_S)


def test_rank_0_that_gives_up_takes_its_ticket_along(tmp_path: Path) -> None:
    path = tmp_path / "job.ticket"
    place = decide(None, Network(), rank=0, size=2, join=str(path))
    with pytest.raises(RendezvousError, match=r"1 of 2 ranks joined \(0\); missing: 1"):
        _enter(place, timeout=0.3)
    assert list(tmp_path.iterdir()) == []


def test_a_declared_port_is_the_seeds_and_ranks_take_the_next(tmp_path: Path) -> None:
    network = Network(join=str(tmp_path / "t"), address="127.0.0.1:47110", advertise="127.0.0.3:5000")
    place = LaunchInfo(1, 2, local_rank=1, network=network, source=TicketSource(str(tmp_path / "t")))
    with Seed(2, version=VERSION) as seed, ThreadPoolExecutor(2) as pool:
        TicketSource(str(tmp_path / "t")).write(seed.ticket)
        other = pool.submit(_enter, LaunchInfo(0, 2, source=place.source))
        view, site = pool.submit(_enter, place).result(PATIENCE_S)
        other.result(PATIENCE_S)
    assert view.rank == 1
    assert site.bind == Address("127.0.0.1", 47112)
    assert site.advertise == Address("127.0.0.3", 5002)


def test_a_seed_with_too_few_descriptors_for_its_ranks_says_so() -> None:
    program = (
        "import os, resource, sys\n"
        "from unisono.bootstrap.seed import Seed\n"
        "seed = Seed(5, version='1.0').start()\n"
        "limit = len(os.listdir('/proc/self/fd')) + 2\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "print(seed.ticket.text(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ranks = Ranks(Ticket.parse(process.stdout.readline()), 5)
        try:
            joining = [ranks.start(rank, timeout=2.0) for rank in range(5)]
            texts = [str(future.exception(PATIENCE_S)) for future in joining]
        finally:
            ranks.close()
        _, err = process.communicate()
    told = [text for text in texts if "the seed cannot accept more connections: Too many open files" in text]
    assert told, texts
    assert all("(ulimit -n)" in text for text in told)
    assert err.count("cannot accept more connections") == 1


def test_a_seed_without_free_descriptors_still_lets_ranks_in() -> None:
    program = (
        "import resource, sys\n"
        "from unisono.bootstrap.seed import Seed\n"
        "seed = Seed(2, version='1.0').start()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "print(seed.ticket.text(), flush=True)\n"
        "sys.stdin.read()\n"
        "print(seed.counts['evicted'] > 0, seed.counts['mistakes'])\n"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        ticket = Ticket.parse(process.stdout.readline())
        for _ in range(100):
            stack.enter_context(socket.create_connection((ticket.address.host, ticket.address.port)))
        ranks = Ranks(ticket, 2)
        try:
            assert len(ranks.all()) == 2
        finally:
            ranks.close()
        process.stdin.close()
        assert process.stdout.read() == "True 0\n"
