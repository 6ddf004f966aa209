"""Every collective by every algorithm, root and length, and the shapes of results, beside the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.support.collective_cases import CONFIGS, found, some
from tests.support.oracle import (
    Array,
    Notes,
    counts_for,
    dtype_of,
    operands,
    prefix,
    reduced,
    result,
)
from tests.support.ranks import reference_local, run_each, run_ranks

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.plans import CATALOG, algorithms

# -- every algorithm by its name --------------------------------------------------------------------------


def outcome(comm: uni.Communicator, collective: str, name: str, count: int, root: int, algorithm: str) -> Any:
    """The result of a collective on this rank with an algorithm, and the expected result."""
    size, me = comm.size, comm.rank
    seed = (collective, count, root)
    takes_rows = collective in ("scatter", "reduce_scatter", "all_to_all")
    shape = (size, count) if takes_rows else count
    xs = operands(name, "sum", shape, size, *seed)
    total = result(name, "sum", shape, size, *seed)
    how = {"algorithm": algorithm}
    match collective:
        case "all_reduce":
            return comm.all_reduce(xs[me].copy(), **how), total
        case "reduce":
            return comm.reduce(xs[me].copy(), root, **how), total if me == root else None
        case "broadcast":
            return comm.broadcast(xs[me].copy(), root, **how), xs[root]
        case "all_gather":
            return comm.all_gather(xs[me], **how), np.stack(xs)
        case "gather":
            return comm.gather(xs[me], root, **how), np.stack(xs) if me == root else None
        case "scatter":
            return comm.scatter(xs[root] if me == root else None, root, **how), xs[root][me]
        case "reduce_scatter":
            return comm.reduce_scatter(xs[me], **how), total[me]
        case "all_to_all":
            return comm.all_to_all(xs[me], **how), np.stack([xs[s][me] for s in range(size)])
        case "scan" | "exscan":
            want = prefix("sum", xs, me, name, exclusive=collective == "exscan")
            return getattr(comm, collective)(xs[me], **how), want
        case "barrier":
            return comm.barrier(**how), None
    raise AssertionError(f"no case for {collective}")


@pytest.mark.on_every_link
@pytest.mark.more
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_algorithm_gives_the_right_answer_whatever_the_segments(size: int, config: str) -> None:
    segment = CONFIGS[config]["segment_bytes"]

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for turn, collective in enumerate(CATALOG):
            for algorithm in algorithms(collective):
                for name in ("int32", "bfloat16") if config == "short" else ("int16",):
                    counts = counts_for(size, dtype_of(name).itemsize, segment)
                    chosen = counts if size < 5 and name == "int32" else some(counts, turn, 4)
                    for count in chosen if collective != "barrier" else [0]:
                        root = (count + turn) % size
                        got, want = outcome(comm, collective, name, count, root, algorithm)
                        notes.expect(got, want, collective, algorithm, name, count, "root", root)
        return notes

    assert found(program, size, config=config) == []


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 0, 0, 1, 2, 2)], ids=str)
def test_every_algorithm_gives_the_right_answer_across_hosts(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the Python backend, whose ranks can be assigned to several hosts."""
    monkeypatch.setattr(LocalBackend, "hosts", lambda self: hosts)
    size = len(hosts)

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        notes.check(comm.backend.hosts() == hosts, "hosts", comm.backend.hosts())
        for turn, collective in enumerate(CATALOG):
            for algorithm in ("auto", *algorithms(collective)):
                for count in (1, 13, 16 * size + 1) if collective != "barrier" else [0]:
                    root = (count + turn) % size
                    got, want = outcome(comm, collective, "int32", count, root, algorithm)
                    notes.expect(got, want, collective, algorithm, count, "root", root)
        return notes

    comms = reference_local(size, uni.Config(**CONFIGS["short"]))
    assert [note for notes in run_each(program, comms).values() for note in notes] == []
    for comm in comms:
        comm.close()


@pytest.mark.on_every_link
def test_an_algorithm_is_refused_by_name_before_anything_is_sent() -> None:
    def program(comm: uni.Communicator) -> float:
        x = np.full(5, comm.rank + 1.0)
        with pytest.raises(uni.UsageError, match="auto, ring"):
            comm.all_reduce(x, algorithm="star")
        return float(comm.all_reduce(x)[4])

    assert run_ranks(program, 3).values() == [6.0, 6.0, 6.0]


