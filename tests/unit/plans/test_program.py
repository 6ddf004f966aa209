"""Programs: for all counts a segment waits for those that it must wait for, and for no other."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
from tests.unit.plans.test_families import problems

from unisono.plans import (
    CATALOG,
    BoundStep,
    Buf,
    Copy,
    Plan,
    Problem,
    Recv,
    RecvReduce,
    Send,
    Shape,
    Slice,
    Step,
    build,
)
from unisono.plans import program as program_module
from unisono.plans.amounts import ONE, ZERO
from unisono.plans.layout import touched
from unisono.plans.program import BoundProgram, bound_program, piece_bytes_of

VECTORS = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
EVERY_ALGORITHM = [(collective, name) for collective, entries in CATALOG.items() for name in entries]


def problem_of(collective: str, size: int, count: int) -> Problem:
    held = {**dict.fromkeys(VECTORS, 1), "barrier": 0, "all_to_all": size * size}.get(collective, size)
    return Problem(collective, size, (count,) * held)


def conflict(one: BoundStep, other: BoundStep) -> bool:
    """Whether the order of two segments matters."""
    return any(
        a.buf is b.buf and max(a.start, b.start) < min(a.stop, b.stop) and (writes_a or writes_b)
        for a, writes_a in touched(one)
        for b, writes_b in touched(other)
    )


def check(program: BoundProgram) -> None:
    """A segment waits, directly or not, for each earlier one in conflict, and directly for no other."""
    known: list[set[int]] = []
    for i, piece in enumerate(program.pieces):
        directly = program.before[i]
        assert all(conflict(program.pieces[j], piece) for j in directly)
        known.append(set(directly).union(*(known[j] for j in directly)))
        needed = {j for j in range(i) if conflict(program.pieces[j], piece)}
        assert needed <= known[i]
        assert all(i in program.after[j] for j in directly)
    assert sum(map(len, program.after)) == sum(map(len, program.before))


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(range(1, 5), id="1-4"), pytest.param(range(5, 7), id="5-6", marks=pytest.mark.more)],
)
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_segments_wait_for_those_in_conflict_with_them(collective: str, algorithm: str, sizes: range) -> None:
    for problem in problems(collective, algorithm, sizes):
        if max(problem.counts, default=0) <= 50:
            for rank in range(problem.size):
                for segment in (1000, 7):
                    check(bound_program(build(problem, rank, algorithm), problem.counts, segment))


# Three blocks in the same slot, of which the second is short.
LONG_SHORT_LONG = Problem("reduce_scatter", 8, (50, 50, 3, 3) * 2)


def check_ring() -> None:
    for rank in range(LONG_SHORT_LONG.size):
        # Not from the cache, because one test changes the computation.
        plan = replace(build(LONG_SHORT_LONG, rank, "ring"))
        check(bound_program(plan, LONG_SHORT_LONG.counts, 4))


def test_a_long_block_waits_for_what_is_left_of_a_long_one_before_a_short_one() -> None:
    """A ring's reduce_scatter uses two slots in turn, for blocks of different lengths."""
    check_ring()


def test_the_check_fails_if_a_write_hides_all_earlier_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module._Touches, "_covers", lambda self, touch, other, cell: True)
    with pytest.raises(AssertionError):
        check_ring()


@pytest.mark.parametrize("seed", range(20))
def test_slices_with_any_overlap_keep_their_order(seed: int) -> None:
    draw = random.Random(seed)

    def some(buf: Buf) -> Slice:
        start = draw.randrange(30)
        return Slice(buf, ONE * start, ONE * (start + 1 + draw.randrange(11)))

    steps: list[Step] = []
    for _ in range(40):
        part = some(Buf.OUT)
        copied = Slice(Buf.TMP, ONE * 3, ONE * 3 + part.count)
        steps.append(
            draw.choice((Send(1, part), Recv(1, part), RecvReduce(1, some(Buf.TMP)), Copy(part, copied)))
        )
    plan = Plan(Shape("barrier", 2), "drawn", 0, (tuple(steps),), ZERO, ONE * 50)
    for segment in (100, 5):
        check(bound_program(plan, (), segment))


def test_segments_are_long_where_nothing_is_forwarded_or_reduced() -> None:
    def piece_bytes(collective: str, size: int, algorithm: str, most: int = 1 << 40) -> int:
        return piece_bytes_of(build(problem_of(collective, size, 64), 0, algorithm), 256, most)

    assert piece_bytes("broadcast", 2, "tree") == piece_bytes("broadcast", 4, "flat") == 256 * 256
    assert piece_bytes("all_to_all", 4, "pairwise") == 256 * 256
    assert piece_bytes("broadcast", 3, "tree") == piece_bytes("all_reduce", 2, "ring") == 256
    assert piece_bytes("reduce_scatter", 4, "pairwise") == 256
    assert piece_bytes("broadcast", 2, "tree", most=1000) == 1000
    assert piece_bytes("broadcast", 2, "tree", most=10) == 256


def test_cutting_takes_work_in_proportion() -> None:
    """Counted in calls, which no machine changes: eight times the segments take eight times the calls."""

    def calls(pieces: int) -> int:
        problem = Problem("all_reduce", 2, (pieces * 1000 + 3,))
        plan = build(problem, 0, "ring")
        made = 0

        def count(frame: object, event: str, what: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            bound_program(plan, problem.counts, 1000)
        finally:
            sys.setprofile(None)
        return made

    few, many = calls(512), calls(4096)
    assert few > 512
    assert many < 10 * few
