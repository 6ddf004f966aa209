"""The backend against members that send nonsense: it decides what to believe for Gloo, MPI and QUIC."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque

import pytest

from unisono.backends.framed import _HEAD, FramedBackend, FrameTransport, Head, Kind
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.core.envelope import HEADER_BYTES_MAX, Lane
from unisono.errors import PeerLost, ProtocolError
from unisono.messaging.backend import Capabilities
from unisono.messaging.credit import ENVELOPE_BYTES

CONFIG = Config(flush_s=0.0)
CONTEXT, TAG = 7, 3


class Belt(FrameTransport):
    """Frames between ranks of this process, delivered when the test says so."""

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
        self._wire = Belt(rank, all_)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("station")

    def carry(self, others: dict[int, Station]) -> None:
        """Bring what was sent to where it belongs; what goes to ranks that are only posed as gets lost."""
        while self._wire.queue:
            peer, frame, payload = self._wire.queue.popleft()
            if peer not in others:
                continue
            place = others[peer].arrive(self.rank, memoryview(frame))
            if place is not None and payload is not None:
                place[0][:] = payload
                place[1]()


def exchange(a: Station, b: Station) -> None:
    """Both ways, at once and by an offer: those who are sound still reach each other."""
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
    return memoryview(_HEAD.pack(*head) + body)


@pytest.fixture
def pair() -> list[Station]:
    stations: list[Station] = []
    stations.append(Station(0, stations))
    stations.append(Station(1, stations))
    return stations


HUGE = 1 << 62
NONSENSE = {
    "half a head": memoryview(b"\1" * (_HEAD.size - 1)),
    "no kind": frame(Head(0)),
    "a kind that there is not": frame(Head(200)),
    "less than it says": frame(Head(Kind.EAGER, nbytes=10), b"123"),
    "more than it says": frame(Head(Kind.EAGER, nbytes=1), b"123"),
    "a message without measure": frame(Head(Kind.OFFER, nbytes=HUGE)),
    "an eager message that is not short": frame(Head(Kind.EAGER, nbytes=1 << 20), bytes(1 << 20)),
    "a header without measure": frame(
        Head(Kind.OFFER, header_bytes=HEADER_BYTES_MAX + 1), bytes(HEADER_BYTES_MAX + 1)
    ),
    "a lane that there is not": frame(Head(Kind.EAGER, lane=9)),
    "credit that was not used": frame(Head(Kind.CREDIT, credit_bulk=1)),
    "more bytes than a piece has": frame(Head(Kind.PIECE, nbytes=HUGE)),
    "the end of what was not sent": frame(Head(Kind.LANDED, number=5)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_link_and_takes_no_memory(pair: list[Station], what: str) -> None:
    victim = pair[0]
    waiting = victim.start_recv(5, CONTEXT, TAG, None)
    tracemalloc.start()
    with pytest.raises(ProtocolError) as error:
        victim.arrive(5, NONSENSE[what])
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 256 * 1024
    victim.broken(5, error.value)
    assert isinstance(waiting.error, PeerLost)
    assert isinstance(waiting.error.__cause__, ProtocolError)
    exchange(*pair)


def test_who_sends_more_than_its_credit_is_broken_and_takes_no_more_memory(
    pair: list[Station],
) -> None:
    """A correct sender waits; whoever does not wait is no member that could be trusted."""
    victim, one = pair[0], 1000
    fit = CONFIG.eager_credit_bytes // (one + ENVELOPE_BYTES)
    message = frame(Head(Kind.EAGER, context=CONTEXT, tag=TAG, nbytes=one), bytes(one))
    for _ in range(3):  # what is received may come again
        for _ in range(fit):
            victim.arrive(5, message)
        for _ in range(fit):
            assert victim.start_recv(5, CONTEXT, TAG, None).done
    for _ in range(fit):
        victim.arrive(5, message)
    with pytest.raises(ProtocolError, match="unasked, its credit is"):
        victim.arrive(5, message)
    exchange(*pair)


def test_an_offer_that_comes_twice_is_refused(pair: list[Station]) -> None:
    victim = pair[0]
    offer = frame(Head(Kind.OFFER, number=4, context=CONTEXT, tag=TAG, nbytes=1 << 20))
    victim.arrive(5, offer)
    with pytest.raises(ProtocolError, match="twice"):
        victim.arrive(5, offer)
    assert not victim.start_recv(5, CONTEXT, TAG, memoryview(bytearray(1 << 20))).done  # it is asked for now
    with pytest.raises(ProtocolError, match="twice"):
        victim.arrive(5, offer)
    exchange(*pair)


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_of_a_member_hurt_nobody_else(pair: list[Station], seed: int) -> None:
    victim, rng = pair[0], random.Random(seed)
    for member in range(2, 8):
        receives = [victim.start_recv(member, CONTEXT, TAG, memoryview(bytearray(64))) for _ in range(3)]
        try:
            for _ in range(60):
                number = rng.choice((0, 1, 2, 5, 63, 1 << 20, (1 << 32) - 1, HUGE))
                body = rng.randbytes(rng.choice((0, 0, 8, 64, 300)))
                head = Head(
                    rng.choice(list(Kind)),
                    rng.choice((0, 0, 1, 2)),
                    rng.choice((0, 11, 255)),
                    header_bytes=rng.choice((0, 0, 3, len(body))),
                    number=rng.choice((0, 1, 2)),
                    context=rng.choice((CONTEXT, CONTEXT, 0, number)),
                    tag=rng.choice((TAG, TAG, number)),
                    nbytes=rng.choice((0, len(body), len(body), number)),
                    offset=rng.choice((0, 0, number)),
                    credit_bulk=rng.choice((0, 0, 0, 0, 1)),
                )
                place = victim.arrive(member, frame(head, body))
                if place is not None:
                    place[0][:] = bytes(len(place[0]))
                    place[1]()
        except ProtocolError as error:
            victim.broken(member, error)
        else:
            victim.lost(member, "closed")
        assert all(receive.done for receive in receives)
    exchange(*pair)
