"""Members that break the protocol take no memory, over framed backends and in the engine."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, world
from tests.support.native_ranks import ended, memory_kib
from tests.support.processes import run_processes

import unisono as uni
from unisono.backends.framed import FramedBackend, FrameTransport
from unisono.backends.framed.frames import Head, Kind
from unisono.backends.local import LocalBackend
from unisono.comm.communicator import Communicator
from unisono.core.clock import RealRuntime
from unisono.core.envelope import Lane, Tags
from unisono.errors import ProtocolError
from unisono.messaging.backend import Capabilities
from unisono.messaging.credit import CONTROL_BYTES_MAX

__all__ = ["world"]


# -- a framed backend and a hostile peer ------------------------------------------------------------------


class _NoWire(FrameTransport):
    """A transport that drops all frames."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        self.sent += 1

    def is_own_thread(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _Post(FramedBackend):
    """A backend whose peers are played by the test."""

    capabilities = Capabilities("test")

    def __init__(self, config: uni.Config | None = None) -> None:
        super().__init__(0, 2, config or uni.Config(), RealRuntime())
        self._transport = _NoWire()


def frame(kind: Kind, header: bytes = b"", data: bytes = b"", **fields: int) -> memoryview:
    return memoryview(Head(kind, header_bytes=len(header), **fields).packed() + header + data)


def eager(nbytes: int, lane: Lane = Lane.BULK, tag: int = 5) -> memoryview:
    return frame(Kind.EAGER, data=bytes(nbytes), lane=lane, context=9, tag=tag, nbytes=nbytes)


HOSTILE = {
    "eager messages beyond the credit": lambda n: eager(16_000),
    "empty ones": lambda n: eager(0),
    "control messages that no rank reads": lambda n: eager(16_000, Lane.CONTROL, Tags.CONTROL | 9),
    "offers without end": lambda n: frame(Kind.RTS, rendezvous_id=n, context=9, tag=5, nbytes=1 << 20),
    "an offer made twice": lambda n: frame(Kind.RTS, rendezvous_id=1, context=9, tag=5, nbytes=1 << 20),
    "a control message of 3 GiB": lambda n: frame(
        Kind.RTS, rendezvous_id=n, tag=Tags.CONTROL, nbytes=3 << 30
    ),
    "a frame of a call of 3 GiB": lambda n: frame(Kind.RTS, rendezvous_id=n, tag=Tags.RPC, nbytes=3 << 30),
    "a header of 60 KiB": lambda n: frame(Kind.EAGER, header=bytes(60_000), context=9, tag=5),
    "a request for what was not offered": lambda n: frame(Kind.CTS, rendezvous_id=n),
    "credit that was not used": lambda n: frame(Kind.CREDIT, credit_bulk=1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_peer_of_a_framed_backend_breaks_the_protocol_before_it_takes_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.messaging.protocol.RTS_MAX", 1000)
    backend = _Post()
    say = HOSTILE[name]

    def speak() -> None:
        for number in range(20_000):
            backend.arrive(1, say(number))

    with pytest.raises(ProtocolError):
        speak()
    assert backend._transport.sent == 0, "the number of replies is bounded"
    backend.broken(1, ProtocolError("as a wire says"))
    backend.close()


@pytest.mark.parametrize("kind", ["backend", "local", "simulated"])
@pytest.mark.parametrize("sync", [False, True])
def test_a_message_to_oneself_leaves_from_memory_of_any_type(kind: str, sync: bool) -> None:
    x = np.arange(5.0) / 3

    def program(backend: Any) -> list[float]:
        into = np.zeros(5)
        backend.start_send(0, 9, 5, x.data, sync=sync)
        assert backend.start_recv(0, 9, 5, memoryview(into).cast("B")).done
        backend.start_send(0, 9, 6, x.data, sync=sync)
        assert backend.start_recv(0, 9, 6, None).data == x.tobytes()
        return into.tolist()

    if kind == "simulated":
        assert uni.simulate(lambda comm: program(comm.backend), 1).results == [x.tolist()]
        return
    backend = _Post() if kind == "backend" else LocalBackend.create(1)[0]
    assert program(backend) == x.tolist()
    if kind == "backend":
        backend.lost(1, "the test is over")
    backend.close()


def test_a_users_limit_does_not_bound_the_control_messages_of_a_framed_backend() -> None:
    backend = _Post(uni.Config(recv_bytes_max=60, message_bytes_max=60))
    backend.arrive(1, eager(1000, Lane.CONTROL, Tags.CONTROL))
    taken = backend.start_recv(1, 9, Tags.CONTROL, None)
    assert taken.done
    assert taken.data == bytes(1000)
    assert backend.start_send(1, 9, Tags.RPC, memoryview(bytes(1000)), lane=Lane.CONTROL).done
    backend.lost(1, "the test is over")
    backend.close()


def test_a_framed_backend_queues_rts_that_its_peer_may_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends know the limit; RTS that wait keep their order, and no message overtakes them."""
    monkeypatch.setattr("unisono.messaging.protocol.RTS_MAX", 3)
    backend = _Post()
    data = memoryview(bytes(100_000))
    sends = [backend.start_send(1, 9, 5, data) for _ in range(5)]
    short = backend.start_send(1, 9, 5, memoryview(b"short"))
    assert backend._transport.sent == 3
    assert not short.done, "it would overtake the RTS that wait"
    assert sends[4].cancel()
    assert backend._transport.sent == 3, "no RTS was sent for it"
    for number in (1, 2):
        backend.arrive(1, frame(Kind.CTS, rendezvous_id=number))
        backend.arrive(1, frame(Kind.FIN, rendezvous_id=number))
    assert [request.done for request in sends] == [True, True, False, False, True]
    assert backend._transport.sent == 3 + 2 + 2, "two pieces, and the two RTS that waited"
    for number in (3, 4, 6):
        backend.arrive(1, frame(Kind.CTS, rendezvous_id=number))
        backend.arrive(1, frame(Kind.FIN, rendezvous_id=number))
    assert short.done
    assert backend.start_send(1, 9, 5, memoryview(b"short")).done
    assert not backend.endpoint.protocol.is_sending()
    backend.lost(1, "the test is over")
    backend.close()


# -- a hostile member -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["shm", "tcp", *(pytest.param(one, marks=pytest.mark.more) for one in ("quic", "gloo", "iroh"))]
)
def test_a_control_message_of_3_gib_ends_its_sender_and_takes_no_memory(kind: str) -> None:
    def program(comm: Communicator) -> Any:
        if comm.rank == 1:
            assert comm.recv_bytes(0) == b"go on"
            comm.backend.check_length = lambda *_: None  # type: ignore[method-assign]
            memory = memoryview(mmap.mmap(-1, 3 << 30))  # its pages are never touched
            request = comm.backend.start_send(0, 0, Tags.CONTROL, memory, lane=Lane.CONTROL)
            gone = threading.Event()
            request.notify(gone.set)
            gone.wait(20)
            return None
        before = memory_kib()
        comm.send(b"go on", 1)
        cause = r"rank 1.*broke the protocol.*exceeds control_bytes_max"
        with pytest.raises(uni.PeerLost, match=cause) as lost:
            comm.recv(np.empty(1), 1, timeout=20)
        assert isinstance(lost.value, uni.PeerLost)
        return memory_kib() - before

    results = run_processes(program, 2, kind=kind)
    assert isinstance(results[0], int), results
    assert results[0] < 64 * 1024


@pytest.mark.parametrize("tag", [Tags.CONTROL, Tags.CONTROL | 5, Tags.RPC, 7])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_message_that_is_too_long_is_refused_before_it_is_sent(
    world: MakeWorld, kind: str, tag: int
) -> None:
    limit = CONTROL_BYTES_MAX if tag != 7 else 3 * CONTROL_BYTES_MAX
    comms = world(2, kind, message_bytes_max=3 * CONTROL_BYTES_MAX)
    sender, receiver = (comm.backend for comm in comms)
    data = memoryview(bytearray(limit + 1))
    with pytest.raises(uni.UsageError, match=rf"a message of {limit + 1} bytes .*; allowed: {limit} "):
        sender.start_send(1, 99, tag, data)
    into = bytearray(limit)
    receive = receiver.start_recv(0, 99, tag, memoryview(into))
    data[-2] = 5
    send = sender.start_send(1, 99, tag, data[:-1])
    assert ended(sender, send).error is ended(receiver, receive).error is None
    assert into[-1] == 5


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_goodbye_is_eager_whatever_the_eager_limit(world: MakeWorld, kind: str) -> None:
    """It follows messages in their lane. An RTS would be withdrawn when its sender ends, while it is read."""
    sender, receiver = (comm.backend for comm in world(2, kind, eager_bytes=0))
    send = sender.start_send(1, 99, Tags.CONTROL, memoryview(b"left"))
    assert ended(sender, send).error is None  # before any receive
    into = bytearray(4)
    receive = receiver.start_recv(0, 99, Tags.CONTROL, memoryview(into))
    assert ended(receiver, receive).error is None
    assert into == b"left"
