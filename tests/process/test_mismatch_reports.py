"""Reports of a mismatch: which ranks differ, and in what."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.mismatch_corpus import CALLS, LIMIT_S, Outcome, check_report, collide, f4
from tests.support.mismatches import reported_in_time
from tests.support.processes import run_processes
from tests.support.ranks import PATIENCE_S, run_each

import unisono as uni
from unisono.errors import ranks_text

# The call of one rank, the call of the others, and the difference.
DIFFERENCES = {
    "verb: barrier, they all_reduce": ("barrier", "sum"),
    "dtype: float64, they float32": ("double", "sum"),
    "count: 6, they 5": ("six", "sum"),
    "dtype: float64, they float32 and count: 1, they 7": ("a number", "a tensor"),
    "shape: 5,1, they 5": ("all_gather 2d", "all_gather"),
    "arrays: float32[5] int8[2], they []": ("fused two types", "fused none"),
    "op: max, they sum": ("max", "sum"),
    "commutative: False, they True": ("my ordered scan", "my scan"),
    "root: 1, they 0": ("broadcast from 1", "broadcast from 0"),
    "algorithm: tree, they ring": ("tree 1021", "ring 1021"),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_rank_that_differs_is_named_with_what_differs(difference, odd):
    other, usual = (CALLS[name] for name in DIFFERENCES[difference])
    calls = [other if rank == odd else usual for rank in range(4)]
    others = ", ".join(str(rank) for rank in range(4) if rank != odd)

    def is_right(outcome: Outcome) -> bool:
        error = outcome.error
        assert isinstance(error, uni.CollectiveMismatch), repr(error)
        return error.culprits == (odd,) and (
            f"rank {odd} differs from ranks {others} in {difference} during" in str(error)
        )

    reported_in_time(lambda: collide(uni.local(4), calls), is_right)


@pytest.mark.parametrize("kind", ["shm", "tcp", "quic", "gloo", "iroh"])
def test_processes_name_the_rank_that_differs(kind):
    def program(comm: uni.Communicator) -> tuple[str, str | None, tuple[int, ...], float]:
        comm.barrier()
        started = time.monotonic()
        with pytest.raises(uni.CollectiveMismatch) as caught:
            comm.barrier() if comm.rank == 2 else comm.all_reduce(f4(5))
        error = caught.value
        return str(error), error.operation, error.culprits, time.monotonic() - started

    def is_right(outcome: Any) -> bool:
        text, operation, culprits, elapsed_s = outcome
        assert operation in ("barrier", "all_reduce")
        assert f"during {operation} #1" in text
        wanted = "rank 2 differs from ranks 0, 1, 3 in verb: barrier, they all_reduce"
        return elapsed_s < LIMIT_S and culprits == (2,) and wanted in text

    reported_in_time(lambda: run_processes(program, 4, kind=kind), is_right)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_rank_that_holds_the_interpreter_is_shown_without_its_line(kind):
    """Its fingerprint has arrived, but no thread of it can report the line of the call."""
    held_s = 3.0

    def program(comm: uni.Communicator) -> tuple[str, float]:
        comm.barrier()
        if comm.rank == 1:
            work = comm.start.all_reduce(f4(6))
            comm.send(b"called", 0)
            ctypes.PyDLL(None).usleep(int(held_s * 1e6))  # PyDLL keeps the GIL
            with pytest.raises(uni.CollectiveMismatch) as caught:
                work.wait(PATIENCE_S)
            return caught.value.report, 0.0
        comm.recv(bytearray(6), 1)
        started = time.monotonic()
        with pytest.raises(uni.CollectiveMismatch) as caught:
            comm.all_reduce(f4(5))
        return caught.value.report, time.monotonic() - started

    def is_right(outcome: Any) -> bool:
        report, elapsed_s = outcome
        mine, theirs = report.splitlines()
        assert re.match(
            r"rank 0: all_reduce float32\[5\] op=sum .* at test_mismatch_reports.py:\d+$", mine
        ), report
        assert re.match(r"rank 1: all_reduce float32\[6\] op=sum algorithm=\w+", theirs), report
        return elapsed_s < 1.0

    def outcomes() -> list[Any]:
        both = run_processes(program, 2, kind=kind)
        assert " at " not in both[0][0].splitlines()[1], both[0][0]
        assert " at test_mismatch_reports.py:" in both[1][0].splitlines()[1], "a rank knows its own line"
        return both

    reported_in_time(outcomes, is_right)


def test_every_rank_reads_its_own_verb():
    calls = [CALLS["barrier" if rank == 1 else "sum"] for rank in range(3)]
    for rank, outcome in enumerate(collide(uni.local(3), calls)):
        assert outcome.error.operation == ("barrier" if rank == 1 else "all_reduce")
        assert f"during {outcome.error.operation} #0" in str(outcome.error)


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ([1], "ranks 0 and 1 called different things: dtype: float32 against float64"),
        ([2, 3], "ranks 0, 1 and ranks 2, 3 called different things: dtype: float32 against float64"),
        ([1, 3], "ranks 0, 2 and ranks 1, 3 called different things: dtype: float32 against float64"),
    ],
)
def test_without_a_majority_no_rank_is_blamed(seconds, names):
    size = 2 * len(seconds)
    calls = [CALLS["double" if rank in seconds else "sum"] for rank in range(size)]

    def is_right(outcome: Outcome) -> bool:
        assert outcome.error.culprits == () or size > 2
        return outcome.error.culprits == () and names in str(outcome.error)

    reported_in_time(lambda: collide(uni.local(size), calls), is_right)


def test_two_ranks_that_differ_in_different_ways_are_both_named():
    calls = [CALLS[name] for name in ("sum", "six", "sum", "max", "sum")]

    def is_right(outcome: Outcome) -> bool:
        text = str(outcome.error)
        return (
            outcome.error.culprits == (1, 3)
            and "rank 1 differs from ranks 0, 2, 4 in count: 6, they 5" in text
            and "rank 3 differs from ranks 0, 2, 4 in op: max, they sum" in text
        )

    reported_in_time(lambda: collide(uni.local(5), calls), is_right)


def test_a_call_made_while_the_calls_of_a_mismatch_are_collected_counts():
    """Two ranks have found that they differ; the third's call, made meanwhile, decides which is wrong."""
    comms = uni.local(3)
    found = threading.Event()
    collector = comms[0]._group._mismatches
    add = collector.add

    def noted(sequence, calls):
        found.set()
        return add(sequence, calls)

    collector.add = noted

    def one(comm):
        assert comm.rank != 2 or found.wait(PATIENCE_S)
        x = f4(5, dtype=np.float64 if comm.rank == 1 else np.float32)
        with comm, pytest.raises(uni.CollectiveMismatch) as caught:
            comm.all_reduce(x, algorithm="flat")
        return caught.value.culprits, str(caught.value)

    for culprits, text in run_each(one, comms).values():
        assert culprits == (1,)
        assert "rank 1 differs from ranks 0, 2 in dtype: float64, they float32" in text


def test_a_rank_that_never_calls_delays_the_report_by_at_most_a_second():
    comms = uni.local(4)
    calls = [CALLS[name] for name in ("sum", "double", "sum")]
    for outcome in collide(comms[:3], calls, go_on=False):
        assert outcome.elapsed_s < LIMIT_S
        check_report(outcome.error, calls)
        assert outcome.error.culprits == (1,)
        assert "rank 3 did not report in time" in str(outcome.error)


def test_ranks_in_words():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([3, 0, 1]) == "ranks 0, 1, 3"
    assert ranks_text(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert ranks_text([*range(7), 8, 9, 31]) == "ranks 0-6, 8-9, 31"
