"""Uneven collectives, fused ones, and objects, whose lengths only their owner knows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.support.oracle import DTYPES, PAIRS, Array, Notes, moved, operand, reduced
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.plans import CATALOG, algorithms

SHORT = uni.Config(segment_bytes=64)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])

# Lengths of the ranks' parts: all empty, some empty, one very long, growing, just over a segment.
LENGTHS = {
    "empty": lambda rank: 0,
    "ones": lambda rank: 1,
    "holes": lambda rank: (rank * 7 + 3) % 5 if rank % 2 else 0,
    "giant": lambda rank: 301 if rank == 1 else 0,
    "growing": lambda rank: rank,
    "segments": lambda rank: 17 + 16 * rank,
}


def lengths_of(pattern: str, size: int) -> list[int]:
    return [LENGTHS[pattern](rank) for rank in range(size)]


# -- gather and scatter -----------------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_size
def test_parts_of_any_length_and_type_are_gathered_by_rank(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for turn, pattern in enumerate(LENGTHS):
            lengths = lengths_of(pattern, size)
            for k, name in enumerate(DTYPES[turn::3]):
                tail = ((), (3,), (2, 0))[k % 3]
                xs = [moved(name, (n, *tail), "part", r) for r, n in enumerate(lengths)]
                root = turn % size
                notes.expect(comm.all_gather_v(xs[me]), xs, "all_gather_v", name, pattern, tail)
                want = xs if me == root else None
                notes.expect(comm.gather_v(xs[me], root), want, "gather_v", name, pattern, tail)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
@every_size
def test_parts_of_any_length_and_type_are_scattered_to_their_rank(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for root in range(size):
            for turn, pattern in enumerate(LENGTHS):
                name = DTYPES[(root + 4 * turn) % len(DTYPES)]
                for tail in ((), (2,)):
                    parts = [
                        moved(name, (n, *tail), root, r) for r, n in enumerate(lengths_of(pattern, size))
                    ]
                    got = comm.scatter_v(parts if comm.rank == root else None, root)
                    notes.expect(got, parts[comm.rank], "scatter_v", name, pattern, tail, "root", root)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
@every_size
def test_everyone_gets_what_everyone_had_for_it(size: int) -> None:
    def cell(name: str, pattern: str, source: int, target: int) -> Array:
        length = LENGTHS[pattern]((source * 3 + target) % size)
        return moved(name, (length, 2), source, target)

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for turn, pattern in enumerate(LENGTHS):
            for name in DTYPES[turn::3]:
                parts = [cell(name, pattern, me, target) for target in range(size)]
                want = [cell(name, pattern, source, me) for source in range(size)]
                notes.expect(comm.all_to_all_v(parts), want, "all_to_all_v", name, pattern)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
def test_the_published_uneven_exchange_comes_out_as_published() -> None:
    """Ferrotorch CO22: send sizes [1, 3] and [2, 2]."""

    def program(comm: uni.Communicator) -> list[list[float]]:
        given = ([[10.0], [20.0, 21.0, 22.0]], [[30.0, 31.0], [40.0, 41.0]])[comm.rank]
        return [part.tolist() for part in comm.all_to_all_v([np.array(part) for part in given])]

    assert run_ranks(program, 2).values() == [[[10], [30, 31]], [[20, 21, 22], [40, 41]]]


@pytest.mark.on_every_link
@every_size
def test_reduce_scatter_v_cuts_the_reduced_rows_by_the_counts(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        patterns = list(LENGTHS)
        for turn, (name, op) in enumerate(PAIRS):
            counts = lengths_of(patterns[turn % len(patterns)], size)
            tail = ((), (2,), (1, 3))[turn % 3]
            shape = (sum(counts), *tail)
            xs = [operand(name, op, shape, rank, size) for rank in range(size)]
            start = sum(counts[: comm.rank])
            want = reduced(op, xs)[start : start + counts[comm.rank]]
            got = comm.reduce_scatter_v(xs[comm.rank], counts, op)
            notes.expect(got, want, "reduce_scatter_v", name, op, counts, tail)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [3, 5])
def test_every_algorithm_that_takes_uneven_lengths_gives_the_right_answer(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for pattern in LENGTHS:
            lengths = lengths_of(pattern, size)
            xs = [moved("int16", (n, 2), r) for r, n in enumerate(lengths)]
            for how in algorithms("all_gather"):
                notes.expect(comm.all_gather_v(xs[me], algorithm=how), xs, "all_gather_v", how, pattern)
            for root in range(size):
                for how in algorithms("gather"):
                    got = comm.gather_v(xs[me], root, algorithm=how)
                    notes.expect(got, xs if me == root else None, "gather_v", how, pattern, root)
                for how in algorithms("scatter"):
                    got = comm.scatter_v(xs if me == root else None, root, algorithm=how)
                    notes.expect(got, xs[me], "scatter_v", how, pattern, root)
            rows = [operand("int16", "sum", (sum(lengths), 2), r, size) for r in range(size)]
            start = sum(lengths[:me])
            for how in algorithms("reduce_scatter"):
                got = comm.reduce_scatter_v(rows[me], lengths, algorithm=how)
                want = reduced("sum", rows)[start : start + lengths[me]]
                notes.expect(got, want, "reduce_scatter_v", how, pattern)
            for how, entry in CATALOG["all_to_all"].items():
                if entry.takes_uneven:
                    parts = [moved("int16", lengths[(me + t) % size], me, t) for t in range(size)]
                    want = [moved("int16", lengths[(s + me) % size], s, me) for s in range(size)]
                    notes.expect(comm.all_to_all_v(parts, algorithm=how), want, "all_to_all_v", how, pattern)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_lists_that_do_not_fit_the_ranks_are_refused_before_anything_is_sent() -> None:
    def program(comm: uni.Communicator) -> int:
        x = np.ones(4)
        wrong: list[Any] = [[x], [x, x, x], None, b"ab", x]
        if comm.rank == 0:
            for parts in wrong:
                with pytest.raises(uni.UsageError, match="length 2"):
                    comm.scatter_v(parts)
        for parts in wrong:
            with pytest.raises(uni.UsageError, match="length 2"):
                comm.all_to_all_v(parts)
        with pytest.raises(uni.UsageError, match="differ in dtype"):
            comm.all_to_all_v([np.ones(2), np.ones(2, np.float32)])
        with pytest.raises(uni.UsageError, match="shape beyond axis 0"):
            comm.all_to_all_v([np.ones((2, 3)), np.ones((2, 4))])
        for counts in ([4], [2, 1], [5, -1], [2, 2, 0], 4, ["a", "b"]):
            with pytest.raises(uni.UsageError, match="counts"):
                comm.reduce_scatter_v(x, counts)
        for scalar in (5.0, np.array(1.0)):
            with pytest.raises(uni.UsageError, match="axis 0"):
                comm.all_gather_v(scalar)
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


@pytest.mark.on_every_link
@pytest.mark.parametrize("other", [np.ones(3, np.float32), np.ones((3, 2)), np.ones((3, 1))])
@pytest.mark.parametrize("verb", ["all_gather_v", "gather_v"])
def test_different_kinds_of_arrays_are_an_error_on_all_ranks(verb: str, other: Array) -> None:
    def program(comm: uni.Communicator) -> Any:
        getattr(comm, verb)(other if comm.rank == 2 else np.ones(3))
        comm.barrier()  # in a gather_v rank 1 has only sent its part to root, and gets the error here

    ended = run_ranks(program, 3)
    assert [type(error) for error in ended] == [uni.CollectiveMismatch] * 3
    assert all("float64" in error.report and str(other.dtype) in error.report for error in ended)


# -- fused ------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_size
def test_many_arrays_of_many_types_are_reduced_in_one_go_and_in_place(size: int) -> None:
    shapes: Sequence[Any] = (3, (2, 2), 0, 1, (), 200)

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for op in ("sum", "prod", "min", "max", "mean", "band", "lxor"):
            names = [name for name, allowed in PAIRS if allowed == op]
            keys = [(name, shape) for shape in shapes for name in names]
            xs = [operand(name, op, shape, comm.rank, size).copy() for name, shape in keys]
            got = comm.all_reduce_many(xs, op)
            notes.check(len(got) == len(xs) and all(g is x for g, x in zip(got, xs, strict=True)), op)
            for (name, shape), x in zip(keys, xs, strict=True):
                everyones = [operand(name, op, shape, rank, size) for rank in range(size)]
                notes.expect(x, reduced(op, everyones), "all_reduce_many", name, op, shape)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
def test_fused_arrays_may_be_none_numbers_or_refused() -> None:
    def program(comm: uni.Communicator) -> Any:
        nothing = comm.all_reduce_many([])
        numbers = comm.all_reduce_many([comm.rank, 2.5, 1 + 1j])
        read_only = np.ones(3)
        read_only.flags.writeable = False
        for xs, text in (([read_only], "read-only"), ([np.ones(6)[::2]], "contiguous"), (5, "list")):
            with pytest.raises(uni.UsageError, match=text):
                comm.all_reduce_many(xs)
        with pytest.raises(uni.UsageError, match="not defined"):
            comm.all_reduce_many([np.ones(3), np.ones(3, bool)])
        return nothing, numbers, comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 3).values() == [([], [3, 7.5, 3 + 3j], 6)] * 3


# -- objects ----------------------------------------------------------------------------------------------


@uni.register
@dataclass
class Step:
    number: int
    losses: list[float]
    weights: Any


def thing(rank: int) -> Any:
    return {
        "rank": rank,
        "tuple": (1, (rank, "zwei"), [b"\0\1", None, True]),
        "big": 3**200 + rank,
        (rank, "key"): {1, 2, rank},
        "number": 0.1 * rank + 1j,
        "step": Step(rank, [0.5] * rank, np.arange(rank * 3.0).reshape(rank, 3)),
    }


def equal(left: Any, right: Any) -> bool:
    if isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and left.dtype == right.dtype and bool((left == right).all())
    if isinstance(right, Step):
        return type(left) is Step and equal(vars(left), vars(right))
    if isinstance(right, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in right)
    return type(left) is type(right) and bool(left == right)


@pytest.mark.on_every_link
@every_size
def test_objects_travel_by_every_verb_and_keep_their_types(size: int) -> None:
    def program(comm: uni.Communicator) -> list[str]:
        notes = Notes()
        me = comm.rank
        for root in range(size):
            got = comm.broadcast_object(thing(root) if me == root else None, root)
            notes.check(equal(got, thing(root)), "broadcast_object", root)
            gathered = comm.gather_object(thing(me), root)
            fits = gathered is None if me != root else all(equal(g, thing(r)) for r, g in enumerate(gathered))
            notes.check(fits, "gather_object", root)
            got = comm.scatter_object([thing(r + root) for r in range(size)] if me == root else None, root)
            notes.check(equal(got, thing(me + root)), "scatter_object", root)
        everyone = comm.all_gather_object(thing(me))
        notes.check(all(equal(g, thing(r)) for r, g in enumerate(everyone)), "all_gather_object")
        exchanged = comm.all_to_all_object([thing(me + 2 * r) for r in range(size)])
        fits = len(exchanged) == size and all(equal(g, thing(r + 2 * me)) for r, g in enumerate(exchanged))
        notes.check(fits, "all_to_all_object")
        notes.check(comm.all_to_all_object([[]] * size) == [[]] * size, "all_to_all_object of empty lists")
        return notes

    assert run_ranks(program, size).values() == [[]] * size


def in_turn(a: Any, b: Any) -> Any:
    """A function that is neither commutative nor associative."""
    return (a, b)


@pytest.mark.on_every_link
@every_size
def test_objects_are_folded_in_the_order_of_ranks(size: int) -> None:
    def program(comm: uni.Communicator) -> list[str]:
        notes = Notes()
        for length in (0, 3, 40_000):
            objects = [{"rank": r, "text": "x" * (length + r)} for r in range(size)]
            wanted = functools.reduce(in_turn, objects)
            notes.check(comm.all_reduce_object(objects[comm.rank], in_turn) == wanted, "blocking", length)
            work = comm.start.all_reduce_object(objects[comm.rank], in_turn, timeout=60)
            notes.check(work.wait() == wanted, "started", length)
        notes.check(comm.all_reduce_object([], lambda a, b: a + b) == [], "empty lists")
        part = comm.split(comm.rank % 2, -comm.rank)
        assert part is not None
        mine = [r for r in reversed(range(size)) if r % 2 == comm.rank % 2]
        wanted = functools.reduce(in_turn, mine)
        notes.check(part.all_reduce_object(comm.rank, in_turn) == wanted, "on a group in another order")
        return notes

    assert run_ranks(program, size).values() == [[]] * size


@pytest.mark.on_every_link
def test_a_fold_may_change_its_first_object_and_every_rank_gets_its_own() -> None:
    def program(comm: uni.Communicator) -> Any:
        def merged(a: Any, b: Any) -> Any:
            a["seen"] += b["seen"]
            a["x"] += b["x"]
            return a

        mine = {"seen": [comm.rank], "x": np.full(3000, 1.0 + comm.rank)}
        got = comm.all_reduce_object(mine, merged)
        assert (mine["seen"], mine["x"][0]) == ([comm.rank], 1.0 + comm.rank)  # unchanged
        got["seen"].append(-comm.rank)
        got["x"] += comm.rank
        comm.barrier()
        return got["seen"], got["x"].tolist() == [6.0 + comm.rank] * 3000

    assert run_ranks(program, 3).values() == [([0, 1, 2, -r], True) for r in range(3)]


@pytest.mark.on_every_link
@pytest.mark.parametrize("length", [1, 40_000])
def test_an_error_in_a_fold_is_one_of_its_rank_alone(length: int) -> None:
    def program(comm: uni.Communicator) -> Any:
        def picky(a: list[Any], b: list[Any]) -> list[Any]:
            if comm.rank == 1:
                raise ZeroDivisionError("not on this rank")
            return a + b

        ends = []
        for call in (comm.all_reduce_object, lambda *given: comm.start.all_reduce_object(*given).wait()):
            try:
                ends.append(len(call([comm.rank] * length, picky)))
            except ZeroDivisionError as error:
                ends.append(str(error))
        return ends, comm.all_reduce(comm.rank)  # and the communicator still works

    whole, failed = [3 * length] * 2, ["not on this rank"] * 2
    assert run_ranks(program, 3).values() == [(whole, 3), (failed, 3), (whole, 3)]


@pytest.mark.on_every_link
def test_arrays_in_received_objects_are_ones_own() -> None:
    def program(comm: uni.Communicator) -> Any:
        weights = np.arange(4.0) if comm.rank == 0 else None
        got = comm.broadcast_object({"w": weights})
        got["w"] += comm.rank  # writable, and not shared
        comm.barrier()
        return got["w"].tolist()

    assert run_ranks(program, 3).values() == [[r, r + 1, r + 2, r + 3] for r in range(3)]


@dataclass
class Unregistered:
    x: int


@pytest.mark.on_every_link
@pytest.mark.parametrize("value", [object(), Unregistered(1), print, [1, {"a": lambda: 0}]])
def test_what_the_codec_cannot_encode_is_refused_before_anything_is_sent(value: Any) -> None:
    def program(comm: uni.Communicator) -> int:
        for verb in ("all_gather_object", "gather_object"):
            with pytest.raises(uni.UsageError):
                getattr(comm, verb)(value)
        with pytest.raises(uni.UsageError):
            comm.all_to_all_object([1, value])
        with pytest.raises(uni.UsageError):
            comm.all_reduce_object(value, in_turn)
        for wrong in ([], [1], [1, 2, 3], "ab", 7, None):
            with pytest.raises(uni.UsageError, match="all_to_all_object takes a list of 2 objects"):
                comm.all_to_all_object(wrong)
        with pytest.raises(uni.UsageError, match="function of two objects"):
            comm.all_reduce_object(1, "sum")
        if comm.rank == 0:
            with pytest.raises(uni.UsageError):
                comm.broadcast_object(value)
            with pytest.raises(uni.UsageError):
                comm.scatter_object([1, value])
            with pytest.raises(uni.UsageError, match="2 objects"):
                comm.scatter_object([1])
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]
