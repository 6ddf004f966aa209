"""Long results of native ranks: reuse of memory, parts anywhere in memory, reductions into `out`."""

from __future__ import annotations

import gc
import itertools
import resource
from typing import Any

import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, every_kind, found, outcome, world
from tests.support.oracle import Notes

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.plans import algorithms

__all__ = ["world"]

# Numbers of float64 around the lengths from which the memory of results is kept, and mapped.
LENGTHS = (4095, 4096, 131_073)

Array = np.ndarray[Any, Any]


def ramp(length: int, *numbers: int) -> Array:
    """Whole numbers that depend on the index and on the arguments; their sums are exact."""
    seed = sum(number * 31**place for place, number in enumerate(numbers, 1))
    return ((np.arange(length) * 7 + seed) % 127).astype(np.float64)


def closed(comm: Communicator, is_closed: bool) -> None:
    """Let the next call of this rank take the reference path, or the fast path."""
    comm._group.call_log.fast_path_open = not is_closed


def calls(verbs: Any, rank: int, size: int, length: int, turn: int) -> list[tuple[str, Any, Any]]:
    """Each verb that makes an array: its name, its result, and the expected one."""
    xs = [ramp(length, r, turn) for r in range(size)]
    uneven = [ramp(length + 3 * r, r, turn) for r in range(size)]
    rows = [np.stack([ramp(length, r, to, turn) for to in range(size)]) for r in range(size)]
    parts = [[ramp(length + 5 * to, r, to, turn) for to in range(size)] for r in range(size)]
    counts = [length + r for r in range(size)]
    wide = [ramp(sum(counts), r, turn) for r in range(size)]
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    is_root = rank == turn % size
    root = turn % size
    return [
        ("all_gather", verbs.all_gather(xs[rank]), np.stack(xs)),
        ("gather", verbs.gather(xs[rank], root), np.stack(xs) if is_root else None),
        ("all_to_all", verbs.all_to_all(rows[rank]), np.stack([rows[r][rank] for r in range(size)])),
        ("reduce_scatter", verbs.reduce_scatter(rows[rank]), sum(rows[r][rank] for r in range(size))),
        ("reduce_scatter_v", verbs.reduce_scatter_v(wide[rank], counts), sum(wide)[mine]),
        ("scan", verbs.scan(xs[rank]), sum(xs[: rank + 1])),
        ("scatter", verbs.scatter(rows[root] if is_root else None, root), rows[root][rank]),
        ("scatter_v", verbs.scatter_v(parts[root] if is_root else None, root), parts[root][rank]),
        ("all_gather_v", verbs.all_gather_v(uneven[rank]), uneven),
        ("gather_v", verbs.gather_v(uneven[rank], root), uneven if is_root else None),
        ("all_to_all_v", verbs.all_to_all_v(parts[rank]), [parts[r][rank] for r in range(size)]),
        ("all_gather_object", verbs.all_gather_object(xs[rank]), xs),
        ("scatter_object", verbs.scatter_object(parts[root] if is_root else None, root), parts[root][rank]),
    ]


