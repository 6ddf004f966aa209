"""Programs on the native backend by itself: what it runs, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, World, world
from tests.support.plan_numbers import contributions, expected
from tests.unit.plans.test_families import EVERY_ALGORITHM, problems

import unisono as uni
from unisono import _native
from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.programs import compiled
from unisono.core.dtypes import DTYPES
from unisono.core.envelope import Tags
from unisono.core.ops import as_op
from unisono.core.request import HeaderMismatch, LengthMismatch, Request
from unisono.messaging.stage import Stage
from unisono.plans import Problem, bound, build
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Plan

pytestmark = pytest.mark.more

every_kind = pytest.mark.parametrize("kind", ["shm", "rings", "tcp", "hosts"])

__all__ = ["world"]


def stage_of(x: Any, header: bytes = b"a call: 16 bytes", name: str = "int32", tag: int = 0) -> Stage:
    memory = {Buf.OUT: x}
    return Stage(5, Tags.collective(tag, 0), DTYPES[name], as_op("sum"), memory, header)


def plan_of(rank: int, count: int, size: int = 2) -> Plan:
    return build(Problem("all_reduce", size, (count,)), rank, "doubling")


def ended(backend: NativeBackend, request: Request) -> BaseException | None:
    event = backend.runtime.event()
    request.notify(event.set)
    assert backend.runtime.block(event, 10.0, lambda: None), "the run does not end"  # type: ignore[arg-type,return-value]
    return request.error


def backends(comms: World) -> list[Any]:
    return [comm.backend for comm in comms]


@every_kind
@pytest.mark.parametrize("at", [0, 7, 8, 15])
def test_a_fingerprint_that_differs_in_one_bit_ends_the_run(world: MakeWorld, kind: str, at: int) -> None:
    one, two = backends(world(2, kind))
    mine = bytes(range(16))
    theirs = mine[:at] + bytes([mine[at] ^ 128]) + mine[at + 1 :]
    first = one.run_plan(plan_of(0, 3), (3,), stage_of(np.zeros(3, np.int32), mine))
    second = two.run_plan(plan_of(1, 3), (3,), stage_of(np.zeros(3, np.int32), theirs))
    for backend, request, peer, header in ((one, first, 1, theirs), (two, second, 0, mine)):
        error = ended(backend, request)
        assert isinstance(error, HeaderMismatch)
        assert (error.peer, error.header) == (peer, header)


def test_a_fingerprint_has_16_bytes(world: MakeWorld) -> None:
    one = backends(world(1))[0]
    for header in (b"", bytes(15), bytes(17)):
        with pytest.raises(ValueError, match="16 bytes"):
            one.run_plan(plan_of(0, 3, 1), (3,), stage_of(np.zeros(3, np.int32), header))


@pytest.mark.more
@every_kind
def test_a_wrong_length_ends_the_run(world: MakeWorld, kind: str) -> None:
    one, two = backends(world(2, kind))
    first = one.run_plan(plan_of(0, 3), (3,), stage_of(np.zeros(3, np.int32), tag=1))
    second = two.run_plan(plan_of(1, 4), (4,), stage_of(np.zeros(4, np.int32), tag=1))
    error = ended(one, first)
    assert isinstance(error, LengthMismatch)
    assert (error.peer, error.came, error.awaited) == (1, 16, 12)
    assert isinstance(ended(two, second), LengthMismatch)


@pytest.mark.more
@every_kind
def test_a_message_that_was_taken_back_leaves_a_gap_that_nothing_fills(world: MakeWorld, kind: str) -> None:
    """Rank 0 sends three segments of a broadcast and withdraws the first: no other takes its place."""
    one, two = backends(world(2, kind, segment_bytes=64, eager_bytes=0))
    length = 256 * 64 // 4  # of a segment, if every byte is received in place
    plans = [build(Problem("broadcast", 2, (3 * length,)), rank, "tree") for rank in (0, 1)]
    x, y = np.arange(3 * length, dtype=np.int32), np.full(3 * length, -1, np.int32)
    stages = [
        Stage(5, Tags.collective(0, 0), DTYPES["int32"], None, {Buf.OUT: each}, bytes(16)) for each in (x, y)
    ]
    first = one.run_plan(plans[0], (3 * length,), stages[0])
    assert first.cancel()
    ended(one, first)
    # The second and the third segment remain, as if they had been matched before their withdrawal.
    tags = [stages[0].tag + (number << 40) for number in (1, 2)]
    rest = [
        one.start_send(1, 5, tag, memoryview(x[length : 2 * length]).cast("B"), dtype=DTYPES["int32"].code)
        for tag in tags
    ]
    # The withdrawal of the first arrives before the receives are posted.
    known = two.start_recv(0, 6, 1, memoryview(bytearray(4)))
    assert ended(one, one.start_send(1, 6, 1, memoryview(b"know"))) is None
    assert ended(two, known) is None
    second = two.run_plan(plans[1], (3 * length,), stages[1])
    # A later message has arrived, so the segments have, too.
    last = two.start_recv(0, 6, 0, memoryview(bytearray(4)))
    assert ended(one, one.start_send(1, 6, 0, memoryview(b"last"))) is None
    assert ended(two, last) is None
    assert not second.done
    assert (y == -1).all(), "after the withdrawal of the first segment no other is received"
    assert second.peers_awaited() == (0,)
    assert second.cancel()
    ended(two, second)
    for request in rest:
        assert request.cancel()


@every_kind
def test_a_run_names_the_ranks_it_waits_for_until_it_is_cancelled(world: MakeWorld, kind: str) -> None:
    one = backends(world(4, kind))[0]
    request = one.run_plan(plan_of(0, 300_000, 4), (300_000,), stage_of(np.zeros(300_000, np.int32)))
    assert request.peers_awaited() == (1,)
    assert request.cancel()
    assert isinstance(ended(one, request), uni.ClosedError)
    assert request.peers_awaited() == ()
    assert not request.cancel()


def test_a_run_ends_with_its_backend(world: MakeWorld) -> None:
    one, _ = backends(world(2))
    request = one.run_plan(plan_of(0, 3), (3,), stage_of(np.zeros(3, np.int32)))
    one.close()
    assert request.done
    assert isinstance(request.error, uni.ClosedError)
    late = one.run_plan(plan_of(0, 3), (3,), stage_of(np.zeros(3, np.int32), tag=1))
    assert isinstance(late.error, uni.ClosedError)


ONE_COUNT = (
    [(0, 0, 1), (1, 0, 1), (3, 1, 2)],
    [(0, 1, 1), (0, 2, 1), (2, 3, 1)],
)  # points: 0, count, half, end
BAD_STEPS = {
    "no such step": (5, 0, 1, 0, 1, 1, 0, 1, 0),
    "no such peer": (0, 2, 1, 0, 1, 1, 0, 1, 0),
    "beyond the end": (3, 0, 1, 0, 4, 0, 0, 4, 0),
    "writes to in": (3, 0, 0, 0, 1, 1, 0, 1, 0),
    "ends before it starts": (3, 0, 1, 1, 0, 0, 1, 0, 0),
    "no such buffer": (3, 0, 1, 0, 1, 3, 0, 1, 0),
    "no such point": (3, 0, 1, 0, 9, 0, 0, 9, 0),
    "halves that may differ by one": (3, 0, 1, 0, 2, 0, 2, 3, 0),
    "an overlap": (3, 0, 1, 0, 2, 1, 0, 2, 0),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_program_that_makes_no_sense_for_some_counts_is_refused(name: str) -> None:
    cuts, points = ONE_COUNT
    points = [*points, (1, 1, 1)]  # twice the count
    with pytest.raises(RuntimeError, match=r"^invalid program: "):
        _native.Program(cuts, points, [BAD_STEPS[name]], [], (1, 1), 1, 2)
    # The two halves together are the whole.
    _native.Program(cuts, points, [(3, 0, 1, 0, 3, 0, 0, 1, 0)], [], (1, 1), 1, 2)


def test_a_program_whose_edges_or_atoms_make_no_sense_is_refused() -> None:
    cuts, points = ONE_COUNT
    step = (3, 0, 1, 0, 1, 0, 0, 1, 0)
    for edge in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 2, 0, 0), (0, 1, 2, 0), (-1, 1, 0, 0)):
        with pytest.raises(RuntimeError, match=r"^invalid program: "):
            _native.Program(cuts, points, [step, step], [edge], (1, 1), 1, 1)
    for bad in ((1, 1, 1), (3, 1, 2), (3, 9, 2), (4, 0, 1), (3, 2, 0), (1, -1, 1)):
        with pytest.raises(RuntimeError, match=r"^invalid program: "):
            _native.Program([*cuts, bad], points, [], [], (1, 1), 1, 1)
    for point in ((9, 1, 1), (0, 9, 1), (0, 1, 0), (0, 1, 1 << 40)):
        with pytest.raises(RuntimeError, match=r"^invalid program: "):
            _native.Program(cuts, [*points, point], [], [], (1, 1), 1, 1)


def test_a_buffer_or_counts_that_are_not_those_of_the_program_are_refused(world: MakeWorld) -> None:
    (one,) = backends(world(1))
    program = compiled(plan_of(0, 3, 1))
    call = _native.ProgramCall(program, [3], False, 16, None)
    for out in (np.zeros(2, np.int32), np.zeros(4, np.int32)):
        with pytest.raises(ValueError, match="length"):
            one._engine.run(1, call, 5, 0, DTYPES["int32"].code, 0, None, out, bytes(16), 8)
    for counts in ([], [3, 3], [1 << 59]):
        with pytest.raises(ValueError, match="counts"):
            _native.ProgramCall(program, counts, False, 16, None)
    with pytest.raises(ValueError, match="counts"):
        _native.ProgramCall(program, [3], False, 0, None)


@pytest.mark.parametrize(
    ("kind", "size"), [*(("shm", size) for size in range(1, 10)), ("tcp", 3), ("tcp", 8)]
)
def test_programs_bound_to_any_counts_give_what_numpy_says(world: MakeWorld, kind: str, size: int) -> None:
    """The table of tests/unit/plans/test_families.py: counts around the number of ranks, zeros, hosts.

    At first segments have eight elements, so that many steps are cut; later no step is cut.
    """
    numbers = itertools.count()
    for segment in (64, 1 << 16):
        ranks = backends(world(size, kind, segment_bytes=segment))
        for collective, algorithm in EVERY_ALGORITHM:
            for problem in problems(collective, algorithm, range(size, size + 1)):
                check_run(ranks, problem, algorithm, next(numbers))


def check_run(ranks: list[Any], problem: Problem, algorithm: str, number: int) -> None:
    given = contributions(problem)
    requests, memory = [], []
    for rank, (backend, own) in enumerate(zip(ranks, given, strict=True)):
        plan = bound(problem, rank, algorithm)
        in_place = problem.collective in ("all_reduce", "broadcast", "reduce")
        out = np.resize(own, plan.out_count) if in_place else np.full(plan.out_count, -1, np.int64)
        memory.append({Buf.IN: own[: plan.in_count].copy(), Buf.OUT: out})
        op = as_op("sum") if reduces(problem.collective) else None
        stage = Stage(5, Tags.collective(number, 0), DTYPES["int64"], op, memory[rank], bytes(16))
        requests.append(backend.run_plan(build(problem, rank, algorithm), problem.counts, stage))
    for backend, request in zip(ranks, requests, strict=True):
        assert ended(backend, request) is None, (problem, algorithm)
    for rank, want in enumerate(expected(problem, given)):
        if want is not None:
            np.testing.assert_array_equal(memory[rank][Buf.OUT], want, f"{problem} by {algorithm}, {rank}")


@every_kind
def test_slots_of_blocks_with_different_lengths_keep_every_block(world: MakeWorld, kind: str) -> None:
    """Long, short, long in one of a ring's two slots: the third must not overwrite data still being sent."""
    ranks = backends(world(8, kind, segment_bytes=64, window_segments=2, eager_bytes=0))
    for turn in range(12):
        counts = tuple(3 if (rank + turn) % 4 < 2 else 400 + rank for rank in range(8))
        check_run(ranks, Problem("reduce_scatter", 8, counts), "ring", turn)
