"""Bounds on memory that peers can make a rank use: unknown lengths, objects, control messages, credit.

The tests run on all backends whose ranks can share a process; the conformance kit has the same cases for the
others.
"""

from __future__ import annotations

import gc
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.engines import MakeWorld, outcome, world
from tests.support.native_ranks import ended, memory_kib
from tests.support.processes import run_processes
from tests.support.ranks import run_each, wait_until

import unisono as uni
from unisono.backends.framed import FramedBackend, FrameTransport
from unisono.backends.framed.frames import Head, Kind
from unisono.backends.local import LocalBackend
from unisono.comm.announcement import Announcement
from unisono.comm.communicator import Communicator
from unisono.comm.control import Control
from unisono.comm.control_messages import (
    RANKS_MAX,
    CallReport,
    Goodbye,
    GroupFailure,
    ServiceQuery,
    StallQuery,
    StallReply,
    decode,
    encode,
)
from unisono.comm.early_messages import EARLY_BYTES_MAX, EarlyMessages
from unisono.core.clock import RealRuntime
from unisono.core.envelope import Lane, Tags
from unisono.core.request import Request
from unisono.errors import CollectiveMismatch, PeerAborted, ProtocolError, UsageError
from unisono.messaging.backend import Capabilities
from unisono.messaging.credit import CONTROL_BYTES_MAX
from unisono.rpc import Agent

__all__ = ["world"]

KINDS = ("local", "shm", "tcp")


@pytest.fixture
def make(world: MakeWorld) -> Callable[..., list[Communicator]]:
    """`make(size, kind, **config)`: communicators of this process, by rank."""

    def made(size: int, kind: str, **settings: Any) -> list[Communicator]:
        return uni.local(size, uni.Config(**settings)) if kind == "local" else world(size, kind, **settings)

    return made


# -- unknown lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager_bytes", [0, 16 * 1024])
def test_recv_bytes_takes_up_to_its_limit_and_leaves_what_is_longer(
    make: Callable[..., list[Communicator]], kind: str, eager_bytes: int
) -> None:
    limit = 1000
    comms = make(2, kind, recv_bytes_max=limit, eager_bytes=eager_bytes)
    fits, long = np.arange(limit, dtype=np.uint8), (np.arange(limit + 1) * 3).astype(np.uint8)

    def program(comm: Communicator) -> Any:
        if comm.rank == 0:
            sends = [comm.start.send(x, 1, tag) for tag, x in enumerate((fits, long))]
            uni.wait_all(sends)
            return None
        assert comm.recv_bytes(0, 0) == fits.tobytes()
        for call in (lambda: comm.recv_bytes(0, 1), comm.recv_bytes, comm.start.recv_bytes().wait):
            error = outcome(call)
            assert isinstance(error, UsageError), error
            assert f"{limit + 1} bytes" in str(error)
            assert "recv_bytes_max" in str(error)
            assert "UNISONO_RECV_BYTES_MAX" in str(error)
        assert comm.probe(0, 1).nbytes == limit + 1
        into = np.zeros(limit + 1, np.uint8)  # receives with a buffer are not affected
        comm.recv(into, 0, 1)
        return into

    assert np.array_equal(run_each(program, comms).values()[1], long)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_beyond_the_limit_is_refused_before_anything_is_sent(
    make: Callable[..., list[Communicator]], kind: str
) -> None:
    def program(comm: Communicator) -> None:
        long, short = bytes(2000), bytes(500)
        calls = [
            lambda x: comm.all_gather_object(x),
            lambda x: comm.gather_object(x, 1),
            lambda x: comm.broadcast_object(x, comm.rank),
            lambda x: comm.scatter_object([x, x], comm.rank),
            lambda x: comm.all_to_all_object([b"", x]),
            lambda x: comm.all_reduce_object(x, max),
        ]
        for call in calls:
            error = outcome(lambda call=call: call(long))
            assert isinstance(error, UsageError), error
            assert "recv_bytes_max" in str(error)
        assert comm.all_gather_object(short) == [short, short]
        assert comm.broadcast_object(short, 1) == short
        assert comm.scatter_object([short, b"x"] if comm.rank == 0 else None, 0) == (short, b"x")[comm.rank]
        x = np.arange(2000.0) + comm.rank  # arrays are not objects
        assert [len(part) for part in comm.all_gather_v(x)] == [2000, 2000]

    run_each(program, make(2, kind, recv_bytes_max=1000)).values()


