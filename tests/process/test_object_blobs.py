"""Collectives of objects with long content, which is sent as blobs beside the heads, without copies."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, calls_adopted, every_kind, found, outcome, world
from tests.support.oracle import Notes, same

from unisono.comm import vector_collectives
from unisono.comm.announcement import Announcement, row_bytes
from unisono.comm.communicator import Communicator
from unisono.comm.object_payload import heads_in
from unisono.core import codec
from unisono.core.dtypes import DTYPES
from unisono.errors import ProtocolError, UsageError

__all__ = ["world"]

LONG = 300_007


def ramp(count: int, salt: int) -> bytes:
    return ((np.arange(count) * 7 + salt) % 251).astype(np.uint8).tobytes()


@functools.cache
def things(salt: int) -> list[Any]:
    """Objects on both sides of every limit, with one blob of each kind, with several blobs and with none."""
    ascii_text = ramp(LONG, salt).translate(bytes(65 + n % 58 for n in range(256))).decode()
    arrays = {
        f"{dtype.name}": ((np.arange(2053) * 3 + salt) % 101).astype(dtype.storage)
        for dtype in DTYPES.values()
    }
    return [
        None,
        ramp(4095, salt),
        ramp(4096, salt),
        ramp(LONG + salt, salt),
        bytearray(ramp(4097 + salt, salt)),
        bytearray(ramp(LONG, salt)),
        ascii_text,
        "ä€" * (2100 + salt),
        np.frombuffer(ramp(8 * LONG, salt), np.float64)[: LONG - salt].view(np.int64),
        (np.arange(30_000) + salt).reshape(100, 300)[::2, 1::3],
        np.empty((0, 7), np.float32),
        {"salt": salt, "only": ramp(40_000 + salt, salt)},
        [salt, (ramp(9_001, salt), "x" * (5_000 + salt)), bytearray(ramp(4_096, salt)), arrays],
        {**{f"key {n} of {salt}": n for n in range(300)}, "long": ramp(70_001, salt)},
        [ramp(4_096 + n, n + salt) for n in range(90)],
        [np.arange(700 + salt) * 1.5, None, ascii_text[:4_096]],
    ]


def thing(number: int, source: int, target: int = 0) -> Any:
    """The object from one rank to another in round `number`; in one round ranks send different kinds."""
    every = things(source + 10 * target)
    return every[(number + 3 * source + 5 * target) % len(every)]


ROUNDS = len(things(0))
Verb = Callable[[Any, Communicator, int], tuple[Any, Any]]


def all_gather(verbs: Any, comm: Communicator, number: int) -> tuple[Any, Any]:
    return verbs.all_gather_object(thing(number, comm.rank)), [thing(number, r) for r in range(comm.size)]


def gather(verbs: Any, comm: Communicator, number: int) -> tuple[Any, Any]:
    root = number % comm.size
    wanted = [thing(number, r) for r in range(comm.size)] if comm.rank == root else None
    return verbs.gather_object(thing(number, comm.rank), root), wanted


def broadcast(verbs: Any, comm: Communicator, number: int) -> tuple[Any, Any]:
    root = number % comm.size
    return verbs.broadcast_object(thing(number, root) if comm.rank == root else None, root), thing(
        number, root
    )


def scatter(verbs: Any, comm: Communicator, number: int) -> tuple[Any, Any]:
    root = number % comm.size
    values = [thing(number, root, target) for target in range(comm.size)] if comm.rank == root else None
    return verbs.scatter_object(values, root), thing(number, root, comm.rank)


def all_to_all(verbs: Any, comm: Communicator, number: int) -> tuple[Any, Any]:
    parts = [thing(number, comm.rank, target) for target in range(comm.size)]
    return verbs.all_to_all_object(parts), [thing(number, source, comm.rank) for source in range(comm.size)]


def all_reduce(verbs: Any, comm: Communicator, number: int) -> tuple[Any, Any]:
    def pair(a: Any, b: Any) -> Any:
        return (a, b)

    wanted = functools.reduce(pair, [thing(number, r) for r in range(comm.size)])
    return verbs.all_reduce_object(thing(number, comm.rank), pair), wanted


VERBS: list[Verb] = [all_gather, gather, broadcast, scatter, all_to_all, all_reduce]
every_verb = pytest.mark.parametrize("verb", VERBS)


class Started:
    """A communicator whose verbs are started and then waited for."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: getattr(self._comm.start, name)(*given).wait()


@every_kind
@every_verb
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_long_objects_of_every_kind_arrive_on_the_fast_path(
    world: MakeWorld, kind: str, verb: Verb, size: int
) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for verbs in (comm, Started(comm)):
            for number in range(ROUNDS):
                got, wanted = verb(verbs, comm, number)
                notes.expect(same(got, wanted), True, f"round {number}")
            if verbs is comm:  # Python may adopt a started call that waits before its second stage
                notes.expect(calls_adopted(comm), 0, "calls that Python adopted")
        return notes

    assert found(comms, program) == []


