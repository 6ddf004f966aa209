"""Known faults of other libraries, one test each: wrong results, lost elements and hangs.

F and N name the entries of ferrotorch's and nexar's lists of weaknesses (docs/acceptance.md maps them).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.oracle import (
    HALVES,
    Array,
    Notes,
    canonical,
    dtype_of,
    identity,
    moved,
    operand,
    operands,
    reduced,
)
from tests.support.ranks import reference_local, run_each, run_ranks, sleep

import unisono as uni
from unisono import simulation
from unisono.plans import algorithms

SHORT = uni.Config(segment_bytes=64)


# -- elements that were dropped ---------------------------------------------------------------------------


def large(rank: int, count: int) -> Array:
    return np.resize(np.arange(rank, rank + 251, dtype=np.float32), count)


@pytest.mark.on_every_link
@pytest.mark.parametrize("algorithm", [a for a in algorithms("all_reduce") if a != "flat"])
@pytest.mark.parametrize("count", [2**21, 3 * 2**20 + 1], ids=["8 MiB", "a straddled boundary"])
def test_large_odd_sizes_lose_no_element_on_three_ranks(count: int, algorithm: str) -> None:
    """N1, N2: segments were cut in bytes and floored to elements; both ends counted them differently."""

    def program(comm: uni.Communicator) -> Any:
        x = comm.all_reduce(large(comm.rank, count), algorithm=algorithm)
        return np.flatnonzero(x != 3 * large(1, count)).tolist()

    assert run_ranks(program, 3).values() == [[]] * 3


@pytest.mark.on_every_link
def test_the_size_of_a_resnet_loses_no_element_on_four_ranks() -> None:
    """N1: 25,557,032 float32 on 4 ranks kept 20 local values."""
    count = 25_557_032

    def program(comm: uni.Communicator) -> Any:
        x = comm.all_reduce(large(comm.rank, count))
        x -= 6
        x /= 4
        return bool(np.array_equal(x, large(0, count)))

    assert run_ranks(program, 4).values() == [True] * 4


@pytest.mark.on_every_link
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_pipelines_lose_nothing_around_their_own_segments(delta: int) -> None:
    """N1: on both sides of the 16 Ki elements from which pipelines cut segments, and of 64 segments."""

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for count in (16 * 1024 + delta, 2 * 16 * 1024 + delta, 64 * 16 * 1024 + delta):
            x = np.arange(count, dtype=np.int32) * (comm.rank + 1)
            base = np.arange(count, dtype=np.int32)
            got = comm.broadcast(x.copy(), 1, algorithm="chain")
            notes.expect(got, base * 2, "broadcast", count)
            got = comm.reduce(x.copy(), 2, algorithm="chain")
            notes.expect(got, base * 6 if comm.rank == 2 else None, "reduce", count)
            got = comm.scan(x, algorithm="ordered")
            notes.expect(got, base * (1, 3, 6)[comm.rank], "scan", count)
        return notes

    assert run_ranks(program, 3).values() == [[]] * 3


@pytest.mark.on_every_link
@pytest.mark.parametrize("algorithm", algorithms("reduce_scatter"))
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_reduce_scatter_gives_rank_i_chunk_i(size: int, algorithm: str) -> None:
    """N3: rank i got chunk (i + 1) % N, which uniform data hid."""

    def program(comm: uni.Communicator) -> list[int]:
        x = np.arange(size * 3).reshape(size, 3) * (comm.rank + 1)
        return comm.reduce_scatter(x, algorithm=algorithm).tolist()

    factor = size * (size + 1) // 2
    want = [[(3 * r + k) * factor for k in range(3)] for r in range(size)]
    assert run_ranks(program, size).values() == want


# -- halves, NaN, subnormals ------------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_added_in_float32_and_rounded_to_even_in_body_and_tail_alike(name: str) -> None:
    """N6, F18: SIMD truncated where scalars rounded; sums were kept in bfloat16."""
    kind = dtype_of(name)
    # 1 + 1/2 unit in the last place is a tie and rounds to even, 1 + 3/2 units to the next even, slightly
    # more rounds up.
    unit = 2.0 ** (-10 if name == "float16" else -7)
    left = [1.0, 1.0 + unit, 1.0, 1.0 + unit, -1.0, 3.0]
    right = [unit / 2, unit / 2, unit * 0.75, unit / 4, -unit / 2, unit * 3]
    want = (np.array(left, np.float32) + np.array(right, np.float32)).astype(kind)
    assert want[0] == 1.0
    assert want[1] == 1.0 + 2 * unit

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        values = np.array(left if comm.rank == 0 else right, np.float32).astype(kind)
        for count in range(1, 70):  # every tail after none to several vectors
            x = np.resize(values, count)
            notes.expect(comm.all_reduce(x), np.resize(want, count), name, count)
        return notes

    assert run_ranks(program, 2).values() == [[], []]


@pytest.mark.on_every_link
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_subnormals_are_not_flushed(name: str) -> None:
    """N6: 2**-15 became 0."""
    kind = dtype_of(name)
    tiny = float(_info(name).smallest_subnormal)
    values = np.array([tiny, 3 * tiny, float(_info(name).smallest_normal) / 2, -tiny, 2.0**-15], kind)

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for count in (1, 5, 37):
            x = np.resize(values, count)
            both = [x, x]
            for op in ("sum", "min", "max", "mean"):
                notes.expect(comm.all_reduce(x.copy(), op), reduced(op, both), name, op, count)
        return notes

    assert run_ranks(program, 2).values() == [[], []]
    assert all(v != 0 for v in values.tolist())


def _info(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtype_of(name)) if name == "bfloat16" else np.finfo(name)


@pytest.mark.on_every_link
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_nan_and_infinity_come_out_alike_wherever_they_stand(name: str, algorithm: str) -> None:
    """N6: a NaN became -0.0, and min and max kept or lost it depending on its place in a vector."""
    kind, size = dtype_of(name), 3

    def given(rank: int, count: int) -> Array:
        x = operand(name, "min", count, rank, size).copy()
        x[rank::4] = np.nan if rank == 1 else np.inf if rank == 2 else -np.inf
        return x

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for count in (1, 2, 7, 33, 64, 101):
            xs = [given(rank, count) for rank in range(size)]
            for op in ("min", "max"):
                got = comm.all_reduce(xs[comm.rank].copy(), op, algorithm=algorithm)
                notes.expect(got, reduced(op, xs), name, op, count)
            for op in ("sum", "prod", "mean"):
                got = comm.all_reduce(xs[comm.rank].copy(), op, algorithm=algorithm)
                nan = np.isnan(reduced(op, xs).astype(np.float64))
                notes.check(bool((np.isnan(got.astype(np.float64)) == nan).all()), name, op, count)
                gathered = comm.all_gather(got.view(f"u{kind.itemsize}"))
                notes.check(bool((gathered == gathered[0]).all()), "ranks differ", name, op, count)
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
@pytest.mark.parametrize("name", HALVES)
def test_a_mean_of_halves_does_not_overflow_on_the_way(name: str) -> None:
    """F18: the sum was made in the same type and divided afterwards."""
    largest = float(_info(name).max)

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        x = np.full(19, largest, dtype_of(name))
        notes.expect(comm.all_reduce(x.copy(), "mean"), x, "all_reduce")
        notes.expect(comm.reduce(x.copy(), 1, "mean"), x if comm.rank == 1 else None, "reduce")
        rows = np.full((comm.size, 5), largest, dtype_of(name))
        notes.expect(comm.reduce_scatter(rows, "mean"), rows[0], "reduce_scatter")
        many = [x.copy(), rows.copy()]
        notes.expect(comm.all_reduce_many(many, "mean"), [x, rows], "all_reduce_many")
        return notes

    # Not bfloat16 with three ranks: three times its largest number overflows float32, too.
    size = 3 if name == "float16" else 2
    if name == "bfloat16":
        largest /= 2
    assert run_ranks(program, size).values() == [[]] * size


@pytest.mark.on_every_link
def test_a_mean_of_small_integers_keeps_their_precision() -> None:
    """F18: in bfloat16, 256 + 1 is 256; the mean of 1, 256, 256, 1, ... must come from the exact sum."""

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        xs = [np.full(11, 256 if r % 2 else 1, dtype_of("bfloat16")) for r in range(comm.size)]
        notes.expect(comm.all_reduce(xs[comm.rank].copy(), "mean"), canonical("mean", xs), "mean")
        return notes

    assert run_ranks(program, 8).values() == [[]] * 8


@pytest.mark.on_every_link
def test_a_single_contribution_comes_back_unchanged_to_the_bit() -> None:
    """NaN payloads and the sign of zero included, for every operation and every reduction."""

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name in ("float16", "bfloat16", "float32", "complex64"):
            x = moved(name, 29, "alone")
            for op in ("sum", "prod", "mean"):
                notes.expect(comm.all_reduce(x.copy(), op), x, "all_reduce", name, op)
                notes.expect(comm.reduce(x.copy(), 0, op), x, "reduce", name, op)
                notes.expect(comm.reduce_scatter(x.reshape(1, 29), op), x, "reduce_scatter", name, op)
                if op != "mean":
                    notes.expect(comm.scan(x, op), x, "scan", name, op)
                    want = np.full(29, identity(name, op), dtype_of(name))
                    notes.expect(comm.exscan(x, op), want, "exscan", name, op)
        return notes

    assert run_ranks(program, 1).values() == [[]]


# -- deadlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "algorithm"), [("all_reduce", "ring"), ("all_gather", "ring"), ("scan", "ordered")]
)
def test_a_deadline_is_for_the_whole_operation_not_for_each_step(verb: str, algorithm: str) -> None:
    """F4, N24: a timeout per step, or per received byte, may never end. Here a step takes a second."""
    slow = simulation.Network(latency_s=1.0)

    def program(comm: uni.Communicator, timeout: float | None) -> Any:
        word = "done"
        try:
            getattr(comm, verb)(np.arange(64.0), timeout=timeout, algorithm=algorithm)
        except uni.DeadlineExceeded:
            word = "late"
        return word, comm.backend.runtime.now()

    # A chain of eight ranks needs at least seven steps, each far shorter than the timeout.
    unlimited = uni.simulate(program, 8, None, network=slow)
    assert max(time_s for _, time_s in unlimited.results) >= 7
    limited = uni.simulate(program, 8, 2.5, network=slow)
    late = [time_s for word, time_s in limited.results if word == "late"]
    assert late
    # A receive that has matched ends once the bytes that are already sent to it have arrived.
    assert max(late) <= 2.5 + 1.1


def test_a_call_of_nothing_made_late_is_still_compared() -> None:
    """F19: an early return for an empty array is a local decision. Here the others called and queried."""

    def program(comm: uni.Communicator) -> None:
        if comm.rank == 2:
            sleep(comm, 1.0)
        comm.all_reduce(np.ones(0 if comm.rank == 2 else 5))
        comm.barrier()

    ended = uni.simulate(program, 3)
    assert [type(error) for error in ended.results] == [uni.CollectiveMismatch] * 3
    assert ended.time_s < 1.1, "at once, once the rank has called"


def test_a_rank_that_came_late_is_not_blamed_for_one_that_never_came() -> None:
    """Rank 1 makes its call after the others have queried it; rank 3 never makes it."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 3:
            sleep(comm, 10.0)
            return None
        if comm.rank == 1:
            sleep(comm, 1.0)
        with pytest.raises(uni.DeadlineExceeded) as caught:
            comm.reduce_scatter(np.ones((4, 3)), timeout=3.0, algorithm="ring")
        return caught.value.waiting_on

    assert uni.simulate(program, 4).results == [(3,), (3,), (3,), None]