@pytest.mark.parametrize("kind", KINDS)
def test_an_announcement_of_a_huge_object_takes_no_memory(
    make: Callable[..., list[Communicator]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Announcement.encoded

    def lie(said: Announcement, nbytes: int, parts: Any) -> Any:
        row = real(said, nbytes, parts)
        row[8:16] = np.array([1 << 40]).view(np.uint8)
        return row

    def program(comm: Communicator) -> None:
        # On the reference path, where the test can forge rows. One rank may get the error from the other
        # first.
        comm._group.call_log.fast_path_open = False
        with pytest.raises(
            (ProtocolError, PeerAborted), match=rf"announced {1 << 40} bytes; allowed: {1 << 30}"
        ):
            comm.all_gather_object(b"x")

    monkeypatch.setattr(Announcement, "encoded", lie)
    run_each(program, make(2, kind)).values()


@pytest.mark.parametrize("setting", ["recv_bytes_max", "message_bytes_max"])
@pytest.mark.parametrize("kind", [*KINDS, "simulated"])
def test_a_users_limit_does_not_bound_control_messages_and_rpc_frames(
    make: Callable[..., list[Communicator]], kind: str, setting: str
) -> None:
    """Every rank gets the mismatch, whose text exceeds the limit, and calls with longer frames succeed."""

    def program(comm: Communicator) -> list[str]:
        agent = Agent(comm)
        agent.register("echo" * 20, lambda x: x)
        comm.barrier(timeout=20)
        echo = agent.call(1 - comm.rank, "echo" * 20, "x" * 100, timeout=20)
        comm.barrier(timeout=20)
        verb = comm.barrier if comm.rank else lambda timeout: comm.all_reduce(np.ones(3), timeout=timeout)
        error = outcome(lambda: verb(timeout=20))
        agent.close()
        return [echo, type(error).__name__]

    if kind == "simulated":
        ended = uni.simulate(program, 2, config=uni.Config(**{setting: 60})).results
    else:
        ended = run_each(program, make(2, kind, **{setting: 60})).values()
    assert ended == [["x" * 100, "CollectiveMismatch"]] * 2


def test_a_users_limit_does_not_bound_the_control_messages_of_a_framed_backend() -> None:
    backend = _Post(uni.Config(recv_bytes_max=60, message_bytes_max=60))
    backend.arrive(1, eager(1000, Lane.CONTROL, Tags.CONTROL))
    taken = backend.start_recv(1, 9, Tags.CONTROL, None)
    assert taken.done
    assert taken.data == bytes(1000)
    assert backend.start_send(1, 9, Tags.RPC, memoryview(bytes(1000)), lane=Lane.CONTROL).done
    backend.lost(1, "the test is over")
    backend.close()


def test_a_control_message_that_cannot_be_received_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message stays queued: without a pause the control thread would use a whole core for ever."""
    backend, other = LocalBackend.create(2)
    tried: list[float] = []
    real = backend.start_recv

    def start_recv(*args: Any, **kwargs: Any) -> Any:
        tried.append(time.monotonic())
        if len(tried) > 4:
            return real(*args, **kwargs)
        request = Request(0)
        request.fail(uni.UnisonoError("there is no memory for the message"))
        return request

    monkeypatch.setattr(backend, "start_recv", start_recv)
    control = Control(backend)
    wait_until(lambda: len(tried) == 5, "it listens again")
    assert min(np.diff(tried)) > 0.04
    other.start_send(0, 0, Tags.CONTROL, memoryview(msgspec.msgpack.encode(Goodbye(77, Lane.BULK))))
    wait_until(lambda: 77 in control._early._by_context, "the message is kept")
    for one in (backend, other):
        one.close()


# -- credit of groups that are gone -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["closed", "forgotten", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_closed_and_dropped_groups_return_their_credit(
    make: Callable[..., list[Communicator]], kind: str, way: str
) -> None:
    """Unreceived messages beyond the credit: eleven groups with six messages of 4 KiB each."""
    turns, count, nbytes = 11, 6, 4096
    comms = make(2, kind)
    assert turns * count * nbytes > comms[0].backend.config.eager_credit_bytes

    def program(comm: Communicator) -> None:
        data = np.arange(nbytes, dtype=np.uint8)
        for turn in range(turns):
            pair = comm.split(0) if way == "split" else comm.sub([0, 1])
            assert pair is not None
            if comm.rank == 0:
                for _ in range(count):
                    pair.send(data + turn, 1, timeout=20)
            if way == "forgotten":
                del pair
                gc.collect()
            else:
                pair.close()
            comm.barrier(timeout=20)
        if comm.rank == 0:
            comm.send(data, 1, timeout=20)
        else:
            assert comm.recv_bytes(0, timeout=20) == data.tobytes()

    run_each(program, comms).values()


# -- control messages for communicators that are not known here -------------------------------------------


def failure(context: int, text: str = "x") -> GroupFailure:
    return GroupFailure(context, "PeerAborted", text, text, text, (1,))


@pytest.mark.parametrize("kind", KINDS)
def test_early_control_messages_are_kept_within_a_budget_per_sender(
    make: Callable[..., list[Communicator]], kind: str
) -> None:
    """Rank 1 names communicators that never exist; the message of rank 2 about a real one is kept."""
    comms = make(3, kind)
    controls = [comm._group.control for comm in comms]
    assert outcome(lambda: run_each(lambda comm: comm.barrier(), comms).values()) == [None] * 3
    pair = comms[2].sub([0, 2])
    controls[2].send([0], failure(pair._group.context, "rank 2 will not do it"))
    text, count = "y" * 4000, 3 * EARLY_BYTES_MAX // 12_000
    for context in range(count):
        controls[1].send([0], failure(1000 + context, text))
    # Sent last in the same lane: once it has arrived, the others have, too.
    run_each(lambda comm: comm.barrier(), comms).values()
    early = controls[0]._early

    def kept() -> int:
        return sum(len(data) for found in list(early._by_context.values()) for _, data in found.values())

    wait_until(lambda: 1000 + count - 1 in early._by_context, "the last message is kept")
    assert EARLY_BYTES_MAX // 2 < kept() <= 2 * EARLY_BYTES_MAX
    assert early._bytes[1] <= EARLY_BYTES_MAX
    error = outcome(lambda: comms[0].sub([0, 2]).barrier(timeout=20))
    assert "rank 2 will not do it" in str(error)
    assert early._bytes[2] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_closes_many_groups_early_is_reported_lost_in_each(
    make: Callable[..., list[Communicator]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its goodbyes in 40 groups exceed what is kept here, but each group knows its data and its end."""
    monkeypatch.setattr("unisono.comm.early_messages.EARLY_BYTES_MAX", 6000)
    groups = 40

    def program(comm: Communicator) -> list[str] | None:
        if comm.rank == 0:
            for turn in range(groups):
                pair = comm.sub([0, 1])
                pair.send(np.full(2, turn), 1)
                pair.close()
            comm.barrier(timeout=30)
            comm.barrier(timeout=30)
            return None
        comm.barrier(timeout=30)
        wrong = []
        for turn in range(groups):
            pair = comm.sub([0, 1])
            x = np.zeros(2, int)
            pair.recv(x, 0, timeout=20)
            if x.tolist() != [turn] * 2:
                wrong.append(f"{turn}: {x}")
            error = outcome(lambda pair=pair: pair.barrier(timeout=20))
            if not isinstance(error, uni.PeerLost):
                wrong.append(f"{turn}: {error!r}")
            pair.close()
        comm.barrier(timeout=30)
        return wrong

    assert run_each(program, make(2, kind)).values()[1] == []


def test_early_control_messages_keep_only_the_last_call_before_any_is_dropped() -> None:
    early = EarlyMessages()
    calls = {number: CallReport(bytes([number]) * 16, "x" * 400) for number in range(4)}
    full = encode(Goodbye(0, Lane.CONTROL, calls))
    count = 2 * EARLY_BYTES_MAX // len(full)
    for context in range(count):
        early.keep(1, context, msgspec.msgpack.encode(Goodbye(context, Lane.CONTROL, calls)))
        early.keep(1, context, msgspec.msgpack.encode(Goodbye(context, Lane.BULK)))
        assert early._bytes[1] <= EARLY_BYTES_MAX
    for context in range(count):
        kept = [message for _, message in early.take(context)]
        assert [message.lane for message in kept] == [Lane.CONTROL, Lane.BULK]
        assert kept[0].calls in (calls, {3: calls[3]})
    assert early._bytes[1] == 0
    assert not any(early._unshortened.values())


LONG = "\U0001f3b5" * 9000


def test_a_control_message_holds_no_more_than_its_fields_may() -> None:
    longest = GroupFailure.of(
        CollectiveMismatch(LONG, report=LONG, cause=LONG),
        2**64 - 1,
        is_abort=True,
        calls={rank: CallReport.of(bytes(16), LONG, LONG) for rank in range(1000)},
    )
    note = "\U0001f3b5" * 4096
    longest = msgspec.structs.replace(
        longest, operation=note, communicator=note, ranks=tuple(range(2**40, 2**40 + RANKS_MAX))
    )
    data = msgspec.msgpack.encode(longest)
    assert len(data) <= CONTROL_BYTES_MAX
    assert decode(data) == longest
    for wrong in (
        failure(1, "x" * 4097),
        StallQuery(1, 1, bytes(17)),
        StallQuery(1, 1, bytes(15)),
        Goodbye(1, Lane.BULK, dict.fromkeys(range(5), CallReport(bytes(16)))),
        Goodbye(1, Lane.BULK, {1: CallReport(bytes(16), "x" * 513)}),
        Goodbye(1, Lane.BULK, {1: CallReport(bytes(16), "", "x" * 257)}),
        ServiceQuery(1, "x" * 4097),
        ServiceQuery(1, "x", {n: n for n in range(65)}),
        StallReply(1, 1, True, tuple(range(RANKS_MAX + 1))),
    ):
        with pytest.raises(ProtocolError, match="malformed"):
            decode(msgspec.msgpack.encode(wrong))


def test_a_rank_that_queries_without_end_and_reads_nothing_gets_a_bounded_number_of_answers() -> None:
    """Rank 1 sends queries and reads no reply: the queue of replies to it is bounded."""
    backends = LocalBackend.create(2)
    control = Control(backends[0])
    for number in range(20_000):
        question = msgspec.msgpack.encode(StallQuery(77, number, bytes(16)))
        backends[1].start_send(0, 0, Tags.CONTROL, memoryview(question), lane=Lane.CONTROL)
        if number % 40:
            continue
        query = msgspec.msgpack.encode(ServiceQuery(1000 + number, "name"))
        backends[1].start_send(0, 0, Tags.CONTROL, memoryview(query), lane=Lane.CONTROL)
    queued = len(list(backends[1].endpoint.protocol.inbox.matcher.all_unexpected()))
    assert queued < 30_000  # as many as fit the credit of the lane, and a thousand
    assert control._replies_unsent[1] <= 1024
    assert control._queries_of(1) <= 64
    for backend in backends:
        backend.close()


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
