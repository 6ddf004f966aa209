"""Reductions: every type and operation, floats, the reproducible mode, operations of the user's own."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.collective_cases import SEGMENT, cases, found, some
from tests.support.oracle import (
    DTYPES,
    PAIRS,
    PREFIX_PAIRS,
    Array,
    Notes,
    canonical,
    counts_for,
    dtype_of,
    moved,
    operand,
    operands,
    prefix,
    reduced,
    result,
)
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.plans import CATALOG, algorithms

SIZES = (1, 2, 3, 4, 5, 8)


# On two cores worlds of five and eight ranks take most of the time.
every_size = pytest.mark.parametrize(
    "size", [*SIZES[:4], *(pytest.param(size, marks=pytest.mark.more) for size in SIZES[4:])]
)


# -- every type and operation -----------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_size
def test_all_reduce_of_every_type_and_op(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name, op, count in cases(size, PAIRS):
            x = operand(name, op, count, comm.rank, size).copy()
            got = comm.all_reduce(x, op)
            notes.check(got is x, "all_reduce gives back another object", name, op, count)
            notes.expect(x, result(name, op, count, size), "all_reduce", name, op, count)
        return notes

    assert found(program, size) == []


@pytest.mark.on_every_link
@every_size
def test_reduce_of_every_type_and_op_fills_root_only(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for turn, (name, op, count) in enumerate(cases(size, PAIRS)):
            root = turn % size
            mine = operand(name, op, count, comm.rank, size)
            x = mine.copy()
            got = comm.reduce(x, root, op)
            notes.check(got is (x if comm.rank == root else None), "reduce returned", got)
            want = result(name, op, count, size) if comm.rank == root else mine
            notes.expect(x, want, "reduce", name, op, count, "root", root)
        return notes

    assert found(program, size, config="narrow") == []


@pytest.mark.on_every_link
@every_size
def test_reduce_scatter_gives_rank_r_the_reduced_row_r(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name, op, count in cases(size, PAIRS):
            got = comm.reduce_scatter(operand(name, op, (size, count), comm.rank, size), op)
            want = result(name, op, (size, count), size)[comm.rank]
            notes.expect(got, want, "reduce_scatter", name, op, count)
        return notes

    assert found(program, size) == []


@pytest.mark.on_every_link
@every_size
@pytest.mark.parametrize("verb", ["scan", "exscan"])
def test_prefixes_of_every_type_and_op(size: int, verb: str) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name, op, count in cases(size, PREFIX_PAIRS):
            xs = operands(name, op, count, size)
            got = getattr(comm, verb)(xs[comm.rank], op)
            want = prefix(op, xs, comm.rank, name, exclusive=verb == "exscan")
            notes.expect(got, want, verb, name, op, count)
        return notes

    assert found(program, size, config="narrow") == []


@pytest.mark.on_every_link
@every_size
def test_what_is_moved_arrives_bit_by_bit_whatever_its_type_root_and_length(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for turn, name in enumerate(DTYPES):
            for count in some(counts_for(1, dtype_of(name).itemsize, SEGMENT), turn, 7 if size < 5 else 4):
                root = (turn + count) % size
                xs = [moved(name, count, "one", rank) for rank in range(size)]
                rows = [moved(name, (size, count), "rows", rank) for rank in range(size)]
                label = (name, count, "root", root)

                x = xs[me].copy()
                notes.check(comm.broadcast(x, root) is x, "broadcast gives back another object", *label)
                notes.expect(x, xs[root], "broadcast", *label)
                notes.expect(comm.all_gather(xs[me]), np.stack(xs), "all_gather", *label)
                want = np.stack(xs) if me == root else None
                notes.expect(comm.gather(xs[me], root), want, "gather", *label)
                got = comm.scatter(rows[root] if me == root else None, root)
                notes.expect(got, rows[root][me], "scatter", *label)
                want = np.stack([rows[source][me] for source in range(size)])
                notes.expect(comm.all_to_all(rows[me]), want, "all_to_all", *label)
        return notes

    assert found(program, size) == []


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [3, 4])
def test_every_root_serves_every_rooted_collective(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for root in range(size):
            for count in (0, 1, 17, 1021):
                xs = operands("int32", "sum", count, size, root)
                rows = operand("int32", "sum", (size, count), root, size, "rows")
                x = xs[me].copy()
                comm.broadcast(x, root)
                notes.expect(x, xs[root], "broadcast", root, count)
                x = xs[me].copy()
                comm.reduce(x, root)
                notes.expect(x, reduced("sum", xs) if me == root else xs[me], "reduce", root, count)
                want = np.stack(xs) if me == root else None
                notes.expect(comm.gather(xs[me], root), want, "gather", root, count)
                got = comm.scatter(rows if me == root else None, root)
                notes.expect(got, rows[me], "scatter", root, count)
        return notes

    assert found(program, size, config="page") == []


# -- floats -----------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [2, 3, 8])
def test_random_floats_are_near_the_exact_sum_and_equal_on_every_rank(size: int) -> None:
    names = ("float16", "bfloat16", "float32", "float64")

    def program(comm: uni.Communicator) -> dict[tuple[str, str], bytes]:
        given: dict[tuple[str, str], bytes] = {}
        for name in names:
            for algorithm in algorithms("all_reduce"):
                x = _normal(name, comm.rank, (101,))
                given[name, algorithm] = comm.all_reduce(x, algorithm=algorithm).tobytes()
        return given

    everyone = run_ranks(program, size, config=uni.Config(segment_bytes=64)).values()
    for key in everyone[0]:
        assert len({given[key] for given in everyone}) == 1, f"ranks differ for {key}"
    for (name, algorithm), raw in everyone[0].items():
        xs = [_normal(name, rank, (101,)).astype(np.float64) for rank in range(size)]
        got = np.frombuffer(raw, dtype_of(name)).astype(np.float64)
        # Each of the size - 1 additions is off by half a unit in the last place of at most the sum of |x|.
        precision = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
        bound = (size - 1) * precision[name] * np.sum(np.abs(xs), axis=0)
        assert np.all(np.abs(got - np.sum(xs, axis=0)) <= bound), (name, algorithm)


def _normal(name: str, rank: int, shape: tuple[int, ...]) -> Array:
    parts = np.random.default_rng(rank).standard_normal((2, *shape))
    return (parts[0] + 1j * parts[1] if name == "complex64" else parts[0]).astype(dtype_of(name))


# -- the reproducible mode --------------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.more
@pytest.mark.parametrize("size", [2, 3, 7])
def test_reproducible_bits_do_not_depend_on_algorithm_segment_or_count(size: int) -> None:
    names = ("float16", "bfloat16", "float32", "float64", "complex64")
    everyone = {name: [_normal(name, rank, (size, 131)) for rank in range(size)] for name in names}
    wanted = {(name, op): canonical(op, everyone[name]) for name in names for op in ("sum", "prod", "mean")}

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for (name, op), want in wanted.items():
            xs = [x[0] for x in everyone[name]]
            for count in (17, 131):  # a longer array has the same bits at the front as a shorter one
                for how in _ordered("all_reduce"):
                    got = comm.all_reduce(xs[me][:count].copy(), op, algorithm=how)
                    notes.expect(got, want[0, :count], "all_reduce", how, name, op, count)
            for how in _ordered("reduce"):
                got = comm.reduce(xs[me].copy(), size - 1, op, algorithm=how)
                notes.expect(got, want[0] if me == size - 1 else None, "reduce", how, name, op)
            for how in _ordered("reduce_scatter"):
                got = comm.reduce_scatter(everyone[name][me], op, algorithm=how)
                notes.expect(got, want[me], "reduce_scatter", how, name, op)
            for verb in ("scan", "exscan") if op != "mean" else ():
                here = prefix(op, xs, me, name, exclusive=verb == "exscan")
                for how in _ordered(verb):
                    notes.expect(getattr(comm, verb)(xs[me], op, algorithm=how), here, verb, how, name, op)
        return notes

    for segment in (64, 4096):
        ended = run_ranks(program, size, config=uni.Config(reproducible=True, segment_bytes=segment))
        assert [note for notes in ended.values() for note in notes] == [], f"segment_bytes={segment}"


def _ordered(collective: str) -> list[str]:
    return ["auto", *(name for name, entry in CATALOG[collective].items() if entry.ordered)]


@pytest.mark.on_every_link
def test_reproducible_mode_refuses_an_algorithm_of_another_order() -> None:
    def program(comm: uni.Communicator) -> float:
        with pytest.raises(uni.UsageError, match="reproducible"):
            comm.all_reduce(np.ones(3), algorithm="ring")
        return float(comm.all_reduce(np.full(3, 2.0**comm.rank))[0])

    assert run_ranks(program, 2, config=uni.Config(reproducible=True)).values() == [3.0, 3.0]


# -- a user's own operation -------------------------------------------------------------------------------


def _compose(left: Array, right: Array) -> Array:
    """Compose affine maps a*x + b, written a + bi, left one first: associative, not commutative."""
    result: Array = left.real * right.real + 1j * (right.real * left.imag + right.imag)
    return result.astype(left.dtype)


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [1, 2, 3, 5, pytest.param(8, marks=pytest.mark.more)])
def test_an_op_that_does_not_commute_keeps_the_rank_order(size: int) -> None:
    compose = uni.op(_compose, commutative=False, identity=1 + 0j)

    def fold(xs: list[Array]) -> Array:
        total = xs[0]
        for x in xs[1:]:
            total = _compose(total, x)
        return total

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for count in (0, 1, 23, 97):
            random = [np.random.default_rng([rank, count]) for rank in range(size)]
            xs = [r.choice([-1, 1, 2], count) + 1j * r.integers(-3, 4, count) for r in random]
            rows = [np.stack([x + 1j * k for k in range(size)]) for x in xs]
            me = comm.rank
            for how in ("auto", *(n for n, e in CATALOG["all_reduce"].items() if e.keeps_rank_order)):
                got = comm.all_reduce(xs[me].copy(), compose, algorithm=how)
                notes.expect(got, fold(xs), "all_reduce", how, count)
            got = comm.reduce(xs[me].copy(), size - 1, compose)
            notes.expect(got, fold(xs) if me == size - 1 else None, "reduce", count)
            got = comm.reduce_scatter(rows[me], compose)
            notes.expect(got, fold([row[me] for row in rows]), "reduce_scatter", count)
            for how in ("auto", *(n for n, e in CATALOG["scan"].items() if e.keeps_rank_order)):
                notes.expect(comm.scan(xs[me], compose, algorithm=how), fold(xs[: me + 1]), "scan", how)
                want = fold(xs[:me]) if me else np.full(count, 1 + 0j)
                notes.expect(comm.exscan(xs[me], compose, algorithm=how), want, "exscan", how)
        return notes

    assert found(program, size) == []


@pytest.mark.on_every_link
def test_an_op_that_does_not_commute_is_refused_by_a_ring() -> None:
    compose = uni.op(_compose, commutative=False)

    def program(comm: uni.Communicator) -> complex:
        with pytest.raises(uni.UsageError, match="does not commute"):
            comm.all_reduce(np.ones(3, complex), compose, algorithm="ring")
        return complex(comm.all_reduce(np.full(3, 2 + (comm.rank + 1) * 1j), compose)[2])

    # x -> 2x + 1, then x -> 2x + 2
    assert run_ranks(program, 2).values() == [4 + 4j, 4 + 4j]


# Not on_every_link: the op appends its operands to a list of the test.
def test_an_own_op_sees_bfloat16_as_float32_and_an_exscan_needs_its_identity() -> None:
    seen: set[str] = set()

    def larger(left: Array, right: Array) -> Array:
        seen.add(left.dtype.name)
        return np.where(np.abs(left) > np.abs(right), left, right)

    def program(comm: uni.Communicator) -> list[float]:
        x = np.array([comm.rank - 2, 3 * comm.rank, -comm.rank], dtype_of("bfloat16"))
        with pytest.raises(uni.UsageError, match="identity"):
            comm.exscan(x, uni.op(larger))
        return comm.all_reduce(x, uni.op(larger)).astype(float).tolist()

    assert run_ranks(program, 4).values() == [[-2.0, 9.0, -3.0]] * 4
    assert seen == {"float32"}


# -- ops that a type does not have ------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_every_pair_outside_the_table_is_refused_before_anything_is_sent() -> None:
    from tests.support.oracle import ALL_OPS, OPS

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name in DTYPES:
            x = np.ones((2, 3), dtype_of(name))
            for op in (*ALL_OPS, "median"):
                verbs = {"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"}
                if op in OPS[name]:
                    verbs = {"scan", "exscan"} if op == "mean" else set()
                for verb in sorted(verbs):
                    try:
                        getattr(comm, verb)(x, op=op)
                        notes.append(f"{verb} {name} {op} was accepted")
                    except uni.UsageError as error:
                        notes.check("allowed" in str(error), verb, name, op, error)
        notes.check(comm.all_reduce(comm.rank + 1) == 3, "the ranks are out of step")
        return notes

    assert found(program, 2) == []
