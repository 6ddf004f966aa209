"""Programs: every piece waits for what it must, for nothing else, and cutting is quick."""

from __future__ import annotations

import random
import sys

import pytest

from unisono.plans import CATALOG, Buf, Copy, Plan, Problem, Recv, RecvReduce, Send, Slice, Step, build
from unisono.plans.layout import touched
from unisono.plans.program import Program, piece_bytes_of, program_of

VECTORS = ("all_reduce", "reduce", "broadcast", "scan", "exscan")


def problem_of(collective: str, size: int, count: int) -> Problem:
    held = {**dict.fromkeys(VECTORS, 1), "barrier": 0, "all_to_all": size * size}.get(collective, size)
    return Problem(collective, size, (count,) * held)


def conflict(one: Step, other: Step) -> bool:
    """Whether the order of two pieces matters."""
    return any(
        a.count and b.count and a.overlaps(b) and (writes_a or writes_b)
        for a, writes_a in touched(one)
        for b, writes_b in touched(other)
    )


def check(program: Program) -> None:
    """A piece waits, directly or through others, for every earlier one in conflict; directly for no other."""
    known: list[set[int]] = []
    for i, piece in enumerate(program.pieces):
        directly = program.before[i]
        assert all(conflict(program.pieces[j], piece) for j in directly)
        known.append(set(directly).union(*(known[j] for j in directly)))
        needed = {j for j in range(i) if conflict(program.pieces[j], piece)}
        assert needed <= known[i]
        assert all(i in program.after[j] for j in directly)
    assert sum(map(len, program.after)) == sum(map(len, program.before))


@pytest.mark.parametrize("collective", CATALOG)
def test_pieces_wait_for_those_in_conflict_with_them(collective: str) -> None:
    for size, count in ((2, 50), (3, 17), (5, 23)):
        problem = problem_of(collective, size, count)
        for name, entry in CATALOG[collective].items():
            if entry.needs_hosts:
                continue
            for rank in range(size):
                for segment in (1000, 7):
                    check(program_of(build(problem, rank, name), segment))


@pytest.mark.parametrize("seed", range(20))
def test_slices_that_overlap_anyhow_keep_their_order(seed: int) -> None:
    draw = random.Random(seed)

    def some(buf: Buf) -> Slice:
        start = draw.randrange(30)
        return Slice(buf, start, start + draw.randrange(12))

    steps: list[Step] = []
    for _ in range(40):
        part = some(Buf.OUT)
        copied = Slice(Buf.TMP, 3, 3 + part.count)
        steps.append(
            draw.choice((Send(1, part), Recv(1, part), RecvReduce(1, some(Buf.TMP)), Copy(part, copied)))
        )
    problem = Problem("broadcast", 2, (seed,))
    plan = Plan(problem, "drawn", 0, (tuple(steps),), 0, 50, 50)
    for segment in (100, 5):
        check(program_of(plan, segment))


def test_pieces_are_long_where_nothing_is_passed_on_or_reduced() -> None:
    def piece_bytes(collective: str, size: int, algorithm: str, most: int = 1 << 40) -> int:
        return piece_bytes_of(build(problem_of(collective, size, 64), 0, algorithm), 256, most)

    assert piece_bytes("broadcast", 2, "tree") == piece_bytes("broadcast", 4, "flat") == 256 * 256
    assert piece_bytes("all_to_all", 4, "pairwise") == 256 * 256
    assert piece_bytes("broadcast", 3, "tree") == piece_bytes("all_reduce", 2, "ring") == 256
    assert piece_bytes("reduce_scatter", 4, "pairwise") == 256
    assert piece_bytes("broadcast", 2, "tree", most=1000) == 1000
    assert piece_bytes("broadcast", 2, "tree", most=10) == 256


def test_cutting_takes_work_in_proportion() -> None:
    """Counted in calls, which no machine can change: eight times the pieces make eight times as many."""

    def calls(pieces: int) -> int:
        plan = build(Problem("all_reduce", 2, (pieces * 1000 + 3,)), 0, "ring")
        made = 0

        def count(frame: object, event: str, what: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            program_of(plan, 1000)
        finally:
            sys.setprofile(None)
        return made

    few, many = calls(512), calls(4096)
    assert few > 512
    assert many < 10 * few
