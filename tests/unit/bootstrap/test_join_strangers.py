"""Strangers at the join port: whatever they send, ranks join, and memory stays bounded.

The numbers T1 to T16 are those of the threat model in SECURITY.md.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest
from tests.support.joining_ranks import (
    PATIENCE_S,
    MakeSeed,
    a_request,
    authenticated,
    connected,
    is_closed_by_seed,
    join_alone,
)
from tests.support.metronome import stopwatch
from tests.support.ranks import wait_until

from unisono.bootstrap import limits, protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.protocol import NO_ENTRY
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.errors import RendezvousError

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
            assert is_closed_by_seed(sock)
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


def test_every_wrong_token_gets_the_same_answer(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(2)
    replies = set()
    for proof in (bytes(32), b"\xff" * 32, seed.ticket.token):
        with connected(seed) as sock:
            sock.sendall(b"UNISONO1" + bytes(32))
            sock.recv(40, socket.MSG_WAITALL)
            sock.sendall(proof)
            replies.add(sock.recv(100, socket.MSG_WAITALL))
    assert replies == {NO_ENTRY}


def test_a_client_that_guesses_is_slowed_down(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2)

    def guess() -> tuple[float, float]:
        began = time.monotonic()
        with stopwatch() as seconds, connected(seed) as sock:
            sock.sendall(b"UNISONO1" + bytes(64))
            assert is_closed_by_seed(sock)
            return seconds(), time.monotonic() - began

    times = [guess()[0] for _ in range(limits.FAILURES_PER_MINUTE_MAX)]
    assert min(times) < limits.FAILURE_DELAY_S / 2
    assert guess()[1] >= limits.FAILURE_DELAY_S * 0.9
    # A client that does not guess is served at once, even from the same address.
    with stopwatch() as seconds:
        greeted = authenticated(seed)[0]
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
        wait_until(lambda: seed.counts["wrong token"] == len(guesses))
        assert len(seed._port._held) <= limits.FAILURES_HELD_MAX
        assert len(ranks.all()) == 2
        assert all(is_closed_by_seed(sock) for sock in guesses)
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
        assert is_closed_by_seed(idle[0])


class Crowd:
    """A process on this host that opens connections without end as fast as it can, and keeps 600 open."""

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
def test_connections_without_end_keep_no_rank_out(make_seed: MakeSeed, tls: bool, first_word: bytes) -> None:
    """First garbage, so that the address counts as one that guesses; then connections without pause."""
    seed, ranks = make_seed(4, tls=tls)
    with Crowd(seed, first_word):
        assert [view.rank for view in ranks.all()] == [0, 1, 2, 3]
    assert seed.counts["connections"] > 300


def test_a_timeout_at_a_crowded_port_names_the_crowd(
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
            join_alone(ticket.text(), 0.3)
        full.shutdown(socket.SHUT_RDWR)
        pushing.result(PATIENCE_S)


def test_a_recorded_first_message_is_not_admitted(make_seed: MakeSeed) -> None:
    """A client with a copy of a rank's first message is a stranger like any other, and not admitted (T5)."""
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
        assert is_closed_by_seed(silent)
        assert is_closed_by_seed(slow)
        assert seconds() < 2 * (0.3 + 0.1) + 0.5
    assert time.monotonic() - began > 0.25
    assert seed.counts["silent"] == 2


def test_a_silent_holder_of_the_token_is_dropped_in_time(
    make_seed: MakeSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.3)
    seed, ranks = make_seed(2)
    sock, _ = authenticated(seed)
    with sock:
        assert is_closed_by_seed(sock)
    assert len(ranks.all()) == 2


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("length", [2**31 - 1, 2**32 - 1, limits.REQUEST_BYTES_MAX + 1])
def test_a_huge_length_takes_no_memory(make_seed: MakeSeed, tls: bool, length: int) -> None:
    seed, ranks = make_seed(2, tls=tls)
    before = rss_bytes()
    for _ in range(20):
        sock, _ = authenticated(seed)
        with sock:
            sock.sendall(struct.pack(">I", length) + bytes(100))
            assert is_closed_by_seed(sock)
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
        # Measured: 43 KiB.
        assert rss_bytes() - before < 2 * 43 * 1024 * limits.PENDING_PER_ADDRESS_MAX


def test_a_stranger_gets_4_kib_and_no_more(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(2)
    with connected(seed) as sock:
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                sock.sendall(b"UNISONO1" + bytes(1 << 16))
        assert is_closed_by_seed(sock)
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
    sock, frames = authenticated(seed)
    with sock:
        sock.sendall(frames.seal(body) + body)
        assert is_closed_by_seed(sock)
    assert seed.counts["garbage"] == 1
    assert len(ranks.all()) == 2


def test_an_altered_frame_is_refused(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2)
    sock, frames = authenticated(seed)
    body = bytearray(protocol.encode(a_request()))
    head = frames.seal(bytes(body))
    body[-1] ^= 1
    with sock:
        sock.sendall(head + body)
        assert is_closed_by_seed(sock)
    assert seed.counts["admitted"] == 0
    assert len(ranks.all()) == 2
