"""The corpus of every decoder, replayed: in Python directly, in the engine by a peer that sends raw bytes."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuzz import corpus
from tests.fuzz.decoders import CORPUS, DECODERS, feed, mutated, seeds

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card
from unisono.config import Config
from unisono.messaging.peer_down import PeerDown

SECRET = b"the job's secret"
PATIENCE_S = 30
# native/link/shm_link.hpp: LinkMemory
LINK_BYTES, OFFERS_AT, CONTROL_AT, BULK_AT = 536576, 4096, 12288, 45056
SHM, TCP = 0, 1
BULK, CONTROL = 0, 1


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_gives_a_value_or_its_own_error(name: str) -> None:
    for data in seeds(name):
        feed(name, data)
    stream = mutated(seeds(name), random.Random(7))
    for _ in range(2000):
        feed(name, next(stream))


def test_the_corpus_holds_what_peers_say_today() -> None:
    """Otherwise a message with a new layout would still be fuzzed in its old one."""
    for decoder, made in corpus.all_seeds().items():
        for name, data in made.items():
            kept = (CORPUS / decoder / f"{name}.bin").read_bytes()
            if name != "hello":
                assert kept == data, f"{decoder}/{name}: run python -m tests.fuzz.corpus"


class RawPeer:
    """A rank that knows the secret and the handshake, and then sends given bytes."""

    def __init__(self, rank: int, size: int, card: Card) -> None:
        self._rank, self._size, self._card = rank, size, card

    def call(self, medium: int, lane: int, flags: int = 0, memory: int = -1) -> socket.socket:
        """Do the handshake; return the connection."""
        if medium == SHM:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(PATIENCE_S)
            sock.connect(self._card.unix_path)
        else:
            sock = socket.create_connection((self._card.address, self._card.port), PATIENCE_S)
        hello = struct.pack(
            "<8sIIIIBBB5xQ32s",
            b"unisono\n",
            2,
            self._size,
            self._rank,
            0,
            medium,
            lane,
            flags,
            Config().eager_credit_bytes,
            os.urandom(32),
        )
        sock.sendall(hello)
        nonce, proof = struct.unpack("32s32s", _exactly(sock, 64))
        assert proof == hmac.digest(SECRET, b"acceptor" + hello + nonce, "sha256")
        introduction = hmac.digest(SECRET, b"opener" + hello + nonce, "sha256") + bytes(24)
        if memory < 0:
            sock.sendall(introduction)
        else:
            page = _sealed(4096)
            socket.send_fds(sock, [introduction], [memory, page])
            os.close(page)
        (admission,) = struct.unpack_from("<I", _exactly(sock, 32))
        assert admission == 0, "a peer that knows the secret is admitted"
        return sock


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece, fds, _, _ = socket.recv_fds(sock, count - len(data), 4)
        for fd in fds:
            os.close(fd)
        assert piece, "the rank closed the connection"
        data += piece
    return data


def _sealed(count: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, count)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _say_by_tcp(peer: RawPeer, data: bytes) -> None:
    flags = data[0] >> 1 & 1
    with peer.call(TCP, CONTROL, flags) as control, peer.call(TCP, BULK, flags) as bulk:
        with contextlib.suppress(OSError):  # the rank may close the connection in the middle
            (bulk, control)[data[0] & 1].sendall(data[1:])


def _say_by_ring(peer: RawPeer, data: bytes) -> None:
    """Lay out the memory as in tests/fuzz/decoders.cpp, then pass it in the handshake."""
    first, lane = data[0], data[0] & 1
    head, word = struct.unpack_from("<QI", data, 2)
    fd = _sealed(LINK_BYTES)
    try:
        with mmap.mmap(fd, LINK_BYTES) as memory:
            at = CONTROL_AT if lane else BULK_AT
            memory[at : at + len(data) - 16] = data[16:]
            if first & 2:
                struct.pack_into("<Q", memory, (2 + lane) * 128, head)
            if first & 4:
                struct.pack_into("<I", memory, (2 + lane) * 128 + 64, word)
            if first & 8:
                struct.pack_into("<I", memory, OFFERS_AT + 4 * (data[14] % 64), word)
            if first & 16:
                struct.pack_into("<I", memory, OFFERS_AT + 4096 + 4 * (data[15] % 64), word)
        peer.call(SHM, CONTROL, memory=fd).close()
    finally:
        os.close(fd)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[NativeBackend, NativeBackend, list[PeerDown]]]:
    """A rank in a world of 64, a well-behaved peer, and the list of the ranks that the rank has lost."""
    tmp_path.chmod(0o700)
    size, lost = 64, []
    one = NativeBackend(0, size, str(tmp_path), SECRET, neighbours=False)
    two = NativeBackend(size - 1, size, str(tmp_path), SECRET, neighbours=False)
    cards = [one.card()] + [Card("elsewhere", "", "127.0.0.1", 1)] * (size - 2) + [two.card()]
    for backend in (one, two):
        backend.connect(cards)
    one.watch(lost.append)
    yield one, two, lost
    two.close()
    one.close()


@pytest.mark.parametrize("medium", ["tcp", "ring"])
def test_a_rank_survives_what_peers_may_say(
    rank: tuple[NativeBackend, NativeBackend, list[PeerDown]], medium: str
) -> None:
    one, two, lost = rank
    say = _say_by_tcp if medium == "tcp" else _say_by_ring
    for number, data in enumerate(seeds(medium), start=1):
        receives = [one.start_recv(number, context, 0, memoryview(bytearray(300))) for context in (1, 7)]
        say(RawPeer(number, one.size, one.card()), data)
        deadline = time.monotonic() + PATIENCE_S
        while not any(down.rank == number for down in lost):
            assert time.monotonic() < deadline, f"input {number} has no end"
            time.sleep(0.001)
        del receives
    words = bytearray(5)
    receive = one.start_recv(one.size - 1, 5, 0, memoryview(words))
    two.start_send(0, 5, 0, memoryview(b"sound"))
    deadline = time.monotonic() + PATIENCE_S
    while not receive.done:
        assert time.monotonic() < deadline, "the rank no longer works"
        time.sleep(0.001)
    assert words == b"sound"


def test_a_rank_survives_what_strangers_may_say(
    rank: tuple[NativeBackend, NativeBackend, list[PeerDown]],
) -> None:
    one, _, lost = rank
    for data in seeds("connector"):
        for family, address in (
            (socket.AF_UNIX, one.card().unix_path),
            (socket.AF_INET, (one.card().address, one.card().port)),
        ):
            with socket.socket(family) as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.connect(address)
                with contextlib.suppress(OSError):
                    stranger.sendall(data[1:])
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.recv(1000)
    assert not lost
