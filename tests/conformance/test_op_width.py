"""Operations on items of several elements (maxloc, minloc, a user's own): no cut may separate an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, world
from tests.support.oracle import FLOATS, INTEGERS, Array, Notes, canonical_fold, dtype_of, located
from tests.support.ranks import run_each, run_ranks

import unisono as uni
from unisono.config import Config
from unisono.errors import CollectiveMismatch, PeerAborted, UsageError
from unisono.plans import CATALOG, entry_of

__all__ = ["world"]

LOCATIONS = ("maxloc", "minloc")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
# Rows have 16 bytes and segments 100, so a cut that ignores rows lies inside a row.
SHORT = {"segment_bytes": 100}


def pairs(name: str, rows: int, rank: int) -> Array:
    """(value, index) with many ties and, in floats, NaN and infinities; the indices of a row are distinct."""
    row = np.arange(rows)
    kind = dtype_of(name)
    values = ((row * 7 + rank * 5) % 6).astype(kind)
    if name in FLOATS:
        values[(row + rank) % 11 == 3] = np.nan
        values[(row * rank) % 13 == 5] = np.inf
        values[(row * rank) % 13 == 7] = -np.inf
    index = ((row * 3 + 41 * rank) % 97).astype(kind)
    return np.stack([values, index], axis=1)


def product(left: Array, right: Array) -> Array:
    """Each row of four is a 2 x 2 matrix: associative, and the order matters."""
    return (left.reshape(-1, 2, 2) @ right.reshape(-1, 2, 2)).reshape(left.shape)


MATRICES = uni.op(product, commutative=False, identity=(1, 0, 0, 1), width=4, name="matrices")


def matrices(rows: int, rank: int) -> Array:
    """Matrices of integers, whose product wraps around like NumPy's."""
    return np.arange(4 * rows).reshape(rows, 4) * (rank + 2) + np.array([rank, 1, 3, -rank])


def fold(op: Any, parts: Sequence[Array]) -> Array:
    return located(op, parts) if isinstance(op, str) else list(accumulate(parts, product))[-1]


def given(op: Any, name: str, rows: int, rank: int) -> Array:
    return pairs(name, rows, rank) if isinstance(op, str) else matrices(rows, rank)


def identity(op: Any, like: Array) -> Array:
    if not isinstance(op, str):
        return np.broadcast_to(np.array([1, 0, 0, 1]), like.shape)
    kind = like.dtype
    low, high = (-np.inf, np.inf) if kind.kind not in "iu" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return np.broadcast_to(np.array([low if op == "maxloc" else high, high], kind), like.shape)


def check(comm: Any, verb: str, op: Any, name: str, rows: int, notes: Notes, **how: Any) -> None:
    """Compare one call with NumPy."""
    size, rank = comm.size, comm.rank
    label = (verb, op, name, rows, how)
    if verb == "reduce_scatter":
        whole = [given(op, name, rows * size, r) for r in range(size)]
        every = [x.reshape(size, rows, x.shape[1]) for x in whole]
        notes.expect(comm.reduce_scatter(every[rank], op, **how), fold(op, [x[rank] for x in every]), *label)
        return
    every = [given(op, name, rows, r) for r in range(size)]
    mine = every[rank].copy()
    if verb == "all_reduce":
        notes.expect(comm.all_reduce(mine, op, **how), fold(op, every), *label)
    elif verb == "reduce":
        root = rows % size
        got = comm.reduce(mine, root, op, **how)
        notes.expect(got, fold(op, every) if rank == root else None, *label)
    else:
        before = every[: rank + (verb == "scan")]
        want = fold(op, before) if before else identity(op, mine)
        notes.expect(getattr(comm, verb)(mine, op, **how), want, *label)


def names_of(verb: str, op: Any) -> list[str]:
    """Every algorithm of the verb that the operation permits."""
    is_free = isinstance(op, str)
    return ["auto", *(n for n in CATALOG[verb] if is_free or entry_of(verb, n).keeps_rank_order)]


def everything(comm: Any, rows: Sequence[int]) -> Notes:
    notes = Notes()
    for verb in REDUCTIONS:
        for op in (*LOCATIONS, MATRICES):
            for algorithm in names_of(verb, op):
                for count in rows:
                    check(comm, verb, op, "float64", count, notes, algorithm=algorithm)
    return notes


def every_type(comm: Any) -> Notes:
    notes = Notes()
    for name in (*INTEGERS, *FLOATS):
        for op in LOCATIONS:
            for verb in REDUCTIONS:
                check(comm, verb, op, name, 61, notes)
    return notes


def long_ones(comm: Any) -> Notes:
    notes = Notes()
    for verb in REDUCTIONS:
        for op in (*LOCATIONS, MATRICES):
            check(comm, verb, op, "float64", 40_003, notes)
    return notes