@pytest.mark.parametrize("verb", ["all_reduce", "barrier", "broadcast", "all_to_all_v"])
def test_the_death_of_any_rank_at_any_step_ends_every_survivor(verb: str) -> None:
    """F14, F15, N24: when one rank failed, the others waited a whole minute, or for ever."""
    calls = {
        "all_reduce": lambda comm: comm.all_reduce(np.ones(100)),
        "barrier": lambda comm: comm.barrier(),
        "broadcast": lambda comm: comm.broadcast(np.ones(100), 1),
        "all_to_all_v": lambda comm: comm.all_to_all_v([np.ones(k + 1) for k in range(4)]),
    }

    def program(comm: uni.Communicator) -> int:
        for _ in range(20):
            calls[verb](comm)
            sleep(comm, 0.001)
        return comm.rank

    for victim in range(4):
        at_s = 0.0005 + 0.0031 * victim
        ended = uni.simulate(program, 4, faults=[simulation.Kill(victim, at_s)], config=SHORT)
        assert ended.time_s < 1.0
        for rank, error in enumerate(ended.results):
            if rank != victim:
                assert isinstance(error, uni.PeerLost), f"rank {rank} of victim {victim}: {error!r}"
                assert error.ranks == (victim,)


# -- empty arrays -----------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_empty_arrays_go_through_every_verb(size: int) -> None:
    """F22: a receive of zero elements waited for one."""

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me = comm.rank
        for shape in ((0,), (0, 3), (3, 0)):
            x = np.zeros(shape, np.float32)
            rows = np.zeros((size, *shape), np.float32)
            expectations: list[tuple[str, Any, Any]] = [
                ("all_reduce", comm.all_reduce(x), x),
                ("reduce", comm.reduce(x, size - 1), x if me == size - 1 else None),
                ("broadcast", comm.broadcast(x, size - 1), x),
                ("all_gather", comm.all_gather(x), rows),
                ("gather", comm.gather(x), rows if me == 0 else None),
                ("scatter", comm.scatter(rows if me == 0 else None), x),
                ("reduce_scatter", comm.reduce_scatter(rows), x),
                ("all_to_all", comm.all_to_all(rows), rows),
                ("scan", comm.scan(x), x),
                ("exscan", comm.exscan(x), x),
                ("all_gather_v", comm.all_gather_v(x), [x] * size),
                ("scatter_v", comm.scatter_v([x] * size if me == 0 else None), x),
                ("all_to_all_v", comm.all_to_all_v([x] * size), [x] * size),
                ("all_reduce_many", comm.all_reduce_many([x, x]), [x, x]),
            ]
            for verb, got, want in expectations:
                notes.expect(got, want, verb, shape)
            status = comm.sendrecv(x, (me + 1) % size, np.zeros(shape, np.float32), (me - 1) % size, 3)
            notes.check(status == ((me - 1) % size, 3, 0), "sendrecv", status)
        notes.expect(comm.all_reduce(np.array([me])), np.array([size * (size - 1) // 2]), "still in step")
        return notes

    assert run_ranks(program, size).values() == [[]] * size


# -- no detour through rank 0 -----------------------------------------------------------------------------


def test_ranks_that_never_meet_rank_0_need_nothing_of_it() -> None:
    """F7: in a star topology every message that did not go through rank 0 failed. Here rank 0 is dead."""
    world = reference_local(4)
    backend: Any = world[0].backend
    groups = run_each(lambda comm: comm.sub([1, 2, 3]), world[1:]).values()
    backend.kill()

    def program(comm: uni.Communicator) -> Any:
        size, me = comm.size, comm.rank
        buf = np.zeros(2)
        comm.sendrecv(np.array([me, 0.5]), (me + 1) % size, buf, (me - 1) % size)
        xs = operands("int32", "sum", 50, 3)
        return (
            buf.tolist(),
            np.array_equal(comm.all_reduce(xs[me].copy()), reduced("sum", xs)),
            comm.split(0).size,
        )

    want = [([(r - 1) % 3, 0.5], True, 3) for r in range(3)]
    assert run_each(program, groups).values() == want
    for comm in world:
        comm.close()


# -- typed errors -----------------------------------------------------------------------------------------


def test_errors_differ_by_their_type() -> None:
    """F12: all errors had one type, and a timeout was recognised by its text."""
    assert issubclass(uni.UsageError, ValueError)
    assert issubclass(uni.DeadlineExceeded, TimeoutError)
    kinds = [
        uni.UsageError, uni.BackendUnavailable, uni.RendezvousError, uni.DeadlineExceeded, uni.PeerLost,
        uni.PeerAborted, uni.CollectiveMismatch, uni.Deadlock, uni.ProtocolError, uni.ClosedError,
        uni.RemoteError,
    ]  # fmt: skip
    for kind in kinds:
        assert issubclass(kind, uni.UnisonoError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)


def test_a_world_of_no_rank_is_refused() -> None:
    """Ferrotorch BK04, CF09."""
    for n in (0, -1, 1.5, True, None):
        with pytest.raises(uni.UsageError, match=">= 1"):
            uni.local(n)  # type: ignore[arg-type]


def test_ranks_and_size_are_reported() -> None:
    """Ferrotorch BK03, CF07, CF08."""
    for n in (1, 2, 3):
        world = uni.local(n)
        assert [(comm.rank, comm.size, comm.name, comm.epoch) for comm in world] == [
            (rank, n, "world", 0) for rank in range(n)
        ]
        for comm in world:
            comm.close()
