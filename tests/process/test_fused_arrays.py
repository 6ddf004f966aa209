"""all_reduce_many of several element types: one operation of the engine for each type, all at once."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, found, outcome, world
from tests.support.metronome import stopwatch
from tests.support.oracle import DTYPES, OPS, Array, Notes, operand, result
from tests.support.ranks import run_each, wait_until

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.comm.splitter import Splitter
from unisono.comm.verbs import ReferenceVerbs
from unisono.errors import CollectiveMismatch, DeadlineExceeded

__all__ = ["world"]

every_kind = pytest.mark.parametrize("kind", ["shm", "tcp"])
# Types in any order and more than once; lengths of every class, 0 and 1 among them.
MIXED = [("float64", 7), ("int8", 0), ("float16", 33), ("float64", 1), ("complex64", 5), ("float16", 4001)]


def lists(
    op: str, rank: int, size: int, pairs: list[tuple[str, int]], seed: int
) -> tuple[list[Array], list[Array]]:
    """What a rank gives, and the result."""
    given = [operand(name, op, n, rank, size, seed, i).copy() for i, (name, n) in enumerate(pairs)]
    return given, [result(name, op, n, size, seed, i) for i, (name, n) in enumerate(pairs)]


def reference(comm: Communicator) -> ReferenceVerbs:
    """The verbs on the reference path."""
    return ReferenceVerbs(comm._group, Splitter(comm._group, lambda: comm))


@every_kind
@pytest.mark.parametrize("size", [1, 2, 3])
def test_lists_of_all_types_are_reduced_in_place_by_every_op(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, calls = Notes(), 0
        for op in sorted(set(itertools.chain.from_iterable(OPS.values()))):
            pairs = [(name, n) for n in (3, 0, 2050) for name in DTYPES if op in OPS[name]]
            for start in (False, True):
                xs, want = lists(op, comm.rank, size, pairs, start)
                got = comm.start.all_reduce_many(xs, op).wait() if start else comm.all_reduce_many(xs, op)
                notes.check(got is xs, "the list itself")
                notes.expect(xs, want, op, start)
                calls += 1
        native = comm._group.native
        assert native is not None
        notes.check(native.ended == calls, "the engine has run all of them but", calls - native.ended)
        return notes

    assert found(comms, program) == []


@every_kind
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_the_reference_path_match_the_engine(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, segment_bytes=4096, eager_bytes=1024)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k, op in enumerate(("sum", "mean", "sum", "mean", "sum", "mean")):
            pairs = [(name, n * (1 + 50 * (k // 3))) for name, n in MIXED if op in OPS[name]]
            xs, want = lists(op, comm.rank, size, pairs, k)
            verbs = reference(comm) if k % size == comm.rank else comm.start
            verbs.all_reduce_many(xs, op).wait()
            notes.expect(xs, want, k, op)
        return notes

    assert found(comms, program) == []


def test_a_list_that_stalls_is_carried_on_by_python(world: MakeWorld) -> None:
    comms = world(3, stall_query_s=0.02)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(4):
            xs, want = lists("sum", comm.rank, 3, MIXED, k)
            if comm.rank == k % 3:
                comm.recv(np.empty(1), (k + 1) % 3)  # until that rank's call has stalled
            work = comm.start.all_reduce_many(xs)
            if comm.rank == (k + 1) % 3:
                notes.check(isinstance(outcome(lambda w=work: w.wait(timeout=0.1)), DeadlineExceeded), "late")
                comm.send(np.ones(1), k % 3)
            notes.check(work.wait() is xs, "the list")
            notes.expect(xs, want, k)
        return notes

    assert found(comms, program) == []
    assert all(comm._group.native.adopted > 0 for comm in comms)


def test_works_of_lists_are_polled_awaited_and_called_back(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        called: list[Any] = []
        given = [lists("sum", comm.rank, 2, MIXED, k) for k in range(4)]
        works = [comm.start.all_reduce_many(xs) for xs, _ in given]
        while not works[0].done():
            pass

        async def wait() -> Any:
            return await works[1]

        notes.check(asyncio.run(wait()) is given[1][0], "awaited")
        works[2].add_done_callback(called.append)
        uni.wait_all(works)
        wait_until(lambda: called)
        notes.check(called == [works[2]], "called back", called)
        notes.expect([xs for xs, _ in given], [want for _, want in given], "results")
        return notes

    assert found(comms, program) == []


DIFFERENT: dict[str, tuple[Any, Any, str, str]] = {
    "one length": (
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3, np.int8)]),
        lambda c: c.all_reduce_many([np.ones(2), np.ones(4, np.int8)]),
        "all_reduce_many float64[2] int8[3] op=sum",
        "all_reduce_many float64[2] int8[4] op=sum",
    ),
    "order": (
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3, np.int8), np.ones(2)]),
        lambda c: c.all_reduce_many([np.ones(2), np.ones(2), np.ones(3, np.int8)]),
        "all_reduce_many float64[2] int8[3] float64[2] op=sum",
        "all_reduce_many float64[2,2] int8[3] op=sum",
    ),
    "a type less": (
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3, np.int8)]),
        lambda c: c.all_reduce_many([np.ones(2)]),
        "all_reduce_many float64[2] int8[3] op=sum",
        "all_reduce_many float64[2] op=sum",
    ),
    "nothing of the first type": (
        lambda c: c.all_reduce_many([np.ones(0, np.int8), np.ones(3)]),
        lambda c: c.all_reduce_many([np.ones(0, np.int8), np.ones(4)]),
        "all_reduce_many int8[0] float64[3] op=sum",
        "all_reduce_many int8[0] float64[4] op=sum",
    ),
    "another verb": (
        lambda c: c.all_reduce_many([np.ones(50_000), np.ones(3, np.int8)]),
        lambda c: c.barrier(),
        "all_reduce_many float64[50000] int8[3] op=sum",
        "barrier",
    ),
}


@every_kind
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "first"])
def test_lists_that_differ_are_reported_on_every_rank(
    world: MakeWorld, kind: str, name: str, is_known: bool
) -> None:
    comms = world(2, kind)
    *calls, first, second = DIFFERENT[name]

    def program(comm: Communicator) -> Any:
        for call in calls if is_known else []:
            call(comm)
        with stopwatch() as seconds:
            error = outcome(lambda: calls[comm.rank](comm))
            assert seconds() < 1
        return (error,)

    for (error,) in run_each(program, list(comms)).values():
        assert isinstance(error, CollectiveMismatch)
        lines = error.report.splitlines()
        assert first in lines[0]
        assert second in lines[1]
        assert all("test_fused_arrays.py:" in line for line in lines), error.report


@pytest.mark.parametrize("is_started", [False, True])
def test_a_deadline_ends_a_list_that_the_others_do_not_reduce(world: MakeWorld, is_started: bool) -> None:
    comms = world(3)

    def program(comm: Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        xs, _ = lists("sum", comm.rank, 3, MIXED, 0)
        error = None
        if comm.rank == 0:
            how = group.start if is_started else group
            error = outcome(lambda: getattr(how.all_reduce_many(xs, timeout=0.05), "wait", list)())
        comm.barrier()
        return (error,)

    (error,) = run_each(program, list(comms)).values()[0]
    assert isinstance(error, DeadlineExceeded)
    assert error.waiting_on == (1, 2)