# -- large and odd ----------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.more)])
def test_no_element_is_dropped_around_the_default_segment(size: int, delta: int) -> None:
    segment = uni.Config().segment_bytes // 4

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for count in (segment + delta, size * segment + delta):
            for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
                for algorithm in algorithms(collective):
                    got, want = outcome(comm, collective, "float32", count, size - 1, algorithm)
                    notes.expect(got, want, collective, algorithm, count)
        return notes

    ended = run_ranks(program, size)
    assert [note for notes in ended.values() for note in notes] == []


# -- the leading axis -------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_leading_axis_is_the_rank_and_the_shape_behind_it_is_kept() -> None:
    size = 3

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for shape in ((2, 3), (), (0, 3), (1, 1, 4), (5,)):
            xs = operands("int64", "sum", shape, size, shape)
            rows = operands("int64", "sum", (size, *shape), size, shape)
            notes.expect(comm.all_gather(xs[me]), np.stack(xs), "all_gather", shape)
            notes.expect(comm.gather(xs[me], 1), np.stack(xs) if me == 1 else None, "gather", shape)
            got = comm.scatter(rows[2] if me == 2 else None, 2)
            notes.expect(got, rows[2][me], "scatter", shape)
            notes.expect(comm.reduce_scatter(rows[me]), reduced("sum", rows)[me], "reduce_scatter", shape)
            want = np.stack([row[me] for row in rows])
            notes.expect(comm.all_to_all(rows[me]), want, "all_to_all", shape)
            notes.expect(comm.scan(xs[me]), reduced("sum", xs[: me + 1]), "scan", shape)
            x = xs[me].copy()
            notes.expect(comm.all_reduce(x), reduced("sum", xs), "all_reduce", shape)
        return notes

    assert found(program, size) == []


@pytest.mark.on_every_link
@pytest.mark.parametrize("verb", ["scatter", "reduce_scatter", "all_to_all"])
def test_a_leading_axis_of_another_length_is_refused_before_anything_is_sent(verb: str) -> None:
    def program(comm: uni.Communicator) -> int:
        for x in (np.ones(3), np.ones((4, 2)), np.array(1.0), 5.0):
            if verb != "scatter" or comm.rank == 0:
                with pytest.raises(uni.UsageError, match="leading axis of 2"):
                    getattr(comm, verb)(x)
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


@pytest.mark.on_every_link
@pytest.mark.parametrize("root", [-1, 2, 5, True, 1.0, None, uni.ANY])
def test_a_root_that_does_not_exist_is_refused_before_anything_is_sent(root: Any) -> None:
    def program(comm: uni.Communicator) -> int:
        x = np.ones((2, 2))
        for verb in ("broadcast", "reduce", "gather", "scatter", "gather_v", "scatter_v", "gather_object"):
            with pytest.raises(uni.UsageError, match="ranks 0 to 1"):
                getattr(comm, verb)(x, root)
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


# -- out= -------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_out_is_filled_and_given_back() -> None:
    size = 3

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        xs = operands("float32", "sum", (4, 2), size)
        rows = operands("float32", "sum", (size, 4, 2), size)
        expected: dict[str, tuple[Array, Array]] = {
            "all_reduce": (xs[me], reduced("sum", xs)),
            "all_gather": (xs[me], np.stack(xs)),
            "reduce_scatter": (rows[me], reduced("sum", rows)[me]),
            "all_to_all": (rows[me], np.stack([row[me] for row in rows])),
            "scan": (xs[me], prefix("sum", xs, me, "float32", exclusive=False)),
            "exscan": (xs[me], prefix("sum", xs, me, "float32", exclusive=True)),
        }
        for verb, (x, want) in expected.items():
            before, out = x.copy(), np.full_like(want, -7)
            notes.check(getattr(comm, verb)(x, out=out) is out, verb, "returned another object")
            notes.expect(out, want, verb)
            notes.expect(x, before, verb, "changed x")
        out = np.full((size, 4, 2), -7, np.float32) if me == 1 else None
        got = comm.gather(xs[me], 1, out=out)
        notes.check(got is out, "gather returned another object")
        notes.expect(out, np.stack(xs) if me == 1 else None, "gather")
        out = np.full((4, 2), -7, np.float32)
        got = comm.scatter(rows[1] if me == 1 else None, 1, out=out)
        notes.check(got is out, "scatter returned another object")
        notes.expect(out, rows[1][me], "scatter")
        return notes

    assert found(program, size) == []


