"""The fast path: known calls run without Python, with the same results as the reference path."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, calls_ended, every_kind, found, outcome, world
from tests.support.oracle import PAIRS, Notes, dtype_of, operand, result
from tests.support.ranks import run_each

from unisono.comm.communicator import Communicator
from unisono.errors import (
    CollectiveMismatch,
    UsageError,
)
from unisono.plans import algorithms

__all__ = ["world"]

SIZES = (0, 1, 7, 1021)


# -- right results ----------------------------------------------------------------------------------------


@pytest.mark.more
@every_kind
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions_are_numpys_when_they_are_called_again(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for (dtype, op), count in itertools.product(PAIRS, SIZES):
            for k in range(3):
                x = operand(dtype, op, count, rank, size, k).copy()
                assert comm.all_reduce(x, op) is x
                notes.expect(x, result(dtype, op, count, size, k), f"all_reduce {dtype} {op} {count} #{k}")
        for (dtype, op), count in itertools.product(PAIRS[::3], SIZES):
            for k in range(3):
                x = operand(dtype, op, count * size, rank, size, k).reshape(size, count)
                want = result(dtype, op, count * size, size, k).reshape(size, count)[rank]
                out = np.empty(count, x.dtype)
                notes.expect(comm.reduce_scatter(x, op), want, f"reduce_scatter {dtype} {op} {count} #{k}")
                assert comm.reduce_scatter(x, op=op, out=out) is out
                notes.expect(out, want, f"reduce_scatter into out {dtype} {op} {count} #{k}")
        return notes

    assert found(comms, program) == []
    for comm in comms:
        # Two of three calls, except means of 16-bit floats, which are computed in another type.
        assert calls_ended(comm) > len(PAIRS) * len(SIZES)


@every_kind
@pytest.mark.parametrize("size", [2, 4])
def test_moved_data_arrives_unchanged(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind)
    shapes = [(), (1,), (3, 5), (2, 1, 7), (0, 4), (4099,)]

    def mine(shape: tuple[int, ...], dtype: str, rank: int, k: int) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        return (np.arange(count) * 3 + 1000 * rank + 7 * k).astype(dtype_of(dtype)).reshape(shape)

    def program(comm: Communicator) -> Notes:
        notes, rank, every = Notes(), comm.rank, range(size)
        for shape, dtype in itertools.product(shapes, ("uint8", "int32", "float64", "complex128")):
            for k in range(3):
                here = [mine(shape, dtype, r, k) for r in every]
                what = f"{dtype} {shape} #{k}"
                gathered = comm.all_gather(here[rank])
                assert gathered.shape == (size, *shape)
                notes.expect(gathered, np.array(here), f"all_gather {what}")
                into = np.empty_like(gathered)
                assert comm.all_gather(here[rank], out=into) is into
                notes.expect(into, gathered, f"all_gather into out {what}")
                for root in every:
                    x = here[rank].copy()
                    assert comm.broadcast(x, root) is x
                    notes.expect(x, here[root], f"broadcast from {root} {what}")
                rows = [mine((size, *shape), dtype, r, k) for r in every]
                want = np.array([rows[r][rank] for r in every])
                swapped = comm.all_to_all(rows[rank])
                notes.expect(swapped, want, f"all_to_all {what}")
                notes.expect(comm.all_to_all(rows[rank], out=np.empty_like(want)), want, f"all_to_all {what}")
                comm.barrier()
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) > len(shapes) * 4 * 2 * (5 + size) * 0.9 for comm in comms)


def test_the_result_has_the_same_type_as_without_the_fast_path(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for x in (np.arange(2.0), np.arange(6).reshape(2, 3), np.ones((2, 0))):
            for verb in (comm.all_gather, comm.reduce_scatter, comm.all_to_all):
                first, *again = [verb(x) for _ in range(3)]
                for other in again:
                    same = (type(first), first.dtype, first.shape) == (type(other), other.dtype, other.shape)
                    notes.expect(
                        same and other.flags.c_contiguous and other.flags.writeable, True, verb.__name__
                    )
        assert comm.all_reduce.__doc__ == Communicator.all_reduce.__doc__
        assert comm.all_reduce.__name__ == "all_reduce"
        return notes

    assert found(comms, program) == []


def test_many_calls_in_a_row_keep_their_order(world: MakeWorld) -> None:
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(3000):
            x = np.array([k + comm.rank, k * comm.rank], np.int64)
            comm.all_reduce(x)
            notes.expect(x, np.array([3 * k + 3, 3 * k]), f"#{k}")
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) > 2000 for comm in comms)


@pytest.mark.more
@every_kind
def test_alternating_calls_keep_their_fingerprints(world: MakeWorld, kind: str) -> None:
    """The fingerprint of each call has its own count, also when the call runs without Python."""
    comms = world(2, kind)
    orders = [np.random.default_rng(seed).permutation(20) for seed in range(30)]

    def program(comm: Communicator) -> Any:
        notes = Notes()

        def total(count: int) -> np.ndarray[Any, Any]:
            x = np.arange(count) + float(comm.rank)
            comm.all_reduce(x)
            return x

        for order in orders:
            for count in order:
                notes.expect(total(int(count)), 2.0 * np.arange(count) + 1, f"of {count}")
        notes.expect(calls_ended(comm) > 20 * 20, True, "fast path")
        error = outcome(lambda: total(13 if comm.rank else 11))
        assert isinstance(error, CollectiveMismatch)
        notes.expect("float64[11]" in error.report and "float64[13]" in error.report, True, error.report)
        return notes

    assert found(comms, program) == []


@every_kind
def test_a_call_from_another_line_is_known_and_shown_with_its_own_line(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Any:
        for count in (5, 6, 5, 6):
            comm.all_reduce(np.ones(count))
        missed = comm._group.native.decided
        comm.all_reduce(np.ones(5))
        is_known = comm._group.native.decided == missed
        line, error = sys._getframe().f_lineno, outcome(lambda: comm.all_reduce(np.ones(5 + comm.rank)))
        return is_known, line, error.report.splitlines()

    for is_known, line, report in run_each(program, list(comms)).values():
        assert is_known
        assert [each.rpartition(" at ")[2] for each in report] == [f"test_fast_path.py:{line}"] * 2, report


# -- some ranks on the fast path, others not --------------------------------------------------------------


def test_algorithms_named_in_one_line_are_distinguished(world: MakeWorld) -> None:
    comms = world(3, "shm")
    names = [name for name in algorithms("all_reduce") if name != "hierarchical"]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k, name in itertools.product(range(4), names):
            x = operand("float64", "sum", 101, comm.rank, 3, k).copy()
            notes.expect(comm.all_reduce(x, algorithm=name), result("float64", "sum", 101, 3, k), name, k)
            comm.barrier(algorithm="flat")
        return notes

    # Several attempts: on a busy machine some calls may stall until Python adopts them.
    for _ in range(10):
        assert found(comms, program) == []
        if all(calls_ended(comm) >= 2 * 3 * len(names) for comm in comms):
            break
    else:
        raise AssertionError([calls_ended(comm) for comm in comms])

    def differing(comm: Communicator) -> None:
        comm.all_reduce(np.ones(101), algorithm=names[0] if comm.rank else names[1])

    ended = run_each(lambda comm: [outcome(lambda: differing(comm))], list(comms)).values()
    assert all(isinstance(error, CollectiveMismatch) for [error] in ended)


def test_a_rank_on_the_slow_path_matches_the_others(world: MakeWorld) -> None:
    """One rank has numbers, subclasses, strided input, other threads, new lines; others make known calls."""
    comms = world(3)

    class Own(np.ndarray):
        pass

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank

        def slow(x: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
            match k % 4:
                case 0:
                    return np.asarray(comm.all_gather(x.view(Own)))
                case 1:
                    return comm.all_gather(np.repeat(x, 2)[::2])
                case 2:
                    return comm.start.all_gather(x).wait()
            box: list[Any] = []
            thread = threading.Thread(target=lambda: box.append(comm.all_gather(x)))
            thread.start()
            thread.join()
            return box[0]

        for k in range(200):
            x = np.arange(4) + 10 * rank + k
            got = slow(x, k) if k % 3 == rank else comm.all_gather(x)
            notes.expect(got, np.array([np.arange(4) + 10 * r + k for r in range(3)]), f"#{k}")
        notes.expect(comm.all_reduce(rank + 0.5), 4.5, "a number")
        notes.expect([comm._group.call_log.next], [201], "the numbers")
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) > 100 for comm in comms)


@pytest.mark.parametrize("slow", range(3))
def test_one_decision_serves_only_counts_for_which_all_ranks_decide_the_same(
    world: MakeWorld, slow: int
) -> None:
    """A rank that took the slow path for the first call of a class decides at a later call."""
    comms = world(3)
    counts = (0, 1, 2, 3, 4, 5, 8, 9)

    def program(comm: Communicator) -> Notes:
        notes, log = Notes(), comm._group.state.call_log
        for turn, count in enumerate(counts):
            log.fast_path_open = comm.rank != slow or turn % 2 == 1
            everyone = [np.arange(3 * count).reshape(3, count) + 100 * rank for rank in range(3)]
            mine = everyone[comm.rank].copy()
            theirs = np.array([each[comm.rank] for each in everyone])
            notes.expect(comm.all_to_all(mine), theirs, f"all_to_all of {count}")
            notes.expect(comm.all_gather(mine), np.array(everyone), f"all_gather of {count}")
            notes.expect(comm.all_reduce(mine), np.sum(everyone, axis=0), f"all_reduce of {count}")
        log.fast_path_open = True
        return notes

    assert found(comms, program) == []


def test_started_works_and_blocking_calls_take_turns(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(60):
            big = np.full(300_000, comm.rank + k, np.float32)
            work = comm.start.all_reduce(big)
            small = np.array([k * comm.rank])
            for _ in range(3):
                small[0] = k * comm.rank
                comm.all_reduce(small)
                notes.expect(small, np.array([k]), f"small #{k}")
            notes.expect(work.wait()[:3], np.full(3, 2 * k + 1, np.float32), f"big #{k}")
        return notes

    assert found(comms, program) == []
    assert all(calls_ended(comm) > 50 for comm in comms)


def test_calls_of_threads_and_communicators_are_apart(world: MakeWorld) -> None:
    comms = world(4)

    def program(comm: Communicator) -> Notes:
        children = [comm.split(comm.rank // 2), comm.split(comm.rank % 2), comm.sub(range(4)), comm]
        notes = Notes()

        def live(one: Communicator, salt: int) -> None:
            for k in range(150):
                x = np.array([k, salt, one.rank], np.int64)
                one.all_reduce(x)
                n = one.size
                notes.expect(x, np.array([n * k, n * salt, n * (n - 1) // 2]), f"{one.name} #{k}")
                one.barrier()

        threads = [
            threading.Thread(target=live, args=(child, i)) for i, child in enumerate(children) if child
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        notes.expect(all(calls_ended(child) for child in children if child), True, "fast path")
        return notes

    assert found(comms, program) == []


# -- bad arguments ----------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_after_good_calls_too(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, x = Notes(), np.arange(6.0).reshape(2, 3)
        frozen = np.arange(6.0).reshape(2, 3)
        frozen.flags.writeable = False
        for _ in range(3):
            comm.all_reduce(x.copy())
            comm.all_to_all(x)
            comm.broadcast(x)
        bad: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(frozen),
            lambda: comm.all_reduce(x.T),
            lambda: comm.all_reduce(x, "band"),
            lambda: comm.all_reduce(x, "no such"),
            lambda: comm.all_reduce(x.astype(">f8")),
            lambda: comm.all_reduce(["a"]),
            lambda: comm.all_to_all(x, out=x),
            lambda: comm.all_to_all(x, out=np.empty((2, 3), np.float32)),
            lambda: comm.all_to_all(x, out=np.empty((3, 2))),
            lambda: comm.all_gather(x[1 - comm.rank], out=x),
            lambda: comm.reduce_scatter(np.ones((3, 3))),
            lambda: comm.broadcast(x, 2),
            lambda: comm.broadcast(x, True),
        ]
        for i, call in enumerate(bad):
            for _ in range(2):
                notes.expect(isinstance(outcome(call), UsageError), True, f"bad call {i}")
        notes.expect(comm.all_reduce(np.array([comm.rank])), np.array([1]), "afterwards")
        return notes

    assert found(comms, program) == []
