"""Peers in a QUIC world that break the protocol; test_native_threats.py has the same for TCP.

Such a peer has a certificate and sends arbitrary bytes on its streams (tests/native/quic_member.cpp). At the
end of every test the other ranks still work together.
"""

from __future__ import annotations

import random
import signal
import struct
import time

import pytest
from tests.support.credentials import Issuer
from tests.support.native_ranks import (
    BOMBS,
    DATA,
    EAGER,
    HEARTBEAT,
    RTS,
    WITHDRAW,
    head,
    memory_kib,
    random_frame,
)
from tests.support.quic_member import CONTROL_STREAM, DATA_STREAM, MESSAGES_STREAM, QuicMember
from tests.support.quic_ranks import PATIENCE_S, Make, exchange, make, wait_for_all
from tests.support.ranks import IS_SANITIZED

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card
from unisono.config import Config
from unisono.errors import PeerLost, ProtocolError

__all__ = ["make"]

PATIENT = Config(silence_s=20.0)  # no rank may be declared dead because this machine is busy


def card_without_address(backend: NativeBackend) -> Card:
    """A card for a hostile peer, which opens its links itself, so that no address or process is needed."""
    return backend.card()._replace(pid=0)


def first_and_last(make: Make, issuer: Issuer, size: int) -> list[NativeBackend]:
    """The first and the last rank of a world whose other ranks are hostile peers."""
    first, last = made = make(size, only=(0, size - 1), config=PATIENT)
    cards = [first.card()] + [card_without_address(first)] * (size - 2) + [last.card()]
    for rank in made:
        rank.connect(cards, issuer.credentials(rank.rank))
    exchange(*made)
    return made


def lost(backend: NativeBackend, rank: int) -> PeerLost:
    request = backend.start_send(rank, 5, 0, memoryview(b"x"))
    wait_for_all(request)
    assert isinstance(request.error, PeerLost)
    return request.error


WRONG_STREAM = {
    "data among messages": (head(DATA, nbytes=8) + bytes(8), MESSAGES_STREAM),
    "data in the control stream": (head(DATA, nbytes=8) + bytes(8), CONTROL_STREAM),
    "a message among data": (head(EAGER, nbytes=8) + bytes(8), DATA_STREAM),
    "a heartbeat among data": (head(HEARTBEAT), DATA_STREAM),
}


def test_a_forged_length_ends_its_link_and_takes_no_memory(make: Make) -> None:
    bombs = {
        name: (
            bomb * (8 if "beyond" in name else 1),
            DATA_STREAM if name.startswith("data") else MESSAGES_STREAM,
        )
        for name, bomb in BOMBS.items()
    }
    bombs |= WRONG_STREAM
    size = len(bombs) + 2
    issuer = Issuer(size)
    first, last = first_and_last(make, issuer, size)
    before = memory_kib()
    for rank, (name, (bomb, stream)) in enumerate(bombs.items(), 1):
        with QuicMember(first.card(), issuer.credentials(rank), rank, 0, size) as member:
            member.send(bomb, stream)
            # The peer is told that its link was ended, and the reason.
            assert "broke the protocol" in member.ending(), name
            error = lost(first, rank)
            assert isinstance(error.__cause__, ProtocolError), (name, error)
    assert IS_SANITIZED or memory_kib() - before < 16 * 1024
    exchange(first, last, 2)


def test_random_frames_of_a_peer_end_only_its_own_link(make: Make) -> None:
    turns = 40
    size = turns + 2
    issuer = Issuer(size)
    first, last = first_and_last(make, issuer, size)
    rng = random.Random(11)
    before = memory_kib()
    for rank in range(1, turns + 1):
        with QuicMember(first.card(), issuer.credentials(rank), rank, 0, size) as member:
            for _ in range(rng.randrange(1, 12)):
                member.send(random_frame(rng, size), rng.randrange(3))
    exchange(first, last, 2)
    assert IS_SANITIZED or memory_kib() - before < 16 * 1024


def test_a_peer_that_queries_and_reads_nothing_is_dropped_and_takes_little_memory(make: Make) -> None:
    """Each RTS and its withdrawal are answered; a peer that never reads would queue answers without bound."""
    issuer = Issuer(3)
    first, last = first_and_last(make, issuer, 3)
    before = memory_kib()
    with QuicMember(first.card(), issuer.credentials(1), 1, 0, 3, is_deaf=True) as member:
        uses, ends = 0, time.monotonic() + 2 * PATIENCE_S
        while first.links()[1] != "down" and time.monotonic() < ends:
            frames = []
            for _ in range(2000):
                uses += 1
                frames.append(head(RTS, context=5, nbytes=100_000) + struct.pack("<QQ", uses << 32, 0))
                frames.append(head(WITHDRAW, context=uses << 32))
            member.send(b"".join(frames))
        error = lost(first, 1)
    assert "does not read the replies" in str(error)
    assert IS_SANITIZED or memory_kib() - before < 64 * 1024
    exchange(first, last, 2)


@pytest.mark.parametrize("is_deaf", [True, False])
def test_a_peer_that_reads_nothing_does_not_grow_the_senders_memory(make: Make, is_deaf: bool) -> None:
    """The sender stops at the peer's credit, and loses the peer by its silence once the peer is stopped."""
    issuer = Issuer(2)
    (first,) = make(2, only=(0,))
    first.connect([first.card(), card_without_address(first)], issuer.credentials(0))
    with QuicMember(first.card(), issuer.credentials(1), 1, 0, 2, is_deaf=is_deaf) as member:
        data = memoryview(bytes(16 * 1024))
        before = memory_kib()
        sends = [first.start_send(1, 5, 0, data) for _ in range(4096)]  # 64 MiB
        assert IS_SANITIZED or memory_kib() - before < 24 * 1024
        assert not sends[-1].done
        member.signal(signal.SIGSTOP)
        wait_for_all(sends[-1])
        member.signal(signal.SIGCONT)
    assert isinstance(sends[-1].error, PeerLost)
    assert "silent" in str(sends[-1].error)