def alike(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(got, list) and len(got) == len(wanted) and all(map(alike, got, wanted))
    if wanted is None:
        return got is None
    return got.dtype == wanted.dtype and got.shape == wanted.shape and bool((got == wanted).all())


@every_kind
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_result_is_unchanged_while_it_is_referenced(
    world: MakeWorld, kind: str, size: int, length: int
) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, held = Notes(), []
        for turn in range(4):
            closed(comm, is_closed=turn == 2 and comm.rank == 1)
            made = calls(comm, comm.rank, size, length, turn)
            if turn != 3:  # the results of the last turn are dropped first, and their memory is reused
                held.append(made)
        closed(comm, is_closed=False)
        for name, got, wanted in itertools.chain.from_iterable(held):
            notes.expect(alike(got, wanted), True, name, length)
        works = calls(comm.start, comm.rank, size, length, 5)
        for name, work, wanted in works:
            notes.expect(alike(work.wait(timeout=60), wanted), True, f"start.{name}", length)
        return notes

    assert found(comms, program) == []


def test_the_results_of_a_loop_take_turns_in_a_few_blocks(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> int:
        places, result = set(), None
        for turn in range(20):
            result = comm.all_gather_v(ramp(60_000 + comm.rank, comm.rank, turn))
            places.add(result[0].ctypes.data)
            assert alike(result, [ramp(60_000 + r, r, turn) for r in range(2)])
        return len(places)

    gc.collect()
    notes = found(comms, lambda comm: _bounded(program(comm)))
    assert notes == []


def _bounded(places: int) -> Notes:
    notes = Notes()
    # Two for each of the two ranks of the process, and one more if both used the pool at the same time.
    notes.check(places <= 8, "places of twenty results:", places)
    return notes


# -- parts anywhere in memory -----------------------------------------------------------------------------


def memory_taken(comm: Communicator, verb: str) -> int:
    """MiB of memory that a call takes whose `out=` are 32 MiB for each rank, each in its own memory."""
    xs = [np.ones((4 << 20) + rank) for rank in range(comm.size)]
    out = [np.ones_like(x) for x in xs]
    arguments: tuple[Any, ...] = (
        ([xs[comm.rank]] * comm.size,) if verb == "all_to_all_v" else (xs[comm.rank],)
    )
    comm.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if verb == "gather_v":
        comm.gather_v(*arguments, 0, out=out if comm.rank == 0 else None)
    else:
        getattr(comm, verb)(*arguments, out=out)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


@pytest.mark.parametrize("verb", ["all_gather_v", "gather_v", "all_to_all_v"])
def test_parts_are_received_where_they_belong(verb: str) -> None:
    assert max(uni.spawn(memory_taken, 2, verb)) < 16


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_may_lie_anywhere_in_memory(world: MakeWorld, size: int) -> None:
    comms = world(size, segment_bytes=4096, eager_bytes=1024, **NO_STALL)
    lengths = [(3000, 0, 17, 2999)[to % 4] for to in range(size)]
    scatters = ["auto", *(name for name in algorithms("scatter") if name != "hierarchical")]

    def part(source: int, to: int) -> Array:
        memory = ramp(2 * lengths[to] + 1, source, to)
        return memory[: lengths[to]] if (source + to) % 2 else memory[1::2]  # some have gaps

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for turn, name in enumerate(scatters * 2):
            root = turn % size
            closed(comm, is_closed=turn >= len(scatters) and rank == 1)
            got = comm.scatter_v(
                [part(root, to) for to in range(size)] if rank == root else None, root, algorithm=name
            )
            notes.expect(alike(got, part(root, rank)), True, "scatter_v", name, turn)
            out = np.full(lengths[rank], -1.0)
            given = comm.scatter_v(
                [part(root, to) for to in range(size)] if rank == root else None,
                root,
                out=out,
                algorithm=name,
            )
            notes.check(given is out, "scatter_v returns out")
            notes.expect(alike(out, part(root, rank)), True, "scatter_v into out", name, turn)
            exchanged = comm.all_to_all_v([part(rank, to) for to in range(size)])
            notes.expect(
                alike(exchanged, [part(source, rank) for source in range(size)]), True, "all_to_all_v", turn
            )
            one = ramp(5000, rank)
            same = comm.start.all_to_all_v([one] * size).wait(timeout=60)
            notes.expect(alike(same, [ramp(5000, r) for r in range(size)]), True, "one array as every part")
        closed(comm, is_closed=False)
        return notes

    assert found(comms, program) == []


@every_kind
def test_an_out_for_a_part_that_does_not_fit_is_refused(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        parts = [np.ones(3), np.ones(5)]
        whole = np.ones(8)
        wrong: list[tuple[Any, Any]] = [
            (parts, np.ones(4)),
            (parts, np.ones((3, 1))),
            (parts, np.ones(3, np.float32)),
            ([whole[:3], whole[3:]], whole[5:8]),
            ([whole[:4], whole[4:]], whole[4:]),
        ]
        if comm.rank == 0:
            for given, out in wrong:
                error = outcome(lambda g=given, o=out: comm.scatter_v(g, out=o))
                notes.check(isinstance(error, UsageError) and "out" in str(error), repr(error))
        got = comm.scatter_v(parts if comm.rank == 0 else None, out=np.zeros(3 + 2 * comm.rank))
        notes.expect(alike(got, parts[comm.rank]), True, "nothing was sent")
        return notes

    assert found(comms, program) == []


# -- reductions -------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_fills_out_and_leaves_x(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for turn, (length, dtype, op) in enumerate(
            itertools.product((0, 1, 1001, 40_001), ("float64", "int32", "float16"), ("sum", "mean", "max"))
        ):
            if op == "mean" and dtype == "int32":
                continue
            root = turn % size
            closed(comm, is_closed=turn % 3 == 1 and rank == size - 1)
            xs = [(ramp(length, r) % 5).astype(dtype) for r in range(size)]
            wanted = np.max(xs, axis=0) if op == "max" else np.sum(xs, axis=0)
            if op == "mean":
                wanted = (np.sum(xs, axis=0, dtype=np.float64) / size).astype(dtype)
            x, out = xs[rank].copy(), np.full(length, 77, dtype)
            got = comm.reduce(x, root, op, out=out)
            work = comm.start.reduce(x, root, op, out=out if rank == root else None)
            again = work.wait(timeout=60)
            if rank == root:
                notes.check(got is out and again is out, "root returns out")
                notes.expect(np.allclose(out, wanted, rtol=1e-3), True, "sum", length, dtype, op)
            else:
                notes.check(got is None and again is None and bool((out == 77).all()), "others leave it")
            notes.expect(bool((x == xs[rank]).all()), True, "x is unchanged", length, dtype, op)
        closed(comm, is_closed=False)
        x = np.ones(6)
        if rank == 0:
            for out in (np.ones(5), np.ones(6, np.int64), x, x[:6].reshape(2, 3)):
                error = outcome(lambda o=out: comm.reduce(x, out=o))
                notes.check(isinstance(error, UsageError) and "out" in str(error), repr(error))
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("size", [2, 3])
def test_reduce_scatter_v_fills_out(world: MakeWorld, size: int) -> None:
    comms = world(size, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for turn, counts in enumerate(([5 * r for r in range(size)], [9000 + r for r in range(size)])):
            for is_closed in (False, True):
                closed(comm, is_closed=is_closed and rank == 0)
                xs = [ramp(sum(counts), r, turn).reshape(-1, 1) for r in range(size)]
                out = np.full((counts[rank], 1), -1.0)
                notes.check(comm.reduce_scatter_v(xs[rank], counts, out=out) is out, "it returns out")
                start = sum(counts[:rank])
                notes.expect(alike(out, sum(xs)[start : start + counts[rank]]), True, counts)
        closed(comm, is_closed=False)
        error = outcome(lambda: comm.reduce_scatter_v(np.ones(size), [1] * size, out=np.ones(2)))
        notes.check(isinstance(error, UsageError), repr(error))
        return notes

    assert found(comms, program) == []


@every_kind
@pytest.mark.parametrize("size", [2, 3])
def test_long_reductions_to_one_rank_are_right_however_they_travel(
    world: MakeWorld, kind: str, size: int
) -> None:
    """Messages on both sides of the length from which both ranks copy; some calls are only started."""
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for turn, length in enumerate((16_383, 16_384, 100_003, 600_001) * 2):
            root = turn % size
            xs = [ramp(length, r, turn) for r in range(size)]
            x = xs[rank].copy()
            got = (
                comm.start.reduce(x, root).wait(timeout=60)
                if (turn + rank) % 3 == 0
                else comm.reduce(x, root)
            )
            notes.expect(alike(got, sum(xs) if rank == root else None), True, "reduce", length)
            notes.expect(alike(comm.scan(xs[rank]), sum(xs[: rank + 1])), True, "scan", length)
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("op", ["sum", "prod", "min", "maxloc"])
def test_rank_0_gets_the_identity_at_every_length(world: MakeWorld, op: str) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for dtype, length in itertools.product(("int16", "float64"), (2, 1022, 2048, 2050, 4098, 30_002)):
            x = np.ones((length // 2, 2), dtype)
            got = comm.exscan(x, op)
            closed(comm, is_closed=True)
            wanted = comm.exscan(x, op)
            closed(comm, is_closed=False)
            notes.expect(alike(got, wanted), True, op, dtype, length)
        return notes

    assert found(comms, program) == []