@pytest.mark.on_every_link
def test_an_out_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    def program(comm: uni.Communicator) -> int:
        x = np.arange(4, dtype=np.float32)
        read_only = np.empty((2, 4), np.float32)
        read_only.flags.writeable = False
        strided = np.empty((2, 8), np.float32)[:, ::2]
        wrong = [
            (np.empty((2, 4)), "float32"),
            (np.empty((4, 2), np.float32), "shape"),
            (np.empty(8, np.float32), "shape"),
            (read_only, "read-only"),
            (strided, "contiguous"),
            (5, "number"),
        ]
        for out, text in wrong:
            with pytest.raises(uni.UsageError, match=text):
                comm.all_gather(x, out=out)
        with pytest.raises(uni.UsageError, match="overlap"):
            comm.scan(x, out=x)
        with pytest.raises(uni.UsageError, match="overlap"):
            comm.all_reduce(x[:3], out=x[1:])
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


# -- barriers ---------------------------------------------------------------------------------------------


# Not on_every_link: all ranks share a list.
@pytest.mark.parametrize("algorithm", algorithms("barrier"))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_no_rank_leaves_a_barrier_before_all_have_entered(size: int, algorithm: str) -> None:
    entered: list[list[int]] = [[] for _ in range(6)]

    def program(comm: uni.Communicator) -> list[int]:
        seen = []
        for turn in range(len(entered)):
            entered[turn].append(comm.rank)  # list.append is atomic
            comm.barrier(algorithm=algorithm)
            seen.append(len(entered[turn]))
        return seen

    assert run_ranks(program, size).values() == [[size] * len(entered)] * size


# -- published cases of other projects --------------------------------------------------------------------


@pytest.mark.on_every_link
def test_the_published_cases_of_others_come_out_as_published() -> None:
    """Closed forms over ranks from ferrotorch (CO, GR, CF) and nexar (allreduce, exchange, scan)."""
    f32 = np.float32

    def sums(comm: uni.Communicator) -> Notes:
        notes = Notes()
        size, r = comm.size, comm.rank
        one = f32(r + 1)
        total = size * (size + 1) / 2
        notes.expect(comm.all_reduce(np.full(3, r, f32)), np.full(3, size * (size - 1) / 2, f32), "CO01")
        notes.expect(comm.all_reduce(np.full(3, r, f32), "mean"), np.full(3, (size - 1) / 2, f32), "CO02")
        index = np.arange(7, dtype=f32)
        notes.expect(comm.all_reduce(index * one), index * f32(total), "allreduce uneven_count")
        notes.expect(comm.all_reduce(np.full(4, one), "min"), np.ones(4, f32), "min")
        notes.expect(comm.all_reduce(np.full(4, one), "max"), np.full(4, size, f32), "max")
        factorial = math.factorial(size)
        notes.expect(comm.all_reduce(np.full(2, r + 1.0), "prod"), np.full(2, float(factorial)), "prod")
        for count in (5, 6, 8, 13):
            got = comm.all_reduce(np.arange(count, dtype=np.int32) + r)
            want = np.arange(count, dtype=np.int32) * size + size * (size - 1) // 2
            notes.expect(got, want, "rs_ag", count)
        got = comm.reduce_scatter(np.arange(1, size + 1, dtype=f32).reshape(size, 1))
        notes.expect(got, np.array([size * (r + 1)], f32), "CO13")
        got = comm.all_gather(np.array([10 * r, 10 * r + 1], f32))
        notes.expect(got, np.array([[10 * s, 10 * s + 1] for s in range(size)], f32), "CO09")
        got = comm.all_to_all(np.array([100 * r + i for i in range(size)], f32))
        notes.expect(got, np.array([100 * i + r for i in range(size)], f32), "CO19")
        notes.expect(comm.scan(np.array([one])), np.array([(r + 1) * (r + 2) / 2], f32), "scan sum")
        notes.expect(comm.exscan(np.array([one])), np.array([r * (r + 1) / 2], f32), "exclusive_scan sum")
        want = np.array([float(math.factorial(r))])
        notes.expect(comm.exscan(np.array([r + 1.0]), "prod"), want, "exclusive_scan prod")
        notes.expect(comm.scan(np.array([one]), "max"), np.array([one]), "scan max")
        return notes

    for size in (1, 2, 3, 4, 7, 16):
        assert found(sums, size) == []
