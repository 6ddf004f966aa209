"""Strangers at the QUIC port of a rank, and ranks that are reached at the address of another rank."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from tests.support.credentials import INCARNATION, JOB, Issuer, unfit_credentials
from tests.support.quic_ranks import PATIENCE_S, Make, exchange, make, wait_for_all

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Credentials
from unisono.bootstrap.identity import Name
from unisono.config import Config
from unisono.errors import PeerLost, UsageError
from unisono.messaging import strangers

__all__ = ["make"]

INITIAL_BYTES = 1200
LONG_HEADER_RETRY = 0xF0
STRANGERS_UNPROVEN_MAX = 16  # native/connect/quic_connector.cpp


@pytest.mark.parametrize("seed", range(3))
def test_garbage_at_the_port_changes_nothing(make: Make, seed: int) -> None:
    one, other = make(2, Issuer(2))
    rng = random.Random(seed)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for _ in range(2000):
            data = bytearray(rng.randbytes(rng.choice([1, 20, 64, 200, INITIAL_BYTES])))
            if rng.random() < 0.5:
                data[0] |= 0xC0  # a long header
            if rng.random() < 0.3:
                data[1:5] = b"\0\0\0\1"
            stranger.sendto(data, (one.card().address, one.card().port))
        exchange(one, other)
        with pytest.raises(TimeoutError):  # no datagram that was sent deserved a reply
            stranger.recv(2000)


def initial(rng: random.Random, destination: bytes | None = None) -> bytes:
    """The first datagram of a connection: part of a TLS hello, encrypted as in RFC 9001, without a secret."""
    destination = rng.randbytes(8) if destination is None else destination
    secret = hmac.digest(bytes.fromhex("38762cf7f55934b34d179ae6a4c80cadccbb7f0a"), destination, "sha256")

    def expanded(key: bytes, label: str, nbytes: int) -> bytes:
        info = nbytes.to_bytes(2, "big") + bytes([6 + len(label)]) + b"tls13 " + label.encode() + b"\0"
        return HKDFExpand(SHA256(), nbytes, info).derive(key)

    client = expanded(secret, "client in", 32)
    key, iv, mask_key = (
        expanded(client, f"quic {name}", n) for name, n in (("key", 16), ("iv", 12), ("hp", 16))
    )
    head = b"\xc3\0\0\0\1\x08" + destination + b"\x08" + rng.randbytes(8) + b"\0"
    rest = INITIAL_BYTES - len(head) - 2
    head += (0x4000 | rest).to_bytes(2, "big") + bytes(4)
    hello = b"\x06\0\x40\x64" + b"\x01\0\x01\x90\x03\x03" + rng.randbytes(94)  # 100 bytes of 404
    body = AESGCM(key).encrypt(iv, hello.ljust(rest - 4 - 16, b"\0"), head)
    mask = Cipher(AES(mask_key), ECB()).encryptor().update(body[:16])
    masked = bytes([head[0] ^ mask[0] & 0x0F]) + head[1:-4] + mask[1:5]
    return masked + body


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_flood_of_first_datagrams_takes_bounded_memory_and_shuts_no_rank_out(
    make: Make, is_sound: bool
) -> None:
    one, other = make(2, Issuer(2))
    rng = random.Random(3)
    retries = others_bytes = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        before = resident_bytes()
        sent: list[bytes] = []
        for number in range(10_000):
            # Every third one is a replay.
            data = initial(rng)
            fresh = data if is_sound else data[:-1] + bytes([data[-1] ^ 1])
            sent.append(sent[rng.randrange(len(sent))] if number % 3 == 2 else fresh)
            stranger.sendto(sent[-1], (one.card().address, one.card().port))
            if number % 50 == 0:
                time.sleep(0.001)
            if number == 5000:
                exchange(one, other)  # the ranks connect during the flood
            with contextlib.suppress(BlockingIOError):
                answer = stranger.recv(2000)
                is_retry = answer[0] & 0xF0 == LONG_HEADER_RETRY
                retries += is_retry
                others_bytes += 0 if is_retry else len(answer)
                assert not is_retry or len(answer) < 200  # shorter than the datagram
        exchange(one, other, 2)
        assert resident_bytes() - before < strangers.STRANGERS_MAX * (128 << 10)
    # A few datagrams get a reply of at most three times their bytes; the senders of the others are asked to
    # prove their address. Malformed datagrams get no reply.
    assert others_bytes <= (STRANGERS_UNPROVEN_MAX * 3 * 3 * INITIAL_BYTES if is_sound else 0)
    assert (retries > 1000) == is_sound


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- certificates ----


def test_a_member_of_another_job_is_refused_and_named(make: Make, tmp_path: Path) -> None:
    ours, theirs = Issuer(3), Issuer(3)
    one, other, *_ = make(3, ours)
    folder = tmp_path / "foreign"
    folder.mkdir(mode=0o700)
    foreign = NativeBackend(1, 3, str(folder), b"secret", shm=False, quic=True, neighbours=False)
    try:
        cards = [one.card(), foreign.card(), other.card()]
        foreign.connect(cards, theirs.credentials(1))
        request = foreign.start_send(0, 5, 1, memoryview(b"let me in"))
        ends = time.monotonic() + PATIENCE_S
        while not request.done:
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert request.error is not None
        assert "not from this job's seed" in str(request.error)
        exchange(one, other)
    finally:
        foreign.close()


YEAR = datetime.timedelta(days=365)
# Callers that claim to be rank 1: the certificate, the name in it, and the reason of the refusal.
STRANGERS: dict[str, tuple[Callable[[Issuer], Credentials], tuple[int, int], str]] = {
    "another authority": (lambda _: Issuer(3).credentials(1), (1, INCARNATION), "not from this job's seed"),
    "expired": (lambda i: i.credentials(1, age=YEAR), (1, INCARNATION), "expired"),
    "an earlier incarnation": (
        lambda i: i.credentials(1, incarnation=INCARNATION - 1),
        (1, INCARNATION - 1),
        "names no rank of this job",
    ),
    "a rank that there is not": (lambda i: i.credentials(7), (7, INCARNATION), "names no rank of this job"),
    "another rank": (lambda i: i.credentials(2), (2, INCARNATION), "names another job, rank or size"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_refused_and_named(make: Make, caplog: pytest.LogCaptureFixture, stranger: str) -> None:
    shown, (rank, incarnation), reason = STRANGERS[stranger]
    issuer = Issuer(3)
    backends = make(3, config=Config(silence_s=20.0))
    cards = [backend.card() for backend in backends]
    for member in (backends[0], backends[2]):
        member.connect(cards, issuer.credentials(member.rank))
    mine = shown(issuer)
    # The stranger uses the name in its certificate as its own rank's name, and accepts the names of the
    # others.
    names = [Name(JOB, r, INCARNATION).uri for r in range(3)]
    names[1], names[2] = Name(JOB, rank, incarnation).uri, "unisono://nobody" if rank == 2 else names[2]
    claimed = Credentials(names, mine.key_pem, mine.certificate_pem, issuer.credentials(1).authority_pem)
    with caplog.at_level(logging.WARNING, logger="unisono.native"):
        backends[1].connect(cards, claimed)
        request = backends[1].start_send(0, 5, 1, memoryview(b"let me in"))
        ends = time.monotonic() + PATIENCE_S
        while reason not in caplog.text:
            assert time.monotonic() < ends, caplog.text
            time.sleep(0.01)
    # It may retry for a while, because an acceptor may also have refused it for too many connections.
    assert not request.done or isinstance(request.error, PeerLost)
    assert "127.0.0.1" in caplog.text
    assert backends[0]._engine.refused() >= 1
    exchange(backends[2], backends[0])


def test_credentials_that_do_not_fit_are_refused_at_once(make: Make) -> None:
    (backend,) = make(2, only=(0,))
    issuer = Issuer(2)
    mine, cards = issuer.credentials(0), [backend.card()] * 2
    for wrong in (*unfit_credentials(issuer), None):
        with pytest.raises(UsageError, match="credentials"):
            backend.connect(cards, wrong)
    backend.connect(cards, mine)


def test_a_rank_at_the_address_of_another_is_not_accepted_in_its_place(make: Make) -> None:
    issuer = Issuer(3)
    backends = make(3)
    cards = [backend.card() for backend in backends]
    backends[0].connect([cards[0], cards[2], cards[2]], issuer.credentials(0))
    for backend in backends[1:]:
        backend.connect(cards, issuer.credentials(backend.rank))
    request = backends[0].start_send(1, 5, 1, memoryview(b"x"))
    wait_for_all(request)
    assert isinstance(request.error, PeerLost)
    assert "its certificate is rank 2's" in str(request.error)
    exchange(backends[1], backends[2])