@every_verb
def test_one_rank_in_python_and_the_others_in_the_engine(world: MakeWorld, verb: Verb) -> None:
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for number in range(ROUNDS):
            log = comm._group.call_log
            in_python = number % 3 == comm.rank
            if in_python:
                log.fast_path_open = False
            got, wanted = verb(comm, comm, number)
            notes.expect(same(got, wanted), True, f"round {number}")
            if in_python:
                log.fast_path_open = True
        return notes

    assert found(comms, program) == []


@every_verb
def test_python_continues_after_the_engines_first_stage(
    world: MakeWorld, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python adopts a started call after its first stage if no thread waits for it."""
    comms, finished = world(3), []
    finish = vector_collectives.finish
    monkeypatch.setattr(
        "unisono.comm.adoption.finish",
        lambda *args, **more: finished.append(args[0]) or finish(*args, **more),
    )

    class Late(Started):
        """A call that finds the fast path closed after its first stage."""

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                work = getattr(self._comm.start, name)(*given)
                self._comm._group.call_log.fast_path_open = False
                return work.wait()

            return call

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for number in range(ROUNDS):
            got, wanted = verb(Late(comm), comm, number)
            comm._group.call_log.fast_path_open = True
            notes.expect(same(got, wanted), True, f"round {number}")
            comm.barrier()
        return notes

    assert found(comms, program) == []
    assert finished


@pytest.mark.parametrize("algorithm", ["auto", "flat", "ring", "dissemination"])
def test_any_algorithm_moves_them(world: MakeWorld, algorithm: str) -> None:
    comms = world(5)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        row = comm.split(comm.rank % 2)
        assert row is not None
        for number in range(ROUNDS):
            got = row.all_gather_v(np.arange(number * 700.0), algorithm=algorithm)
            notes.expect([len(one) for one in got], [number * 700] * row.size, "arrays beside them")
            wanted = [thing(number, r) for r in range(row.size)]
            notes.expect(
                same(row.all_gather_object(thing(number, row.rank)), wanted), True, f"round {number}"
            )
        row.close()
        return notes

    assert found(comms, program) == []


def test_received_objects_are_the_receivers_and_the_next_call_does_not_change_them(world: MakeWorld) -> None:
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes, kept = Notes(), []
        mine = [ramp(LONG, comm.rank), bytearray(ramp(LONG, comm.rank)), np.arange(LONG) + comm.rank]
        for turn in range(5):
            for value in mine:
                came = comm.all_gather_object(value)
                if turn % 2:
                    kept.append(came)  # the memory of other results is reused
                for rank, one in enumerate(came):
                    if isinstance(one, bytes):
                        notes.expect(one, ramp(LONG, rank), f"bytes of {rank}")
                        notes.expect(hash(one), hash(ramp(LONG, rank)), f"hash of {rank}")
                    elif rank != comm.rank:
                        one[:3] = type(one)(b"abc") if isinstance(one, bytearray) else -1
                if not isinstance(value, bytes):
                    came[comm.rank][0] = 77  # a copy, not the input
            notes.expect(mine[1], bytearray(ramp(LONG, comm.rank)), "the bytearray that was given")
            notes.expect(same(mine[2], np.arange(LONG) + comm.rank), True, "the array that was given")
        for came in kept:
            if isinstance(came[0], bytes):
                notes.expect(came, [ramp(LONG, rank) for rank in range(3)], "what was kept")
        del kept
        gc.collect()
        return notes

    assert found(comms, program) == []


def test_a_root_keeps_what_it_cannot_write_to(world: MakeWorld) -> None:
    comms = world(4)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        frozen = np.arange(LONG)
        frozen.flags.writeable = False
        got = comm.broadcast_object(frozen if comm.rank == 1 else None, 1)
        notes.expect(same(got, np.arange(LONG)), True, "the array")
        return notes

    assert found(comms, program) == []


def test_an_object_beyond_recv_bytes_max_is_refused_before_anything_is_sent(world: MakeWorld) -> None:
    comms = world(2, recv_bytes_max=100_000)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        error = outcome(lambda: comm.all_gather_object(ramp(100_001, 0)))
        notes.expect(type(error), UsageError, "the error")
        notes.expect("recv_bytes_max" in str(error), True, "the next step")
        notes.expect(
            comm.all_gather_object(ramp(99_000, comm.rank)), [ramp(99_000, r) for r in range(2)], "fits"
        )
        return notes

    assert found(comms, program) == []


def test_a_deadline_in_the_midst_of_long_objects_ends_the_call(world: MakeWorld) -> None:
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        comm.barrier()
        if comm.rank == 2:
            error = outcome(lambda: comm.barrier(timeout=5))
            notes.expect(isinstance(error, Exception), True, "the late rank")
            return notes
        error = outcome(lambda: comm.all_gather_object(ramp(5 * LONG, comm.rank), timeout=0.2))
        notes.expect(isinstance(error, Exception), True, "ends")
        return notes

    assert found(comms, program) == []


@codec.register
class Refusing(msgspec.Struct):
    """A class that refuses what came."""

    data: bytes

    def __post_init__(self) -> None:
        if self.data:
            raise ValueError("not these")


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("nbytes", [10, 5_000, LONG])
def test_an_object_that_cannot_be_made_concerns_its_receivers_alone(
    world: MakeWorld, nbytes: int, in_python: bool
) -> None:
    """All objects have arrived by then: the communicator can be used further, on every rank."""
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes, bad = Notes(), Refusing(b"")
        msgspec.structs.force_setattr(bad, "data", ramp(nbytes, comm.rank))
        good = ramp(nbytes, comm.rank)
        mine, row = bad if comm.rank == 0 else good, [good, bad, good]
        root, is_root = 0, comm.rank == 0
        calls: dict[str, tuple[Callable[[Any], Any], set[int]]] = {
            "all_gather_object": (lambda verbs: verbs.all_gather_object(mine), {0, 1, 2}),
            "all_reduce_object": (lambda verbs: verbs.all_reduce_object(mine, max), {0, 1, 2}),
            "gather_object": (lambda verbs: verbs.gather_object(mine, 1), {1}),
            "broadcast_object": (
                lambda verbs: verbs.broadcast_object(bad if is_root else None, root),
                {1, 2},
            ),
            "scatter_object": (lambda verbs: verbs.scatter_object(row if is_root else None, root), {1}),
            "all_to_all_object": (lambda verbs: verbs.all_to_all_object(row), {1}),
        }
        for name, (call, concerned) in calls.items():
            for verbs in (comm, Started(comm)):
                comm._group.call_log.fast_path_open = not in_python
                got = outcome(lambda call=call, verbs=verbs: call(verbs))
                if comm.rank in concerned:
                    notes.expect(type(got), ProtocolError, name)
                    notes.expect(f"during {name} #" in str(got) and "not these" in str(got), True, str(got))
                else:
                    notes.expect(isinstance(got, Exception), False, f"{name}: {got}"[:200])
        comm.barrier()
        return notes

    assert found(comms, program) == []


# -- the bytes of a row -----------------------------------------------------------------------------------


def row_of(*entries: tuple[int, bytes], used: int | None = None, form: int = 1) -> np.ndarray[Any, Any]:
    nbytes = row_bytes(2, len(entries))
    row = np.zeros(nbytes, np.uint8)
    heads = b"".join(bytes([kind]) + head for kind, head in entries)
    numbers = 8 + 8 * len(entries)
    row[0], row[3] = DTYPES["uint8"].code, form
    row[4:8] = np.array([numbers + len(heads) if used is None else used], np.uint32).view(np.uint8)
    row[8:numbers] = np.full(len(entries), 4096, np.int64).view(np.uint8)
    row[numbers : numbers + len(heads)] = np.frombuffer(heads, np.uint8)
    return row


def test_a_row_of_heads_is_checked_when_it_is_read() -> None:
    head, (blob,) = codec.pack_parts({"a": ramp(4096, 1)})
    said = Announcement.decoded(row_of((1, head), (1, head)), 2, 1 << 20)
    assert said.heads is not None
    assert [each.head for each in said.heads] == [head, head]
    assert codec.unpack_parts(said.heads[1].head, [blob]) == {"a": ramp(4096, 1)}
    for wrong in (
        row_of((5, head), (1, head)),
        row_of((1, head), (1, b"")),
        row_of((1, head), (1, head[:9])),
        row_of((1, head), (1, head), used=24 + len(head)),
        row_of((1, head), (1, head), form=2),
    ):
        with pytest.raises(ProtocolError):
            Announcement.decoded(wrong, 2, 1 << 20)
    assert heads_in(bytes([1]) + head + b"more", 1)[0].kind == 1


def test_blobs_in_one_piece_are_the_same_value() -> None:
    value = [ramp(4099, 1), np.arange(5000), "x" * 4096, bytearray(ramp(5000, 2))]
    head, blobs = codec.pack_parts(value)
    joined = b"".join(bytes(blob) + bytes(-len(blob) % 64) for blob in blobs)
    assert same(codec.unpack_beside(head, bytearray(joined)), value)
    assert same(codec.unpack_beside(head, joined), value)
    for wrong in (joined[:-64], joined + bytes(64), b""):
        with pytest.raises(ProtocolError):
            codec.unpack_beside(head, wrong)
