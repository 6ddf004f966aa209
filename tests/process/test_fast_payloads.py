"""Messages of unknown length, objects and probes on the fast path: the same results as in Python."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.engines import (
    NO_STALL,
    MakeWorld,
    calls_adopted,
    calls_ended,
    every_kind,
    found,
    outcome,
    world,
)
from tests.support.oracle import Notes, same
from tests.support.ranks import IS_SANITIZED, PATIENCE_S, run_each, wait_until

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.core import codec
from unisono.errors import DeadlineExceeded, PeerLost, ProtocolError, UsageError

__all__ = ["world"]

EAGER = 16 * 1024
# Empty, eager, at the eager limit, by rendezvous, in several pieces.
LENGTHS = (0, 1, 8, 100, EAGER - 1, EAGER, EAGER + 1, 100_003, 5_000_011)


def ramp(count: int, salt: int) -> bytes:
    return ((np.arange(count) * 7 + salt) % 251).astype(np.uint8).tobytes()


@contextlib.contextmanager
def reference_path(comm: Communicator) -> Iterator[None]:
    """Let all calls of a rank take the reference path."""
    log = comm._group.call_log
    log.fast_path_open = log.messages_open = False
    yield
    log.fast_path_open = log.messages_open = True


@uni.register
@dataclass
class Point:
    x: int
    where: np.ndarray[Any, Any]


class Stranger:
    pass


def things(salt: int) -> list[Any]:
    """Objects of every kind on both sides of the limits, with and without blobs."""
    return [
        None,
        salt,
        1.5 + salt,
        {"rank": salt, "pair": (salt, [-salt, None, True]), "text": "ä" * salt},
        [{"name": f"row {i}", "value": i * 0.5} for i in range(200)],
        "x" * (EAGER + salt),
        ramp(100_003, salt),
        bytearray(ramp(4096, salt)),
        np.arange(4095, dtype=np.uint8) + np.uint8(salt),
        {"a": np.arange(300_007) * 2.0 + salt, "b": np.arange(12, dtype=np.int16).reshape(3, 4)},
        Point(salt, np.arange(2000) - salt),
    ]


# -- right results ----------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("is_started", [False, True])
def test_bytes_of_any_length_arrive_on_the_fast_path(world: MakeWorld, kind: str, is_started: bool) -> None:
    comms = world(2, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank

        def receive(*what: Any, **more: Any) -> Any:
            if is_started:
                return comm.start.recv_bytes(*what, **more).wait()
            return comm.recv_bytes(*what, **more)

        for salt, count in enumerate(LENGTHS):
            if comm.rank == 0:
                comm.send(ramp(count, salt), other, salt)
                got = receive(other, tag=salt + 50)
                notes.expect(got, ramp(count, salt + 1), f"back {count}")
            else:
                # The receive is posted before the message arrives, or after.
                if salt % 2:
                    comm.probe(other, salt)
                got = receive(uni.ANY, uni.ANY, timeout=60)
                notes.expect(got, ramp(count, salt), f"there {count}")
                comm.send(ramp(count, salt + 1), other, salt + 50)
            notes.expect(type(got), bytes, "the type")
        return notes

    assert found(comms, program) == []
    assert [calls_adopted(comm) for comm in comms] == [0, 0]
    assert all(calls_ended(comm) >= 2 * len(LENGTHS) for comm in comms)


@every_kind
@pytest.mark.parametrize("is_started", [False, True])
def test_objects_arrive_on_the_fast_path(world: MakeWorld, kind: str, is_started: bool) -> None:
    comms = world(2, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank
        for i, (mine, theirs) in enumerate(zip(things(comm.rank), things(other), strict=True)):
            if is_started:
                receiving = comm.start.recv_object(other, i)
                sending = comm.start.send_object(mine, other, i)
                got = receiving.wait()
                sending.wait()
            elif comm.rank == 0:
                assert comm.send_object(mine, dst=other, tag=i) is None
                got = comm.recv_object()
            else:
                got = comm.recv_object(other, i)
                comm.send_object(mine, other, i)
            notes.expect(same(got, theirs), True, f"object {i}")
        return notes

    assert found(comms, program) == []
    assert [calls_adopted(comm) for comm in comms] == [0, 0]


def test_a_sent_object_may_change_at_once_and_a_received_one_is_the_receivers(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            x = np.arange(100_003.0)
            work = comm.start.send_object([x, x[:10]], 1)
            x[:] = -1
            comm.send(b"", 1, 1)
            work.wait()
        else:
            comm.recv_bytes(0, 1)
            long, short = comm.recv_object(0)
            notes.expect(long, np.arange(100_003.0), "long")
            notes.expect(short, np.arange(10.0), "short")
            long += 1  # writable, and not shared
            notes.expect(long, np.arange(100_003.0) + 1, "changed")
        return notes

    assert found(comms, program) == []


def test_a_rank_sends_objects_and_bytes_to_itself(world: MakeWorld) -> None:
    comm, _ = world(2, **NO_STALL)
    for i, thing in enumerate(things(3)):
        comm.send_object(thing, 0, i)
        assert same(comm.recv_object(0, i), thing), i
    for count in (0, 5, EAGER + 1, 5_000_011):
        comm.send(ramp(count, 1), 0, 1)
        assert comm.probe(0, 1) == (0, 1, count)
        assert comm.recv_bytes(0, 1) == ramp(count, 1)
        work = comm.start.recv_bytes(0, 2)
        comm.send(ramp(count, 2), 0, 2)
        assert work.wait() == ramp(count, 2)
    assert calls_adopted(comm) == 0


def test_groups_translate_ranks_and_are_apart(world: MakeWorld) -> None:
    comms = world(4)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        back = comm.split(0, key=-comm.rank)  # numbered backwards
        odd_or_even = comm.sub(range(comm.rank % 2, 4, 2))
        assert back is not None
        for one in (back, odd_or_even, comm):
            after, before = (one.rank + 1) % one.size, (one.rank - 1) % one.size
            for k in range(3):
                one.send_object((one.name, one.rank, k), after, 5)
                notes.expect(one.probe(uni.ANY, 5).source, before, f"{one.name} source")
                notes.expect(one.recv_object(before, 5), (one.name, before, k), one.name)
            one.send(ramp(50, one.rank), before, 6)
            notes.expect(one.recv_bytes(tag=6), ramp(50, after), f"{one.name} bytes")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("rank_of_python", [0, 1])
def test_one_rank_in_python_and_the_other_in_the_engine(world: MakeWorld, rank_of_python: int) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank
        with reference_path(comm) if comm.rank == rank_of_python else contextlib.nullcontext():
            for i, (mine, theirs) in enumerate(zip(things(comm.rank), things(other), strict=True)):
                work = comm.start.send_object(mine, other, i)
                nbytes = len(codec.pack(theirs))
                notes.expect(comm.probe(other, i), (other, i, nbytes), f"status {i}")
                notes.expect(same(comm.recv_object(other, i), theirs), True, f"object {i}")
                work.wait()
            for salt, count in enumerate(LENGTHS):
                work = comm.start.send(ramp(count, salt + comm.rank), other, 99)
                notes.expect(comm.recv_bytes(other), ramp(count, salt + other), f"bytes {count}")
                work.wait()
        return notes

    assert found(comms, program) == []
    assert (calls_ended(comms[rank_of_python]), calls_adopted(comms[1 - rank_of_python])) == (0, 0)


# -- refused ----------------------------------------------------------------------------------------------


def test_values_that_cannot_be_sent_are_refused_and_nothing_is_sent(world: MakeWorld) -> None:
    comm, other = world(2, **NO_STALL, recv_bytes_max=10_000)
    bad: list[Callable[[], Any]] = [
        lambda: comm.send_object({"a": [1, Stranger()]}, 1),
        lambda: comm.start.send_object(Stranger(), 1),
        lambda: comm.send_object(b"x" * 10_000, 1),
        lambda: comm.send_object(1, 2),
        lambda: comm.send_object(1, uni.ANY),
        lambda: comm.send_object(1, 1, -1),
        lambda: comm.recv_object(2),
        lambda: comm.recv_bytes(0, 2**31),
        lambda: comm.probe(5),
    ]
    for i, call in enumerate(bad):
        here = outcome(call)
        assert isinstance(here, UsageError), i
        with reference_path(comm):
            assert str(outcome(call)) == str(here), i
    assert "register" in str(outcome(bad[0]))
    assert "['a'][1]" in str(outcome(bad[0]))
    assert "recv_bytes_max" in str(outcome(bad[2]))
    assert other.probe(0, timeout=0) is None
    assert calls_ended(comm) == 0
    assert isinstance(outcome(lambda: comm.send_object(1)), TypeError)
    assert isinstance(outcome(lambda: comm.recv_object(buf=1)), TypeError)


def test_a_message_that_is_no_object_is_an_error_that_says_how_to_receive_it(world: MakeWorld) -> None:
    comm, other = world(2, **NO_STALL)
    for where in (contextlib.nullcontext(), reference_path(other)):
        comm.send(np.ones(5), 1)
        with where:
            error = outcome(lambda: other.recv_object(0))
        assert isinstance(error, ProtocolError)
        assert error.next_step.startswith("receive by recv_object only what send_object has sent")


@pytest.mark.parametrize("limit", [1000, EAGER + 1000])
def test_a_message_beyond_recv_bytes_max_is_refused_in_the_same_words_and_stays(
    world: MakeWorld, limit: int
) -> None:
    comms = world(2, **NO_STALL, recv_bytes_max=limit)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            fits, long = comm.start.send(ramp(limit, 1), 1, 1), comm.start.send(ramp(limit + 1, 2), 1, 2)
            fits.wait()
            long.wait()
            return notes
        notes.expect(comm.recv_bytes(0, 1), ramp(limit, 1), "what fits")
        calls: list[Callable[[], Any]] = [
            lambda: comm.recv_bytes(0, 2),
            lambda: comm.recv_bytes(),
            lambda: comm.recv_object(0, 2),
            lambda: comm.start.recv_bytes(0, 2).wait(),
            lambda: comm.start.recv_object().wait(),
        ]
        for i, call in enumerate(calls):
            here = outcome(call)
            with reference_path(comm):
                there = outcome(call)
            notes.expect(type(here), UsageError, f"{i}: {here}")
            notes.expect(without_seconds(here), without_seconds(there), f"words {i}")
        notes.expect(comm.probe(0), (0, 2, limit + 1), "it stays")
        into = np.zeros(limit + 1, np.uint8)
        comm.recv(into, 0)
        notes.expect(into.tobytes(), ramp(limit + 1, 2), "into a buffer")
        return notes

    assert found(comms, program) == []


def without_seconds(error: BaseException) -> str:
    return re.sub(r", after [0-9.e-]+ s", "", str(error))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"junk",
        codec.pack([1, 2])[:-1],
        codec.pack({"a": "b"}) + b"!",
        codec.pack(np.arange(100_000))[:-64],
        codec.pack(Point(1, np.arange(3))).replace(b"Point", b"Joint"),
    ],
    ids=["empty", "junk", "cut short", "too long", "cut array", "unregistered"],
)
@pytest.mark.parametrize("is_started", [False, True])
def test_a_message_that_is_no_object_is_a_protocol_error_in_the_same_words(
    world: MakeWorld, bad: bytes, is_started: bool
) -> None:
    comm, _ = world(2, **NO_STALL)

    def receive() -> Any:
        comm.send(bad, 0, 1)
        return comm.start.recv_object(0, 1).wait() if is_started else comm.recv_object(0, 1)

    here = outcome(receive)
    assert isinstance(here, ProtocolError)
    assert 'during recv_object on "world"' in str(here)
    with reference_path(comm):
        there = outcome(receive)
    assert without_seconds(here) == without_seconds(there)
    assert comm.probe(timeout=0) is None  # the message was received
    comm.send_object("good", 0)
    assert comm.recv_object() == "good"


def test_a_message_of_another_group_with_the_same_context_is_refused(world: MakeWorld) -> None:
    comm, other = world(2, **NO_STALL)
    context = comm._group.context
    for tag, receive in enumerate((other.recv_bytes, other.recv_object)):
        packed = memoryview(codec.pack(1))
        comm.backend.start_send(1, context, tag, packed, header=b"another group's")
        assert other.probe(0, tag) == (0, tag, len(packed))
        with pytest.raises(ProtocolError, match="for another group"):
            receive(0, tag)


def test_a_message_longer_than_any_may_be_is_refused_and_the_link_stays(world: MakeWorld) -> None:
    comm, other = world(2, **NO_STALL, message_bytes_max=20_000)
    for call in (
        lambda: comm.send(bytes(20_001), 1),
        lambda: comm.send_object(bytes(20_001), 1),
        lambda: comm.sendrecv(bytes(20_001), 1, bytearray(1), 1),
    ):
        assert isinstance(outcome(call), UsageError)
    work = comm.start.send(ramp(20_000, 1), 1)
    assert other.recv_bytes() == ramp(20_000, 1)
    work.wait()


# -- probe ------------------------------------------------------------------------------------------------


@every_kind
def test_a_probe_waits_for_a_message_and_leaves_it(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank
        for salt, count in enumerate(LENGTHS):
            if comm.rank == 0:
                comm.send(ramp(count, salt), other, salt)
                comm.recv_bytes(other, 99)
            else:
                status = comm.probe() if salt % 2 else comm.start.probe(other, salt).wait()
                assert type(status) is uni.Status
                notes.expect(status, (other, salt, count), f"{count} bytes")
                notes.expect(comm.probe(other, salt, timeout=0), status, "still there")
                notes.expect(comm.probe(other, salt + 1, timeout=0), None, "no such tag")
                notes.expect(comm.probe(comm.rank, timeout=0), None, "no such source")
                notes.expect(comm.recv_bytes(other, salt), ramp(count, salt), "then")
                notes.expect(comm.probe(timeout=0), None, "gone")
                comm.send(b"", other, 99)
        return notes

    assert found(comms, program) == []
    assert [calls_adopted(comm) for comm in comms] == [0, 0]


def test_repeated_polls_see_the_message_and_leave_no_probe(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)
    looks: list[None] = []

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            wait_until(lambda: len(looks) > 100)
            comm.send(b"now", 1, 3)
            return notes
        deadline = time.monotonic() + PATIENCE_S
        while (status := comm.probe(0, 3, timeout=0)) is None:
            looks.append(None)
            assert time.monotonic() < deadline
        notes.expect(status, (0, 3, 3), "status")
        # No unsuccessful probe is left that could match a later message.
        notes.expect(comm.recv_bytes(), b"now", "the message")
        return notes

    assert found(comms, program) == []


def test_a_deadline_ends_a_receive_that_then_takes_no_message(world: MakeWorld) -> None:
    comm, other = world(2, **NO_STALL)
    for timeout in (0, 0.01):
        for verb in ("recv_bytes", "recv_object", "probe"):
            if verb == "probe" and timeout == 0:
                continue
            error = outcome(lambda verb=verb, timeout=timeout: getattr(comm, verb)(1, 1, timeout=timeout))
            assert isinstance(error, DeadlineExceeded), (verb, timeout)
            assert error.waiting_on == (1,)
            work = getattr(comm.start, verb)(1, 1, timeout=timeout)
            assert isinstance(outcome(work.wait), DeadlineExceeded), (verb, timeout)
    other.send_object(5, 0, 1)
    assert comm.recv_object(1, 1, timeout=60) == 5


# -- calls that are adopted, cancelled or dropped ---------------------------------------------------------


@every_kind
@pytest.mark.parametrize("count", [4, 3_000_017])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_long_wait_goes_on_in_python_and_gets_the_message(
    world: MakeWorld, kind: str, count: int, is_started: bool
) -> None:
    comms = world(2, kind)
    thing = {"data": ramp(count, 3), "array": np.arange(count)}

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            for i, send in enumerate(
                (
                    lambda: comm.send(ramp(count, 1), 1, 1),
                    lambda: comm.send_object(thing, 1, 2),
                    lambda: comm.send(b"seen", 1, 3),
                )
            ):
                wait_until(lambda i=i: calls_adopted(comms[1]) == i + 1)
                send()
            return notes

        def call(verb: str, tag: int) -> Any:
            if is_started:
                return getattr(comm.start, verb)(0, tag).wait()
            return getattr(comm, verb)(0, tag)

        notes.expect(call("recv_bytes", 1), ramp(count, 1), "bytes")
        notes.expect(same(call("recv_object", 2), thing), True, "object")
        notes.expect(call("probe", 3), (0, 3, 4), "probe")
        notes.expect(comm.recv_bytes(0, 3), b"seen", "then")
        return notes

    assert found(comms, program) == []


@every_kind
def test_a_call_that_is_adopted_during_its_message_gets_all_of_it(world: MakeWorld, kind: str) -> None:
    # Python adopts calls that have not ended after 1 ms; these take several ms.
    comms = world(2, kind, stall_query_s=0.001, stall_log_s=0.001, deadlock_after_s=0)
    count = 30_000_001
    data, array = ramp(count, 1), np.arange(count // 8)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for turn in range(40):  # on a fast machine a few of them may end before
            if comm.all_reduce(int(turn > 2 and calls_adopted(comms[1]) > 0), "min"):
                break
            if comm.rank == 0:
                comm.send(data, 1)
                comm.send_object(array, 1)
                comm.send(data, 1)
            else:
                notes.expect(comm.recv_bytes(0), data, "bytes")
                notes.expect(comm.recv_object(0), array, "object")
                notes.expect(comm.start.recv_bytes(0).wait(), data, "started")
        return notes

    assert found(comms, program) == []
    assert calls_adopted(comms[1]) > 0


@pytest.mark.parametrize("verb", ["recv_bytes", "recv_object", "probe"])
def test_a_cancelled_receive_takes_no_message(world: MakeWorld, verb: str) -> None:
    comm, other = world(2, **NO_STALL)
    work = getattr(comm.start, verb)(1, 1)
    assert not work.done()
    assert work.cancel()
    assert isinstance(outcome(work.wait), uni.UnisonoError)
    other.send_object([1, 2], 0, 1)
    assert comm.recv_object(1, 1) == [1, 2]


def test_a_rank_that_leaves_ends_the_receives_that_wait_for_it(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 1:
            comm.send_object("last words", 0)
            comm.close()
            return None
        last = comm.recv_object(1)
        verbs = (comm.recv_bytes, comm.recv_object, comm.probe)
        return [last, *(outcome(lambda verb=verb: verb(1)) for verb in verbs)]

    last, *errors = run_each(program, list(comms)).values()[0]
    assert last == "last words"
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.ranks == (1,)


def test_dropped_receives_take_their_messages_and_free_the_memory(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)
    data, rounds = bytes(8 << 20), 20

    def program(comm: Communicator) -> None:
        for k in range(rounds):
            if comm.rank == 0:
                comm.send(data, 1, k)
                comm.send_object(np.zeros(1 << 20), 1, k + 100)
            else:
                comm.start.recv_bytes(0, k)
                comm.start.recv_object(0, k + 100)
        comm.barrier()
        assert comm.probe(timeout=0) is None

    before = rss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        run_each(program, list(comms)).values()
    wait_until(lambda: IS_SANITIZED or rss() - before < rounds // 2 * len(data))


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- processes --------------------------------------------------------------------------------------------


def _die_while_sending(comm: Communicator, folder: str) -> None:
    data = np.zeros(64 << 20, np.uint8)
    if comm.rank == 1:
        works = [comm.start.send(data, 0, 1), comm.start.send_object(data, 0, 2)]
        wait_until(Path(folder, "begun").exists)
        os.kill(os.getpid(), signal.SIGKILL)
        del works
    comm.probe(1, 1)
    comm.probe(1, 2)
    work = comm.start.recv_object(1, 2)
    Path(folder, "begun").touch()
    errors = [outcome(lambda: comm.recv_bytes(1, 1)), outcome(work.wait), outcome(lambda: comm.probe(1, 3))]
    # Messages that arrived before the kill are complete.
    lost = [one.ranks if isinstance(one, PeerLost) else len(one) for one in errors]
    Path(folder, "ended").write_text(repr(lost))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_rank_that_is_killed_during_a_message_is_named(tmp_path: Path, kind: str) -> None:
    config = uni.Config(shm=kind == "shm")
    with pytest.raises(uni.UnisonoError, match="rank 1"):
        uni.spawn(_die_while_sending, 2, str(tmp_path), config=config)
    *messages, last = ast.literal_eval((tmp_path / "ended").read_text())
    assert last == (1,)
    assert all(one in ((1,), 64 << 20) for one in messages), messages


def _interrupted(comm: Communicator, verb: str) -> list[Any]:
    if comm.rank == 1:
        assert comm.recv_object(0, 9) == "go"
        comm.send_object({"a": 1}, 0, 1)
        return []
    main, is_called = threading.get_ident(), threading.Event()

    def strike() -> None:
        is_called.wait()
        signal.pthread_kill(main, signal.SIGINT)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        is_called.set()
        getattr(comm, verb)(1, 1)
        how = "well"
    except KeyboardInterrupt:
        how = "interrupted"
    striker.join()
    # The receive is withdrawn, and the next receive gets the message.
    comm.send_object("go", 1, 9)
    return [how, comm.recv_object(1, 1)]


@pytest.mark.parametrize("verb", ["recv_bytes", "recv_object", "probe"])
def test_ctrl_c_ends_a_waiting_receive_and_leaves_the_message_to_the_next(verb: str) -> None:
    here, _ = uni.spawn(_interrupted, 2, verb)
    assert here == ["interrupted", {"a": 1}]
