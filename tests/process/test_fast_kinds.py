"""Calls with arguments of every ordinary type stay in the engine, with the same results and refusals."""

from __future__ import annotations

import array
import ctypes
import enum
import fractions
import json
import mmap
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, calls_ended, found, outcome, world
from tests.support.oracle import Notes

from unisono import ANY
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError

__all__ = ["world"]


class Index:
    """An integer type of another package, such as a symbolic integer."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Place(enum.IntEnum):
    first = 0
    second = 1


class Late(float):
    pass


INTEGERS: list[Callable[[int], Any]] = [np.int8, np.int64, np.uint16, np.uint64, Place, Index, np.array]


# -- ranks, tags, times and names -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INTEGERS)
def test_ranks_and_tags_may_be_any_integer(world: MakeWorld, kind: Callable[[int], Any]) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, other, before = Notes(), kind(1 - comm.rank), calls_ended(comm)
        x, buf = np.array([7.0 + comm.rank]), np.empty(1)
        for tag in (kind(1), 3):
            found_here = comm.sendrecv(x, other, buf, other, tag)
            notes.expect(tuple(found_here), (1 - comm.rank, int(tag), 8), "status")
            notes.expect(buf, np.array([8.0 - comm.rank]), "sendrecv")
        if comm.rank == 0:
            comm.send(x, other, kind(0))
            comm.send_object("text", other, kind(1))
        else:
            notes.expect(comm.probe(other, kind(0)).source, 0, "probe")
            notes.expect(comm.recv_bytes(other, kind(0)), np.array([7.0]).tobytes(), "recv_bytes")
            notes.expect(comm.recv_object(other, kind(1)), "text", "recv_object")
        notes.expect(comm.broadcast(x.copy(), kind(1)), np.array([8.0]), "broadcast")
        notes.expect(comm.start.reduce(x.copy(), root=kind(0)).wait() is None, comm.rank == 1, "reduce")
        notes.check(
            calls_ended(comm) - before == (6 if comm.rank == 0 else 7), f"{calls_ended(comm) - before} calls"
        )
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("wrong", [True, np.True_, 2, -1, 2**70, np.uint64(2**63), Index(2), 1.0, "1", None])
def test_invalid_ranks_are_refused_before_anything_is_sent(world: MakeWorld, wrong: Any) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, x = Notes(), np.ones(1)
        for call in (
            lambda: comm.send(x, wrong),
            lambda: comm.recv(x, wrong),
            lambda: comm.broadcast(x, wrong),
            lambda: comm.start.reduce(x, wrong),
            lambda: comm.sendrecv(x, 1 - comm.rank, np.empty(1), wrong),
        ):
            error = outcome(call)
            notes.check(isinstance(error, UsageError), f"{wrong!r}: {error!r}")
        notes.expect(comm.all_reduce(1), 2, "the next call")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("wrong", [True, -1, 2**31, Index(-1), 0.5, "1"])
def test_invalid_tags_are_refused(world: MakeWorld, wrong: Any) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for call in (lambda: comm.send(np.ones(1), 0, wrong), lambda: comm.recv(np.ones(1), ANY, wrong)):
            notes.check(isinstance(outcome(call), UsageError), repr(wrong))
        return notes

    assert found(comms, program) == []


def test_an_error_of_the_users_own_integer_is_raised(world: MakeWorld) -> None:
    (comm, _) = world(2)

    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        comm.send(np.ones(1), Broken())
    with pytest.raises(UsageError):
        comm.send(np.ones(1), 1, object())


LONG = 2**2000  # too large for a float
TIMES = [
    60,
    60.0,
    np.float64(60),
    np.float32(60),
    np.int64(60),
    Late(60),
    fractions.Fraction(60),
    2**80,
    LONG,
]


@pytest.mark.parametrize("time", TIMES)
def test_timeouts_may_be_any_real_number(world: MakeWorld, time: Any) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, before = Notes(), calls_ended(comm)
        notes.expect(comm.all_reduce(1, timeout=time), 2, "all_reduce")
        notes.expect(comm.start.all_reduce(1, timeout=time).wait(time), 2, "started")
        notes.check(calls_ended(comm) - before == (0 if str(time) == str(LONG) else 2), "not in the engine")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("wrong", [True, -1, -0.5, np.float64(-1), float("nan"), np.float32("nan"), "1", 1j])
def test_invalid_timeouts_are_refused(world: MakeWorld, wrong: Any) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        work = comm.start.recv(np.empty(1), 1 - comm.rank)
        for call in (
            lambda: comm.all_reduce(1, timeout=wrong),
            lambda: comm.start.send(np.ones(1), 0, timeout=wrong),
            lambda: work.wait(wrong),
        ):
            error = outcome(call)
            notes.check(isinstance(error, UsageError), f"{wrong!r}: {error!r}")
        work.cancel()
        return notes

    assert found(comms, program) == []


def test_names_of_arguments_may_come_from_data(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, before = Notes(), calls_ended(comm)
        options = json.loads('{"timeout": 60, "op": "max"}')
        notes.expect(comm.all_reduce(comm.rank, **options), 1, "all_reduce")
        work = comm.start.all_reduce(comm.rank, **options)
        notes.expect(work.wait(**json.loads('{"timeout": 60}')), 1, "started")
        notes.check(calls_ended(comm) - before == 2, "not in the engine")
        for wrong in ('{"timeouts": 1}', '{"x": 1}'):
            error = outcome(lambda w=wrong: comm.all_reduce(1, **json.loads(w)))
            notes.check(isinstance(error, TypeError), f"{wrong}: {error!r}")
        notes.check(isinstance(outcome(lambda: work.wait(**json.loads('{"time": 1}'))), TypeError), "wait")
        return notes

    assert found(comms, program) == []


# -- numbers and types of elements ------------------------------------------------------------------------

NUMBERS = [7, 7.5, 7.5 + 2j, np.float64(7.5), np.float32(7.5), np.float16(7.5), np.int8(7), np.uint64(7)]
NUMBERS += [np.complex64(7 + 2j), np.complex128(7 + 2j)]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_come_back_in_their_kind(world: MakeWorld, number: Any) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, before, kind = Notes(), calls_ended(comm), type(number)
        mine = kind(number + comm.rank)
        for name, got, want in (
            ("all_reduce", comm.all_reduce(mine), number + kind(number + 1)),
            ("scan", comm.scan(mine), number if comm.rank == 0 else number + kind(number + 1)),
            ("broadcast", comm.broadcast(mine, 1), kind(number + 1)),
            ("reduce_scatter", comm.reduce_scatter(np.array([mine, mine])), number + kind(number + 1)),
        ):
            notes.check(got == want, f"{name}: {got!r}")
            if name != "reduce_scatter":
                notes.check(type(got) is kind, f"{name}: {type(got)}")
        gathered = comm.all_gather(mine)
        notes.expect(gathered, np.array([number, kind(number + 1)]), "all_gather")
        buf = np.empty(1, np.array(mine).dtype)
        comm.sendrecv(mine, 1 - comm.rank, buf, 1 - comm.rank)
        notes.check(buf[0] == gathered[1 - comm.rank], f"sendrecv: {buf}")
        notes.check(mine == kind(number + comm.rank), "what was given has changed")
        notes.check(calls_ended(comm) - before == 6, f"{calls_ended(comm) - before} calls in the engine")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_truth_values_come_back_as_truth_values(world: MakeWorld, kind: type) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, before, mine = Notes(), calls_ended(comm), kind(comm.rank == 1)
        for op, want in (("lor", True), ("land", False), ("max", True)):
            got = comm.all_reduce(mine, op)
            notes.check(got == want and type(got) is kind, f"{op}: {got!r}")
        notes.expect(comm.all_gather(mine), np.array([False, True]), "all_gather")
        error = outcome(lambda: comm.all_reduce(mine))
        notes.check(isinstance(error, UsageError), f"sum: {error!r}")
        notes.check(calls_ended(comm) - before == 4, f"{calls_ended(comm) - before} calls in the engine")
        return notes

    assert found(comms, program) == []


def unpickled(dtype: Any) -> Callable[..., np.ndarray[Any, Any]]:
    return lambda values: pickle.loads(pickle.dumps(np.array(values, dtype)))


ARRAYS: dict[str, Callable[..., np.ndarray[Any, Any]]] = {
    **{f"unpickled {dtype}": unpickled(dtype) for dtype in ("int32", "float64", "complex64")},
    "longlong": lambda values: np.array(values, np.longlong),
    "ulonglong": lambda values: np.array(values, np.ulonglong),
    "with metadata": lambda values: np.array(values, np.dtype("float32", metadata={"unit": "m"})),
    "bfloat16": lambda values: np.array(values, ml_dtypes.bfloat16),
    "unpickled bfloat16": unpickled(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_types_that_are_equal_are_the_same(world: MakeWorld, name: str) -> None:
    comms, make = world(2, **NO_STALL), ARRAYS[name]

    def program(comm: Communicator) -> Notes:
        notes, before = Notes(), calls_ended(comm)
        for turn in range(3):  # each with new types, which may have the addresses of old types
            x = make([1 + comm.rank, 4 + turn])
            kind = x.dtype
            notes.check(comm.all_reduce(x) is x, "all_reduce gives what it got")
            notes.check(list(x) == [3, 8 + 2 * turn], f"all_reduce: {x}")
            gathered = comm.all_gather(x)
            notes.check(gathered.dtype == kind and gathered.shape == (2, 2), f"all_gather: {gathered!r}")
            notes.check(bool((gathered == x).all()), f"all_gather: {gathered}")
            out = np.empty(2, kind)
            comm.all_reduce(x, out=out)
            notes.check(list(out) == [6, 16 + 4 * turn], f"out: {out}")
            part = comm.reduce_scatter(make([[1, 2], [3, 4]]))
            notes.check(list(part) == [2 + 4 * comm.rank, 4 + 4 * comm.rank], f"reduce_scatter: {part}")
            comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
            notes.check(list(out) == list(x), f"sendrecv: {out}")
        notes.check(calls_ended(comm) - before == 15, f"{calls_ended(comm) - before} calls in the engine")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("dtype", [">f8", ">i2", "float128", "U3", "datetime64[s]", "O", "V8", "complex256"])
def test_types_that_only_look_alike_are_refused(world: MakeWorld, dtype: str) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, x = Notes(), np.zeros(2, dtype)
        for call in (comm.all_reduce, comm.all_gather, lambda x: comm.send(x, 0)):
            error = outcome(lambda call=call: call(x))
            notes.check(isinstance(error, UsageError), repr(error))
        return notes

    assert found(comms, program) == []


def test_other_small_types_of_ml_dtypes_are_no_bfloat16(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for _ in range(2):  # also once bfloat16 is known
            error = outcome(lambda: comm.all_reduce(np.zeros(2, ml_dtypes.float8_e5m2)))
            notes.check(isinstance(error, UsageError), repr(error))
            notes.check(list(comm.all_reduce(np.ones(2, ml_dtypes.bfloat16))) == [2, 2], "bfloat16")
        return notes

    assert found(comms, program) == []


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 1000, 100_003, 3_000_001])
@pytest.mark.parametrize("size", [2, 3])
def test_a_root_may_broadcast_what_it_cannot_write(world: MakeWorld, size: int, count: int) -> None:
    comms = world(size, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, want = Notes(), np.arange(count, dtype=np.float64)
        kept = want.copy()
        kept.flags.writeable = False
        for root in range(size):
            before = calls_ended(comm)
            x = kept if comm.rank == root else np.empty(count)
            notes.check(comm.broadcast(x, root) is x, "broadcast gives what it got")
            notes.expect(x, want, f"root {root}")
            if count <= 1000:
                notes.check(calls_ended(comm) == before + 1, "not in the engine")
        raw = bytes(range(9)) if comm.rank == 0 else bytearray(9)
        notes.expect(bytes(comm.broadcast(raw)), bytes(range(9)), "bytes")
        if comm.rank != 0:
            kept.flags.writeable = False
        error = outcome(lambda: comm.start.broadcast(kept, (comm.rank + 1) % size))
        notes.check(isinstance(error, UsageError), f"read-only elsewhere: {error!r}")
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 5, 40_001, 300_007])
def test_means_of_halves_are_made_in_memory_that_was_used_before(
    world: MakeWorld, dtype: str, count: int
) -> None:
    comms = world(2, **NO_STALL)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        want = ((np.arange(count) % 100) + 0.5).astype(kind)
        for turn in range(3):
            x = ((np.arange(count) % 100) + comm.rank).astype(kind)
            notes.expect(comm.all_reduce(x.copy(), "mean"), want, f"all_reduce {turn}")
            out = np.full(count, 77, kind)
            comm.all_reduce(x, "mean", out=out)
            notes.expect(out, want, f"out {turn}")
            part = comm.reduce_scatter(np.stack([x, x]), "mean")
            notes.expect(part, want, f"reduce_scatter {turn}")
            kept = x.copy()
            whole = comm.reduce(x, 1, "mean")
            notes.expect(x, kept if comm.rank == 0 else want, f"reduce {turn}")
            notes.check((whole is None) == (comm.rank == 0), "reduce gives it to root")
        return notes

    assert found(comms, program) == []


# -- pairs ------------------------------------------------------------------------------------------------


def test_a_new_number_of_pairs_is_not_a_new_class(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, native = Notes(), comm._group.native
        assert native is not None
        for rows in range(1, 60):
            x = np.stack([np.arange(rows) * (1.0 - 2 * comm.rank), np.full(rows, comm.rank)], axis=1)
            got = comm.all_reduce(x.copy(), "maxloc")
            want = np.stack([np.arange(rows), np.zeros(rows)], axis=1)
            notes.expect(got, want.astype(float), f"{rows} rows")
            cube = comm.scan(x.reshape(1, rows, 2).copy(), "minloc")
            notes.check(cube.shape == (1, rows, 2), f"{cube.shape}")
        # Powers of two up to 64, for two verbs.
        notes.check(native.decided <= 14, f"{native.decided} decisions")
        for shape in ((), (3,), (2, 3), (2, 1)):
            error = outcome(lambda shape=shape: comm.all_reduce(np.ones(shape), "maxloc"))
            notes.check(isinstance(error, UsageError), f"{shape}: {error!r}")
        error = outcome(lambda: comm.reduce_scatter(np.ones(2), "maxloc"))
        notes.check(isinstance(error, UsageError), f"half a pair for each: {error!r}")
        return notes

    assert found(comms, program) == []


def test_other_memory_with_the_buffer_protocol_is_seen_where_it_lies(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, before = Notes(), calls_ended(comm)
        x = array.array("d", [1.0 + comm.rank, 2.0])
        notes.check(comm.all_reduce(x) is x, "all_reduce gives what it got")
        notes.expect(x.tolist(), [3.0, 4.0], "array.array")
        whole = array.array("i", [comm.rank])
        notes.expect(comm.all_gather(whole), np.array([[0], [1]], np.int32), "all_gather")
        with mmap.mmap(-1, 4096) as memory:
            memory[:4] = bytes([comm.rank + 1] * 4)
            comm.broadcast(memory, 1)
            notes.expect(memory[:4], bytes([2] * 4), "mmap")
        filled = (ctypes.c_double * 2)(comm.rank, 7)
        comm.all_reduce(filled, "max")
        notes.expect(list(filled), [1.0, 7.0], "ctypes")
        notes.check(calls_ended(comm) - before == 4, f"{calls_ended(comm) - before} calls in the engine")
        for wrong in (object(), [1.0], "text"):
            notes.check(isinstance(outcome(lambda w=wrong: comm.all_reduce(w)), UsageError), repr(wrong))
        masked = np.ma.masked_array([1.0], [True])
        notes.check(isinstance(outcome(lambda: comm.all_reduce(masked)), UsageError), "masked")
        return notes

    assert found(comms, program) == []
