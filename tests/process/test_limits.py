"""Bounds on memory that peers can make a rank use: unknown lengths, objects, control messages, credit.

The tests run on all backends whose ranks can share a process; the conformance kit has the same cases for the
others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.engines import MakeWorld, outcome, world
from tests.support.ranks import run_each, wait_until

import unisono as uni
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
from unisono.core.envelope import Lane, Tags
from unisono.core.request import Request
from unisono.errors import CollectiveMismatch, PeerAborted, ProtocolError, UsageError
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
