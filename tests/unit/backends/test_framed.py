"""FramedBackend against peers that send invalid frames: Gloo, MPI and QUIC rely on its checks."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque

import pytest

from unisono.backends.framed import FramedBackend, FrameTransport
from unisono.backends.framed.frames import Head, Kind
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.core.envelope import HEADER_BYTES_MAX, Lane
from unisono.errors import PeerLost, ProtocolError
from unisono.messaging.backend import Capabilities
from unisono.messaging.credit import ENVELOPE_BYTES

CONFIG = Config(flush_s=0.0)
CONTEXT, TAG = 7, 3


class Belt(FrameTransport):
    """A transport of frames between ranks of this process, which the test delivers."""

    def __init__(self, rank: int, all_: list[Station]) -> None:
        self.rank, self.all, self.queue = rank, all_, deque()

    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        self.queue.append((peer, frame, None if payload is None else bytes(payload)))

    def is_own_thread(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Station(FramedBackend):
    def __init__(self, rank: int, all_: list[Station]) -> None:
        super().__init__(rank, len(all_) + 8, CONFIG, RealRuntime())
        self._transport = Belt(rank, all_)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("station")

    def carry(self, others: dict[int, Station]) -> None:
        """Deliver all frames that were sent; frames to ranks that the test plays itself are dropped."""
        while self._transport.queue:
            peer, frame, payload = self._transport.queue.popleft()
            if peer not in others:
                continue
            expected = others[peer].arrive(self.rank, memoryview(frame))
            if expected is not None and payload is not None:
                expected[0][:] = payload
                expected[1]()


def exchange(a: Station, b: Station) -> None:
    """Send both ways, eagerly and by rendezvous: correct ranks still reach each other."""
    both = {a.rank: a, b.rank: b}
    for one, other in ((a, b), (b, a)):
        for data in (bytes([one.rank]) * 100, bytes([one.rank + 1]) * 100_000):
            receive = other.start_recv(one.rank, CONTEXT, TAG, None)
            send = one.start_send(other.rank, CONTEXT, TAG, memoryview(data))
            for _ in range(4):
                one.carry(both)
                other.carry(both)
            assert send.done
            assert bytes(receive.data) == data


def frame(head: Head, body: bytes = b"") -> memoryview:
    return memoryview(head.packed() + body)


@pytest.fixture
def pair() -> list[Station]:
    stations: list[Station] = []
    stations.append(Station(0, stations))
    stations.append(Station(1, stations))
    return stations


HUGE = 1 << 62
INVALID = {
    "half a head": memoryview(b"\1" * (len(Head(0).packed()) - 1)),
    "kind 0": frame(Head(0)),
    "an unknown kind": frame(Head(200)),
    "less than it says": frame(Head(Kind.EAGER, nbytes=10), b"123"),
    "more than it says": frame(Head(Kind.EAGER, nbytes=1), b"123"),
    "a message of 4 EiB": frame(Head(Kind.RTS, nbytes=HUGE)),
    "an eager message above the eager limit": frame(Head(Kind.EAGER, nbytes=1 << 20), bytes(1 << 20)),
    "a header above its limit": frame(
        Head(Kind.RTS, header_bytes=HEADER_BYTES_MAX + 1), bytes(HEADER_BYTES_MAX + 1)
    ),
    "an unknown lane": frame(Head(Kind.EAGER, lane=9)),
    "credit that was not used": frame(Head(Kind.CREDIT, credit_bulk=1)),
    "a piece above its limit": frame(Head(Kind.DATA, nbytes=HUGE)),
    "a FIN for what was not sent": frame(Head(Kind.FIN, rendezvous_id=5)),
}


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_frame_ends_the_link_and_takes_no_memory(pair: list[Station], what: str) -> None:
    victim = pair[0]
    waiting = victim.start_recv(5, CONTEXT, TAG, None)
    tracemalloc.start()
    with pytest.raises(ProtocolError) as error:
        victim.arrive(5, INVALID[what])
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 256 * 1024
    victim.broken(5, error.value)
    assert isinstance(waiting.error, PeerLost)
    assert isinstance(waiting.error.__cause__, ProtocolError)
    exchange(*pair)


def test_a_peer_that_exceeds_its_credit_breaks_the_protocol_and_takes_no_more_memory(
    pair: list[Station],
) -> None:
    """A correct sender waits for credit."""
    victim, one = pair[0], 1000
    fit = CONFIG.eager_credit_bytes // (one + ENVELOPE_BYTES)
    message = frame(Head(Kind.EAGER, context=CONTEXT, tag=TAG, nbytes=one), bytes(one))
    for _ in range(3):  # received bytes may be sent again
        for _ in range(fit):
            victim.arrive(5, message)
        for _ in range(fit):
            assert victim.start_recv(5, CONTEXT, TAG, None).done
    for _ in range(fit):
        victim.arrive(5, message)
    with pytest.raises(ProtocolError, match="of eager messages; its credit is"):
        victim.arrive(5, message)
    exchange(*pair)


def test_a_repeated_rts_is_refused(pair: list[Station]) -> None:
    victim = pair[0]
    rts = frame(Head(Kind.RTS, rendezvous_id=4, context=CONTEXT, tag=TAG, nbytes=1 << 20))
    victim.arrive(5, rts)
    with pytest.raises(ProtocolError, match="a second RTS"):
        victim.arrive(5, rts)
    assert not victim.start_recv(5, CONTEXT, TAG, memoryview(bytearray(1 << 20))).done  # its CTS is sent now
    with pytest.raises(ProtocolError, match="a second RTS"):
        victim.arrive(5, rts)
    exchange(*pair)


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_of_a_peer_do_not_affect_other_ranks(pair: list[Station], seed: int) -> None:
    victim, rng = pair[0], random.Random(seed)
    for member in range(2, 8):
        receives = [victim.start_recv(member, CONTEXT, TAG, memoryview(bytearray(64))) for _ in range(3)]
        try:
            for _ in range(60):
                value = rng.choice((0, 1, 2, 5, 63, 1 << 20, (1 << 32) - 1, HUGE))
                body = rng.randbytes(rng.choice((0, 0, 8, 64, 300)))
                head = Head(
                    rng.choice(list(Kind)),
                    rng.choice((0, 0, 1, 2)),
                    rng.choice((0, 11, 255)),
                    header_bytes=rng.choice((0, 0, 3, len(body))),
                    rendezvous_id=rng.choice((0, 1, 2)),
                    context=rng.choice((CONTEXT, CONTEXT, 0, value)),
                    tag=rng.choice((TAG, TAG, value)),
                    nbytes=rng.choice((0, len(body), len(body), value)),
                    offset=rng.choice((0, 0, value)),
                    credit_bulk=rng.choice((0, 0, 0, 0, 1)),
                )
                payload = victim.arrive(member, frame(head, body))
                if payload is not None:
                    payload[0][:] = bytes(len(payload[0]))
                    payload[1]()
        except ProtocolError as error:
            victim.broken(member, error)
        else:
            victim.lost(member, "closed")
        assert all(receive.done for receive in receives)
    exchange(*pair)