def run_on(
    kind: str, make: MakeWorld, program: Callable[..., Any], size: int, *args: Any, **set_: Any
) -> Any:
    if kind == "native":
        return run_each(lambda comm: program(comm, *args), list(make(size, **set_))).values()
    if kind == "local":
        return run_ranks(program, size, *args, config=Config(**set_)).values()
    results = uni.simulate(program, size, *args, config=Config(**set_)).results
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def noted(notes: Sequence[Notes]) -> list[str]:
    """The wrong results that any rank noted."""
    return [f"rank {rank}: {note}" for rank, found in enumerate(notes) for note in found]


every_kind = pytest.mark.parametrize("kind", ["native", "local", "simulated"])


@every_kind
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_no_algorithm_separates_an_item(world: MakeWorld, kind: str, size: int) -> None:
    assert noted(run_on(kind, world, everything, size, (0, 1, 3, 50), **SHORT)) == []


@pytest.mark.more
@every_kind
@pytest.mark.parametrize("size", [6, 7, 8, 9])
def test_no_algorithm_separates_an_item_among_many(world: MakeWorld, kind: str, size: int) -> None:
    assert noted(run_on(kind, world, everything, size, (3, 50), **SHORT)) == []


@every_kind
def test_a_thousand_rows_in_many_pieces(world: MakeWorld, kind: str) -> None:
    assert noted(run_on(kind, world, everything, 3, (1000,), segment_bytes=1000)) == []


@every_kind
def test_long_arrays_keep_every_item(world: MakeWorld, kind: str) -> None:
    assert noted(run_on(kind, world, long_ones, 3)) == []


@every_kind
def test_pairs_of_every_type(world: MakeWorld, kind: str) -> None:
    assert noted(run_on(kind, world, every_type, 3, **SHORT)) == []


def rounded_sum(left: Array, right: Array) -> Array:
    """The sum of the first of three elements; the bracketing shows in its last bits."""
    a, b = left.reshape(-1, 3), right.reshape(-1, 3)
    assert (a[:, 1:] == b[:, 1:]).all(), "an item was taken apart"
    return np.column_stack([a[:, 0] + b[:, 0], a[:, 1:]])


def reproducible(comm: Any) -> Notes:
    op = uni.op(rounded_sum, width=3, name="rounded")
    row = np.arange(1000.0)
    every = [np.stack([1 / (row + 1.1 * r + 1), row, row], 1) for r in range(comm.size)]
    notes = Notes()
    want = canonical_fold(rounded_sum, every)
    for name in ("auto", *(n for n in CATALOG["all_reduce"] if entry_of("all_reduce", n).ordered)):
        notes.expect(comm.all_reduce(every[comm.rank].copy(), op, algorithm=name), want, name)
    return notes


@every_kind
@pytest.mark.parametrize("size", [3, 5])
def test_reproducible_bits_do_not_depend_on_the_algorithm(world: MakeWorld, kind: str, size: int) -> None:
    assert noted(run_on(kind, world, reproducible, size, reproducible=True, **SHORT)) == []


def uneven_and_fused(comm: Any) -> Notes:
    notes, size, rank = Notes(), comm.size, comm.rank
    counts = [(3 * r + 5) % 7 for r in range(size)]
    starts = [0, *accumulate(counts)]
    mine = slice(starts[rank], starts[rank + 1])
    for op in (*LOCATIONS, MATRICES):
        every = [given(op, "float32", sum(counts), r) for r in range(size)]
        want = fold(op, every)
        notes.expect(comm.reduce_scatter_v(every[rank], counts, op), want[mine], "v", op)
        if not isinstance(op, str):  # axis 0 is also the last axis
            flat = [4 * n for n in counts]
            got = comm.reduce_scatter_v(every[rank].reshape(-1), flat, op)
            notes.expect(got, want[mine].reshape(-1), "v flat", op)
        many = [every[rank][:3].copy(), pairs("int16", 5, rank) if isinstance(op, str) else matrices(5, rank)]
        comm.all_reduce_many(many, op)
        notes.expect(many[0], want[:3], "many", op)
        second = [pairs("int16", 5, r) if isinstance(op, str) else matrices(5, r) for r in range(size)]
        notes.expect(many[1], fold(op, second), "many, another type", op)
    part = comm.split(rank % 2, key=-rank)
    for op in LOCATIONS:
        check(part, "all_reduce", op, "float32", 33, notes)
        check(part, "exscan", op, "float32", 33, notes)
    return notes


@every_kind
def test_uneven_parts_many_at_once_and_groups(world: MakeWorld, kind: str) -> None:
    assert noted(run_on(kind, world, uneven_and_fused, 5, **SHORT)) == []


