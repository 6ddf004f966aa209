"""Every collective, with all types, operations, roots, algorithms and lengths, compared with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
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
from tests.support.ranks import reference_local, run_each, run_ranks

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.plans import CATALOG, algorithms

SIZES = (1, 2, 3, 4, 5, 8)
SEGMENT = 64
# Segments so short that every message has several, a window of one, nothing eager: every path of a transfer.
CONFIGS = {
    "short": {"segment_bytes": SEGMENT},
    "narrow": {"segment_bytes": SEGMENT, "window_segments": 1, "eager_bytes": 0},
    "page": {"segment_bytes": 4096, "eager_bytes": 256},
}
# On two cores worlds of five and eight ranks take most of the time.
every_size = pytest.mark.parametrize(
    "size", [*SIZES[:4], *(pytest.param(size, marks=pytest.mark.more) for size in SIZES[4:])]
)


def found(program: Callable[..., Notes], size: int, *args: Any, config: str = "short") -> list[str]:
    """All notes of all ranks."""
    ended = run_ranks(program, size, *args, config=uni.Config(**CONFIGS[config]))
    return [f"rank {rank}: {note}" for rank, notes in enumerate(ended.values()) for note in notes]


def some(all_counts: list[int], turn: int, how_many: int = 3) -> list[int]:
    """A few of the counts, different at every turn, so that all turns together use all counts."""
    return [all_counts[(turn * how_many + k) % len(all_counts)] for k in range(how_many)]


def cases(size: int, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    for turn, (name, op) in enumerate(pairs):
        for count in some(counts_for(size, dtype_of(name).itemsize, SEGMENT), turn, 3 if size < 8 else 2):
            yield name, op, count


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
