"""The frames that a rank sends on its sockets, one by one; the test is the peer.

Here the test forces orders of frames that two engines produce only rarely.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.member import BULK, CONTROL, HEAD, Member, exactly
from tests.support.native_ranks import (
    CONTEXT,
    CTS,
    DATA,
    EAGER,
    FIN,
    HEARTBEAT,
    RTS,
    SECRET,
    WITHDRAW,
    ended,
    head,
)

from unisono.backends.native.backend import NativeBackend
from unisono.config import Config

RENDEZVOUS_ID = 1 << 32 | 5
MATCHED, WITHDRAWN = 0, 1

Make = Callable[..., list[NativeBackend]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(*ranks)`: engines of these ranks of a world of 2, over TCP; both ranks by default."""
    tmp_path.chmod(0o700)
    made: list[NativeBackend] = []

    def start(*ranks: int) -> list[NativeBackend]:
        # No rank may be declared dead because this machine is busy.
        how: dict[str, Any] = {"shm": False, "neighbours": False, "config": Config(silence_s=20.0)}
        made.extend(NativeBackend(rank, 2, str(tmp_path), SECRET, **how) for rank in ranks or (0, 1))
        cards = [backend.card() for backend in made] * (2 // len(made))
        for backend in made:
            backend.connect(cards)
        return made

    yield start
    for backend in made:
        backend.close()


def offer(nbytes: int, tag: int = 7) -> bytes:
    return head(RTS, context=CONTEXT, tag=tag, nbytes=nbytes) + struct.pack("<QQ", RENDEZVOUS_ID, 0)


def next_head(member: Member, lane: int) -> tuple[int, int, int, int]:
    """Kind, dtype, context and bytes of the next frame that is not a heartbeat."""
    while True:
        word, dtype, _, _, context, _, nbytes = HEAD.unpack(exactly(member.lanes[lane], HEAD.size))
        if word & 0xFF != HEARTBEAT:
            return word & 0xFF, dtype, context, nbytes


def id_of_rts(member: Member) -> int:
    """The rendezvous id of the next RTS."""
    assert next_head(member, BULK)[0] == RTS
    return int(struct.unpack("<QQ", exactly(member.lanes[BULK], 16))[0])


def test_an_empty_rendezvous_ends_only_with_its_fin(make: Make) -> None:
    (backend,) = make(0)
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        receive = backend.start_recv(1, CONTEXT, 7, None)
        member.send(offer(0))
        assert next_head(member, CONTROL)[:3:2] == (CTS, RENDEZVOUS_ID)
        # The sender withdraws: the receive that accepted the RTS waits for another message.
        member.send(head(WITHDRAW, context=RENDEZVOUS_ID))
        assert next_head(member, CONTROL)[:3] == (FIN, WITHDRAWN, RENDEZVOUS_ID)
        assert not receive.done
        member.send(head(EAGER, context=CONTEXT, tag=7, nbytes=3) + b"yes")
        assert ended(backend, receive).data == b"yes"


def test_an_empty_rendezvous_whose_fin_comes_is_received(make: Make) -> None:
    (backend,) = make(0)
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        receive = backend.start_recv(1, CONTEXT, 7, None)
        member.send(offer(0))
        assert next_head(member, CONTROL)[:3:2] == (CTS, RENDEZVOUS_ID)
        member.send(head(DATA, context=RENDEZVOUS_ID))
        assert ended(backend, receive).data == b""
        assert next_head(member, CONTROL)[:3] == (FIN, MATCHED, RENDEZVOUS_ID)


def test_an_empty_synchronous_send_is_sent_after_its_cts(make: Make) -> None:
    (backend,) = make(0)
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        send = backend.start_send(1, CONTEXT, 7, memoryview(b""), sync=True)
        rendezvous_id = id_of_rts(member)
        assert not send.done
        member.send(head(CTS, context=rendezvous_id), CONTROL)
        assert next_head(member, BULK) == (DATA, 0, rendezvous_id, 0)
        assert ended(backend, send).error is None
        member.send(head(FIN, dtype=MATCHED, context=rendezvous_id), CONTROL)


def test_an_empty_synchronous_send_that_was_cancelled_never_leaves(make: Make) -> None:
    (backend,) = make(0)
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        send = backend.start_send(1, CONTEXT, 7, memoryview(b""), sync=True)
        rendezvous_id = id_of_rts(member)
        send.cancel()
        assert ended(backend, send).error is not None
        # Too late: our CTS crosses the sender's withdrawal.
        member.send(head(CTS, context=rendezvous_id), CONTROL)
        assert next_head(member, BULK)[:3:2] == (WITHDRAW, rendezvous_id)
        member.send(head(FIN, dtype=WITHDRAWN, context=rendezvous_id), CONTROL)
        # The link still works, and no other frame was sent.
        backend.start_send(1, CONTEXT, 7, memoryview(b"next"))
        assert next_head(member, BULK)[::3] == (EAGER, 4)


def test_a_long_message_may_be_confirmed_as_soon_as_its_last_byte_is_read(make: Make) -> None:
    """The FIN then arrives before the sender has noticed that its last bytes are written."""
    (backend,) = make(0)
    nbytes = 16 << 20
    data = (np.arange(nbytes) % 251).astype(np.uint8)
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        for _ in range(4):
            send = backend.start_send(1, CONTEXT, 7, memoryview(data))
            rendezvous_id = id_of_rts(member)
            reading = threading.Thread(target=read_and_confirm, args=(member, rendezvous_id, nbytes))
            reading.start()
            assert ended(backend, send).error is None
            reading.join()


def read_and_confirm(member: Member, rendezvous_id: int, nbytes: int) -> None:
    sock = member.lanes[BULK]
    member.send(head(CTS, context=rendezvous_id), CONTROL)
    answer = head(FIN, dtype=MATCHED, context=rendezvous_id)
    while nbytes:
        kind, _, context, left = next_head(member, BULK)
        assert (kind, context) == (DATA, rendezvous_id)
        nbytes -= left
        while left:
            left -= len(sock.recv(min(left, 1 << 18), socket.MSG_WAITALL))
    member.lanes[CONTROL].sendall(answer)


def test_long_messages_both_ways_at_once_all_arrive(make: Make) -> None:
    one, other = make()
    nbytes = (16 << 20) + 3
    rows = [(np.arange(nbytes) * 7 + rank).astype(np.uint8) for rank in range(2)]
    for _ in range(3):
        into = [np.zeros(nbytes, np.uint8) for _ in range(2)]
        works = []
        for me, peer in ((one, other), (other, one)):
            works.append((me, me.start_recv(peer.rank, CONTEXT, 1, memoryview(into[me.rank]))))
            works.append((me, me.start_send(peer.rank, CONTEXT, 1, memoryview(rows[me.rank]))))
        for backend, request in works:
            assert ended(backend, request).error is None
        assert np.array_equal(into[0], rows[1])
        assert np.array_equal(into[1], rows[0])