def again(comm: Any) -> Notes:
    """The same call from the same line; later calls may take the fast path."""
    notes = Notes()
    for turn in range(6):
        for rows in (1, 3, 1000):
            every = [pairs("float32", rows + turn % 2, r) for r in range(comm.size)]
            mine = every[comm.rank].copy()
            notes.expect(comm.all_reduce(mine, "maxloc"), located("maxloc", every), turn, rows)
            rows_of = [np.resize(x, (comm.size, rows, 2)) for x in every]
            got = comm.reduce_scatter(rows_of[comm.rank], "minloc")
            notes.expect(got, located("minloc", [x[comm.rank] for x in rows_of]), turn, rows)
    return notes


@every_kind
def test_a_repeated_call_gives_the_same_result(world: MakeWorld, kind: str) -> None:
    assert noted(run_on(kind, world, again, 3, **SHORT)) == []


def test_torch_tensors_and_bfloat16() -> None:
    import torch

    def program(comm: Any) -> Notes:
        notes = Notes()
        x = torch.tensor(
            [[float(comm.rank), comm.rank], [float(-comm.rank), comm.rank]], dtype=torch.bfloat16
        )
        comm.all_reduce(x, "maxloc")
        notes.expect(x.float(), np.array([[2, 2], [0, 0]], np.float32))
        return notes

    assert noted(run_ranks(program, 3).values()) == []


WIDE = uni.op(lambda left, right: left, width=3, name="wide")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda c: c.all_reduce(np.zeros(4), "maxloc"),
            r"'maxloc' on an array of shape \(4,\); .* axis of 2",
        ),
        (lambda c: c.all_reduce(np.zeros((2, 4)), "minloc"), r"shape \(2, 4\).*\(value, index\)"),
        (lambda c: c.all_reduce(1.5, "maxloc"), r"shape \(\)"),
        (lambda c: c.all_reduce(np.zeros((0,)), "maxloc"), r"shape \(0,\)"),
        (lambda c: c.all_reduce(np.zeros(()), WIDE), r"shape \(\)"),
        (lambda c: c.all_reduce(np.zeros((3, 2)), WIDE), r"shape \(3, 2\).* multiple of 3, the width"),
        (lambda c: c.reduce(np.zeros(5), 0, WIDE), r"shape \(5,\)"),
        (lambda c: c.scan(np.zeros(4), "maxloc"), r"shape \(4,\)"),
        (lambda c: c.exscan(np.zeros(4), "maxloc"), r"shape \(4,\)"),
        (lambda c: c.reduce_scatter(np.zeros(2), "maxloc"), "a part of 1 elements.* its width, 2"),
        (lambda c: c.reduce_scatter_v(np.zeros(6), [2, 4], WIDE), "a part of 2 elements.* its width, 3"),
        (lambda c: c.all_reduce_many([np.zeros((1, 2)), np.zeros(3)], "maxloc"), r"shape \(3,\)"),
        (lambda c: c.start.all_reduce(np.zeros(3), "maxloc"), r"shape \(3,\)"),
        (lambda c: c.all_reduce(np.zeros((2, 2), bool), "maxloc"), "'maxloc' is not defined for bool"),
        (
            lambda c: c.all_reduce(np.zeros((2, 2), complex), "minloc"),
            "'minloc' is not defined for complex128",
        ),
    ],
)
def test_calls_that_would_separate_an_item_are_refused_before_anything_is_sent(call: Any, match: str) -> None:
    def program(comm: Any) -> float:
        with pytest.raises(UsageError, match=match):
            call(comm)
        return comm.all_reduce(1.0)

    assert run_ranks(program, 2).values() == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["native", "local"])
def test_different_widths_are_a_mismatch(world: MakeWorld, kind: str) -> None:
    def program(comm: Any) -> str:
        op = uni.op(product, width=1 + comm.rank, name="mine")
        with pytest.raises(CollectiveMismatch) as caught:
            comm.all_reduce(np.zeros((4, 4)), op)
        return caught.value.report

    for report in run_on(kind, world, program, 2):
        assert "op=mine commutative=True width=2" in report


def test_a_users_function_may_return_rows_and_nothing_else() -> None:
    def program(comm: Any) -> list[float]:
        rows = uni.op(lambda a, b: (a + b).reshape(-1, 2), width=2, name="rows")
        wrong = uni.op(lambda a, b: (a + b).reshape(2, -1), width=2, name="wrong")
        got = comm.all_reduce(np.arange(8.0), rows).tolist()
        # The other rank may fail first; its error has the same text.
        with pytest.raises((UsageError, PeerAborted), match=r"returned shape \(2, 4\)"):
            comm.all_reduce(np.arange(8.0), wrong)
        return got

    assert run_ranks(program, 2)[0] == (2 * np.arange(8.0)).tolist()
