"""reduce_scatter_v and all_reduce_many run in the engine, and match the reference path."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import NO_STALL, MakeWorld, calls_ended, every_kind, found, outcome, world
from tests.support.metronome import stopwatch
from tests.support.oracle import PAIRS, Array, Notes, as_numpy, in_family, located, operand, result
from tests.support.ranks import run_each

from unisono.comm.communicator import Communicator
from unisono.comm.splitter import Splitter
from unisono.comm.verbs import ReferenceVerbs
from unisono.errors import CollectiveMismatch, DeadlineExceeded, UsageError
from unisono.plans import algorithms

__all__ = ["world"]


def reference(comm: Communicator) -> ReferenceVerbs:
    """The verbs on the reference path."""
    return ReferenceVerbs(comm._group, Splitter(comm._group, lambda: comm))


def cuts(size: int) -> list[list[int]]:
    """Counts with zeros, with everything for one rank, and long, short, long."""
    ramp = list(range(size))
    all_to_last = [0] * (size - 1) + [13]
    return [[3] * size, [0] * size, ramp, all_to_last, [41 if r % 2 == 0 else 1 for r in ramp], ramp[::-1]]


def part_of(whole: Array, counts: list[int], rank: int) -> Array:
    start = sum(counts[:rank])
    return whole[start : start + counts[rank]]


# -- reduce_scatter_v -------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_type_and_op_is_cut_by_the_counts(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, calls = Notes(), 0
        for (dtype, op), counts in itertools.product(PAIRS, cuts(size)):
            rows = sum(counts)
            x = operand(dtype, op, (rows, 2), comm.rank, size)
            want = part_of(result(dtype, op, (rows, 2), size), counts, comm.rank)
            got = comm.reduce_scatter_v(x, counts, op)
            notes.expect(got, want, "blocking", dtype, op, counts)
            notes.expect(comm.start.reduce_scatter_v(x, tuple(counts), op).wait(), want, "started", dtype, op)
            calls += 2
        notes.check(
            calls_ended(comm) == calls, "the engine has run all of them but", calls - calls_ended(comm)
        )
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("size", [2, 3])
def test_lengths_on_both_sides_of_a_segment_with_every_algorithm(world: MakeWorld, size: int) -> None:
    comms = world(size, segment_bytes=4096, eager_bytes=1024, **NO_STALL)
    names = ["auto", *(name for name in algorithms("reduce_scatter") if name != "hierarchical")]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for name, longest in itertools.product(names, (511, 512, 513, 3001)):
            counts = [longest if r % 2 == 0 else 5 * r for r in range(size)]
            x = operand("float64", "sum", sum(counts), comm.rank, size)
            want = part_of(result("float64", "sum", sum(counts), size), counts, comm.rank)
            notes.expect(comm.reduce_scatter_v(x, counts, algorithm=name), want, name, counts)
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) == 4 * len(names) for comm in comms)


@pytest.mark.parametrize("size", [2, 3])
def test_counts_may_be_given_in_every_form(world: MakeWorld, size: int) -> None:
    comms = world(size, **NO_STALL)
    counts = [2 * r + 1 for r in range(size)]
    forms: list[Any] = [
        counts,
        tuple(counts),
        np.array(counts),
        np.array(counts, np.int32),
        [np.int16(n) for n in counts],
        np.array(counts, np.uint8),
        range(1, 2 * size, 2),
        np.repeat(counts, 2)[::2],
        array("i", counts),
        torch.tensor(counts),
    ]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        x = operand("int64", "sum", (sum(counts), 3), comm.rank, size)
        want = part_of(result("int64", "sum", (sum(counts), 3), size), counts, comm.rank)
        for form in forms:
            notes.expect(comm.reduce_scatter_v(x, form), want, repr(form))
        notes.expect(comm.reduce_scatter_v(x, iter(counts)), want, "an iterator")
        return notes

    assert found(comms, program) == []
    # All but those of an iterator, which can be read only once.
    assert [calls_ended(comm) for comm in comms] == [len(forms)] * size


def test_counts_that_do_not_cut_axis_0_are_refused_as_on_the_reference_path(world: MakeWorld) -> None:
    comms = world(2)
    x = np.ones((3, 2))
    bad: list[Any] = [
        [1, 1],
        [4, -1],
        [3],
        [1, 1, 1],
        [2**70, 3 - 2**70],
        [2**62, 2**62],
        [1.0, 2.0],
        ["1", "2"],
        np.array([[1, 2]]),
        np.array([1, 1]),
        3,
        None,
    ]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for counts in bad:
            error = outcome(lambda counts=counts: comm.reduce_scatter_v(x, counts))
            words = outcome(lambda counts=counts: reference(comm).reduce_scatter_v(x, counts))
            notes.check(isinstance(error, UsageError) and str(error) == str(words), counts, error, words)
        pairs = outcome(lambda: comm.reduce_scatter_v(np.ones(2), [1, 1], "maxloc"))
        notes.check(isinstance(pairs, UsageError) and "a part of 1 elements" in str(pairs), pairs)
        notes.check(isinstance(outcome(lambda: comm.reduce_scatter_v(1.0, [1, 1])), UsageError), "a number")
        notes.expect(comm.reduce_scatter_v(x, [1, 2]), 2 * x[: comm.rank + 1], "afterwards")
        return notes

    assert found(comms, program) == []


def test_pairs_are_never_separated(world: MakeWorld) -> None:
    comms = world(3, **NO_STALL)
    counts = [4, 0, 9]
    given = [np.random.default_rng(r).integers(0, 9, (13, 2)).astype(np.float32) for r in range(3)]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for op in ("maxloc", "minloc"):
            got = comm.reduce_scatter_v(given[comm.rank], counts, op)
            notes.expect(got, part_of(located(op, given), counts, comm.rank), op)
            xs = [given[comm.rank][:5].copy(), given[comm.rank][5:].copy()]
            comm.all_reduce_many(xs, op)
            notes.expect(np.concatenate(xs), located(op, given), "many", op)
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) == 4 for comm in comms)


@every_kind
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_the_reference_path_match_the_engine(world: MakeWorld, kind: str, size: int) -> None:
    """Both paths choose the same plan, tags and fingerprint, for all classes of counts and with a mean."""
    comms = world(size, kind)
    cases = [
        *itertools.product(("float32", "float16"), ("sum", "mean"), cuts(size)),
        ("float64", "sum", [700 * r for r in range(size)]),
        ("float64", "sum", [40_000, *[1] * (size - 1)]),
    ]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k, (dtype, op, counts) in enumerate(cases):
            rows, is_reference = sum(counts), k % size == comm.rank
            x = operand(dtype, op, rows, comm.rank, size, k)
            whole = result(dtype, op, rows, size, k)
            verbs = reference(comm) if is_reference else comm.start
            got = verbs.reduce_scatter_v(x, counts, op).wait()
            notes.expect(got, part_of(whole, counts, comm.rank), "scattered", k, dtype, op, counts)
            xs = [part.copy() for part in np.split(x, np.cumsum(counts)[:-1])]
            verbs.all_reduce_many(xs, op).wait()
            notes.expect(np.concatenate(xs), whole, "many", k, dtype, op, counts)
        return notes

    assert found(comms, program) == []


# -- all_reduce_many --------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [1, 2, 3])
def test_arrays_of_one_type_are_reduced_in_place(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)
    shapes: list[list[tuple[int, ...]]] = [
        [(7,)],
        [(3, 5), (0,), (1,)],
        [(2, 0)],
        [(1021,), (1, 1), (4, 1, 2)],
    ]

    def program(comm: Communicator) -> Notes:
        notes, calls = Notes(), 0
        for (dtype, op), some in itertools.product(PAIRS, shapes):
            want = [result(dtype, op, shape, size, i) for i, shape in enumerate(some)]
            for verb in (comm.all_reduce_many, lambda xs, op: comm.start.all_reduce_many(xs, op).wait()):
                xs = [operand(dtype, op, shape, comm.rank, size, i).copy() for i, shape in enumerate(some)]
                notes.check(verb(xs, op) is xs, "the list itself")
                notes.expect(xs, want, dtype, op, some)
                calls += 1
        notes.check(
            calls_ended(comm) == calls, "the engine has run all of them but", calls - calls_ended(comm)
        )
        return notes

    assert found(comms, program) == []


def test_lists_of_several_types_and_kinds_give_the_same(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for k in range(3):
            mine = [operand("float32", "sum", (3, n), rank, 2, k, n).copy() for n in (5, 0, 70, 30_011)]
            want = [result("float32", "sum", (3, n), 2, k, n) for n in (5, 0, 70, 30_011)]
            kinds = ("torch", "numpy", "typed", "torch")
            xs = [in_family(kind, x) for kind, x in zip(kinds, mine, strict=True)]
            notes.check(comm.all_reduce_many(xs) is xs, "the list")
            notes.expect([as_numpy(x) for x in xs], want, "of several kinds", k)
            whole, real = np.arange(4) + rank, np.arange(3.0) * rank
            comm.all_reduce_many((whole, real, whole))
            notes.expect([whole, real], [2 * np.arange(4) + 1, np.arange(3.0)], "of several types", k)
            notes.check(comm.all_reduce_many([rank, 5]) == [1, 10], "whole numbers")
            numbers = comm.all_reduce_many((rank + 0.5, np.array([2.0, rank])))
            notes.expect(numbers[1], np.array([4.0, 1.0]), "an array beside a number")
            notes.check(type(numbers) is list and numbers[0] == 2.0, "numbers", numbers)
            twice = np.full(3, rank + 1.0)
            comm.all_reduce_many([twice, twice])
            notes.expect(twice, np.full(3, 3.0), "the same array twice")
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) == 3 * 5 for comm in comms)


def test_a_started_call_keeps_its_arrays_when_the_list_changes(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(20):
            arrays = [np.arange(40_000.0) + k * comm.rank, np.arange(3.0)]
            xs = list(arrays)
            work = comm.start.all_reduce_many(xs)
            xs.clear()
            notes.check(work.wait() is xs, "the list")
            notes.expect(arrays, [2 * np.arange(40_000.0) + k, 2 * np.arange(3.0)], k)
        return notes

    assert found(comms, program) == []


# -- calls that differ ------------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Any, Any, str, str]] = {
    "counts": (
        lambda c: c.reduce_scatter_v(np.ones(7), [3, 4]),
        lambda c: c.reduce_scatter_v(np.ones(7), [4, 3]),
        "reduce_scatter_v float64[3,4] op=sum",
        "reduce_scatter_v float64[4,3] op=sum",
    ),
    "even and uneven counts": (
        lambda c: c.reduce_scatter_v(np.ones(8), [4, 4]),
        lambda c: c.reduce_scatter_v(np.ones(8), [3, 5]),
        "reduce_scatter_v float64[4,4] op=sum",
        "reduce_scatter_v float64[3,5] op=sum",
    ),
    "lengths": (
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3)]),
        lambda c: c.all_reduce_many([np.ones(3), np.ones(2)]),
        "all_reduce_many float64[2,3] op=sum",
        "all_reduce_many float64[3,2] op=sum",
    ),
    "types": (
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3)]),
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3, np.float32)]),
        "all_reduce_many float64[2,3] op=sum",
        "all_reduce_many float64[2] float32[3] op=sum",
    ),
    "one and many": (
        lambda c: c.all_reduce_many([np.ones(4)]),
        lambda c: c.all_reduce(np.ones(4)),
        "all_reduce_many float64[4] op=sum",
        "all_reduce float64[4] op=sum",
    ),
}


@every_kind
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "first"])
def test_calls_that_differ_are_reported_on_every_rank(
    world: MakeWorld, kind: str, name: str, is_known: bool
) -> None:
    comms = world(2, kind)
    *calls, first, second = DIFFERENT[name]

    def program(comm: Communicator) -> Any:
        for _ in range(3 * is_known):
            for call in calls:
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
        assert all("test_fast_uneven.py:" in line for line in lines), error.report


# -- deadlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_started", [False, True])
def test_a_deadline_ends_a_call_that_the_others_do_not_make(world: MakeWorld, is_started: bool) -> None:
    comms = world(2)
    calls: list[Any] = [
        lambda verbs, **how: verbs.reduce_scatter_v(np.ones(3), [1, 2], **how),
        lambda verbs, **how: verbs.all_reduce_many([np.ones(3), np.ones(2)], "mean", **how),
    ]

    def program(comm: Communicator) -> Any:
        errors = []
        for call in calls:
            group = comm.split(0)
            assert group is not None
            for _ in range(2):
                call(group)
            if comm.rank == 0 and is_started:
                errors.append(outcome(lambda c=call, g=group: c(g.start, timeout=0.05).wait()))
            elif comm.rank == 0:
                errors.append(outcome(lambda c=call, g=group: c(g, timeout=0.05)))
            comm.barrier()
        return errors

    errors = run_each(program, list(comms)).values()[0]
    assert [type(error) for error in errors] == [DeadlineExceeded] * 2
    assert [error.waiting_on for error in errors] == [(1,)] * 2


def test_a_call_that_stalls_is_adopted_by_python(world: MakeWorld) -> None:
    comms = world(2, stall_query_s=0.02)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(3):
            if comm.rank == 1:
                comm.recv(np.empty(1), 0)  # until rank 0's call has stalled
            work = comm.start.reduce_scatter_v(np.arange(5.0) + comm.rank, [2, 3])
            if comm.rank == 0:
                notes.check(isinstance(outcome(lambda w=work: w.wait(timeout=0.1)), DeadlineExceeded), "late")
                comm.send(np.ones(1), 1)
            notes.expect(work.wait(), part_of(2 * np.arange(5.0) + 1, [2, 3], comm.rank), "scattered", k)
            xs = [np.arange(3.0) + comm.rank, np.ones(2)]
            notes.expect(comm.all_reduce_many(xs), [2 * np.arange(3.0) + 1, np.full(2, 2.0)], "many", k)
        return notes

    assert found(comms, program) == []
    assert comms[0]._group.native.adopted >= 3
