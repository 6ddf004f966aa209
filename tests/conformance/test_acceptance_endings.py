"""A peer dies, leaves, aborts, stays away or makes a different call: every rank gets the error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_acceptance_started import cases
from tests.support.mismatches import reported_in_time
from tests.support.ranks import reference_local, run_each, run_ranks

import unisono as uni

QUICK = uni.Config(stall_query_s=0.02, segment_bytes=64)
COLLECTIVES = [verb for verb, _, _ in cases(0, 1)]
every_collective = pytest.mark.parametrize("verb", COLLECTIVES)


def call(comm: uni.Communicator, verb: str) -> Any:
    args = next(args for name, args, _ in cases(comm.rank, comm.size) if name == verb)
    return getattr(comm, verb)(*args)


def ended_by(fn: Callable[[], Any]) -> uni.UnisonoError:
    with pytest.raises(uni.UnisonoError) as caught:
        fn()
    return caught.value


def kill(comm: uni.Communicator, cause: str = "killed") -> None:
    backend: Any = comm.backend
    backend.kill(cause)


def close_all(world: list[uni.Communicator]) -> None:
    for comm in world:
        comm.close()


# -- a peer dies: nexar fault_injection -------------------------------------------------------------------


@every_collective
def test_a_peer_that_died_before_a_collective_is_named_to_everyone(verb: str) -> None:
    world = reference_local(4)
    kill(world[2], "killed by signal 9")
    errors = run_each(lambda comm: ended_by(lambda: call(comm, verb)), [world[0], world[1], world[3]])
    for error in errors:
        assert isinstance(error, uni.PeerLost)
        assert error.ranks == (2,)
        assert "killed by signal 9" in str(error)
    close_all(world)


@every_collective
def test_a_peer_that_dies_while_the_others_wait_for_it_is_named_to_everyone(verb: str) -> None:
    world = reference_local(4, QUICK)
    works = []
    for comm in world[:3]:
        args = next(args for name, args, _ in cases(comm.rank, 4) if name == verb)
        works.append(getattr(comm.start, verb)(*args))
    waiting = [work for work in works if not work.done()]
    # A root that only receives or only sends may be done already; a rank that needs rank 3 cannot be.
    assert waiting
    kill(world[3])
    for work in waiting:
        error = ended_by(lambda work=work: work.wait(timeout=30))
        assert isinstance(error, uni.PeerLost)
        assert error.ranks == (3,)
        assert error.operation == verb
    for comm in world[:3]:  # and no rank begins a new operation with the dead rank
        assert isinstance(ended_by(lambda comm=comm: comm.barrier()), uni.PeerLost)
    close_all(world)


def test_all_dead_ranks_are_named_and_the_living_may_still_talk() -> None:
    world = reference_local(4)
    work = world[0].start.barrier()
    kill(world[3])
    assert ended_by(lambda: work.wait(timeout=30)).ranks == (3,)  # type: ignore[attr-defined]
    kill(world[1])
    error = ended_by(lambda: world[2].barrier())
    assert isinstance(error, uni.PeerLost)
    assert error.ranks == (1, 3)
    # The error names the call even if the death was known before.
    assert (error.operation, error.communicator, error.epoch) == ("barrier", "world", 0)
    world[0].send(np.array([4.5]), 2)
    buf = np.zeros(1)
    world[2].recv(buf)
    assert buf[0] == 4.5
    close_all(world)


@pytest.mark.parametrize("how", ["recv", "recv_bytes", "probe", "send", "sendrecv"])
def test_a_message_to_or_from_a_dead_peer_ends_at_once(how: str) -> None:
    calls: dict[str, Callable[[uni.Communicator], uni.Work[Any]]] = {
        "recv": lambda comm: comm.start.recv(np.zeros(3), 1),
        "recv_bytes": lambda comm: comm.start.recv_bytes(1),
        "probe": lambda comm: comm.start.probe(1),
        "send": lambda comm: comm.start.send(np.zeros(100_000), 1),
        "sendrecv": lambda comm: comm.start.sendrecv(np.zeros(2), 1, np.zeros(2), 1),
    }
    world = reference_local(3)
    before = calls[how](world[0])
    assert not before.done()
    kill(world[1])
    for work in (lambda: before.wait(timeout=30), lambda: calls[how](world[0]).wait(timeout=30)):
        error = ended_by(work)
        assert isinstance(error, uni.PeerLost)
        assert (error.ranks, error.operation) == ((1,), how)
    close_all(world)


def test_what_a_peer_sent_before_its_death_can_still_be_received() -> None:
    world = reference_local(2)
    world[1].send(np.array([1, 2, 3]), 0, 4)
    kill(world[1])
    buf = np.zeros(3, np.int64)
    assert world[0].recv(buf, 1).tag == 4
    assert buf.tolist() == [1, 2, 3]
    assert isinstance(ended_by(lambda: world[0].recv(buf, 1)), uni.PeerLost)
    close_all(world)


def test_a_wildcard_receive_ends_when_no_rank_is_left_that_could_serve_it() -> None:
    world = uni.local(3)
    work = world[0].start.recv(np.zeros(1))
    world[1].close()
    assert not work.done()  # rank 2 may still send
    world[2].close()
    error = ended_by(lambda: work.wait(timeout=30))
    assert isinstance(error, uni.PeerLost)
    assert error.ranks == (1, 2)
    world[0].close()


# -- a peer leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["all_reduce", "barrier", "all_to_all_v", "gather"])
def test_a_rank_that_waits_for_a_closed_rank_learns_that_it_left(verb: str) -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            return comm.close()
        return ended_by(lambda: call(comm, verb)) if verb != "gather" or comm.rank else None

    world = uni.local(3)
    ended = run_each(program, world)
    for error in ended[1:]:
        assert isinstance(error, uni.PeerLost)
        assert 0 in error.ranks
        assert "left" in str(error.cause)
    close_all(world)


def test_close_flushes_what_was_started_and_leaves_it_receivable() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            works = [comm.start.send(np.full(50_000, float(k)), 1, k) for k in range(3)]
            comm.close()
            return uni.wait_all(works)
        got = []
        for tag in (2, 0, 1):
            buf = np.zeros(50_000)
            comm.recv(buf, 0, tag)
            got.append(set(buf.tolist()))
        error = ended_by(lambda: comm.recv(np.zeros(1), 0))
        return got, type(error), "left" in str(error)

    world = uni.local(2)
    ended = run_each(program, world).values()
    assert ended == [[None] * 3, ([{2.0}, {0.0}, {1.0}], uni.PeerLost, True)]
    close_all(world)


def test_a_closed_communicator_refuses_everything_and_may_be_closed_again() -> None:
    (comm,) = uni.local(1)
    pending = comm.start.recv(np.zeros(1), 0)
    comm.close()
    assert isinstance(ended_by(lambda: pending.wait(timeout=30)), uni.ClosedError)
    calls: list[Callable[[], Any]] = [lambda verb=verb: call(comm, verb) for verb in COLLECTIVES]
    calls += [
        lambda: comm.send(np.ones(1), 0),
        lambda: comm.recv(np.ones(1), 0),
        lambda: comm.recv_bytes(0),
        lambda: comm.probe(timeout=0),
        lambda: comm.split(0),
        lambda: comm.sub([0]),
        lambda: comm.mesh((1,)),
        lambda: comm.broadcast_object(1),
        lambda: comm.__enter__(),
    ]
    for refused in calls:
        error = ended_by(refused)
        assert isinstance(error, uni.ClosedError)
        assert "world" in str(error)
    comm.close()
    assert "closed" in repr(comm)


def test_a_rank_that_is_dropped_is_lost_to_the_others() -> None:
    world = uni.local(2)
    work = world[0].start.recv(np.zeros(1), 1)
    del world[1:]
    import gc

    gc.collect()
    error = ended_by(lambda: work.wait(timeout=30))
    assert isinstance(error, uni.PeerLost)
    assert "left" in str(error)
    world[0].close()


# -- a peer gives up --------------------------------------------------------------------------------------


def test_an_abort_ends_everything_everywhere_and_carries_the_reason() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            for _ in range(3):
                comm.recv(np.zeros(0), tag=1)
            comm.abort("loss is NaN at step 7")
            return [ended_by(lambda: comm.barrier()), ended_by(lambda: comm.send(np.ones(1), 0))]
        pending = {
            0: lambda: comm.start.all_reduce(np.ones(3)),
            1: lambda: comm.start.recv(np.zeros(1), 0),
            3: lambda: comm.start.probe(1, 77),
        }[comm.rank]()
        comm.send(np.zeros(0), 2, 1)
        first = ended_by(lambda: pending.wait(timeout=30))
        return [first, ended_by(lambda: comm.barrier()), ended_by(lambda: comm.send(np.ones(1), 0))]

    world = uni.local(4)
    for errors in run_each(program, world).values():
        for error in errors:
            assert isinstance(error, uni.PeerAborted)
            assert error.rank == 2
            assert "loss is NaN at step 7" in str(error)
    close_all(world)


@pytest.mark.on_every_link
def test_a_rank_that_fails_before_it_made_a_group_ends_the_ranks_that_wait_for_it_there() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            raise RuntimeError("no group for me")
        return comm.sub([0, 1, 2]).barrier()

    for error in run_ranks(program, 3)[:2]:
        assert isinstance(error, uni.PeerAborted | uni.PeerLost)
        assert "rank 2" in str(error)


@pytest.mark.on_every_link
def test_an_abort_of_a_group_leaves_the_world_alone() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0 if comm.rank < 2 else 1)
        assert group is not None
        error = None
        if comm.rank == 0:
            group.abort("enough")
        elif comm.rank == 1:
            error = ended_by(lambda: group.barrier())
        else:
            assert group.all_reduce(comm.rank) == 5
        return (None if error is None else (type(error), "enough" in str(error))), comm.all_reduce(comm.rank)

    assert run_ranks(program, 4).values() == [(None, 6), ((uni.PeerAborted, True), 6), (None, 6), (None, 6)]


@pytest.mark.on_every_link
def test_an_exception_that_leaves_the_block_ends_the_others_operations() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            raise ZeroDivisionError("the learning rate\nis zero")
        return comm.all_reduce(np.ones(5))

    ended = run_ranks(program, 3)
    assert isinstance(ended[1], ZeroDivisionError)
    for error in (ended[0], ended[2]):
        assert isinstance(error, uni.PeerAborted)
        assert error.rank == 1
        assert "ZeroDivisionError: the learning rate" in str(error)


@pytest.mark.on_every_link
def test_the_root_cause_is_passed_on_as_itself() -> None:
    """Rank 0 fails, and rank 1 as a consequence; rank 2 waits for rank 1, but its error names rank 0."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            raise RuntimeError("root cause")
        if comm.rank == 1:
            return comm.recv(np.zeros(1), 0)
        return comm.recv(np.zeros(1), 1)

    ended = run_ranks(program, 3)
    for error in ended[1:]:
        assert isinstance(error, uni.PeerAborted)
        assert error.rank == 0
        assert "root cause" in str(error)


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.on_every_link
def test_the_root_cause_of_an_exception_group_is_passed_on(has_own: bool) -> None:
    """As a TaskGroup raises it: the error of another rank is passed on, an own one is the reason."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            lost = uni.PeerLost("rank 7 is gone", ranks=(7,))
            own = [ValueError("my own")] if has_own else []
            raise ExceptionGroup("tasks", [ExceptionGroup("more", [lost]), *own])
        return comm.recv(np.zeros(1), 0)

    error = run_ranks(program, 2)[1]
    if has_own:
        assert isinstance(error, uni.PeerAborted)
        assert error.rank == 0
        assert "ValueError: my own" in str(error)
    else:
        assert isinstance(error, uni.PeerLost)
        assert error.ranks == (7,)


@pytest.mark.on_every_link
def test_leaving_the_block_by_a_quiet_exit_is_no_abort() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.send(np.array([3]), 1)
            raise SystemExit(0)
        buf = np.zeros(1, np.int64)
        comm.recv(buf, 0)
        return int(buf[0]), ended_by(lambda: comm.recv(buf, 0))

    ended = run_ranks(program, 2)
    assert isinstance(ended[0], SystemExit)
    value, error = ended[1]
    assert value == 3
    assert isinstance(error, uni.PeerLost)


@pytest.mark.on_every_link
def test_an_own_op_that_raises_ends_the_collective_everywhere_with_its_reason() -> None:
    def picky(left: Any, right: Any) -> Any:
        raise ArithmeticError("cannot combine these")

    def program(comm: uni.Communicator) -> Any:
        return comm.all_reduce(np.ones(3), uni.op(picky, name="picky"), algorithm="flat")

    ended = run_ranks(program, 3)
    assert any(isinstance(error, ArithmeticError) for error in ended)
    for error in ended:
        assert isinstance(error, ArithmeticError | uni.PeerAborted)
        assert "cannot combine these" in str(error)


# -- a peer stays away ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", [verb for verb in COLLECTIVES if verb not in ("scan", "exscan", "scatter_v")]
)
def test_a_collective_that_times_out_names_the_missing_ranks(verb: str) -> None:
    """scan, exscan and scatter_v need nothing from the last rank, so they may end without it.

    On a busy machine another rank may be late, too, and is correctly named; then repeat with a longer
    timeout.
    """
    for timeout in (0.6, 5.0):
        late = ended_late(verb, timeout)
        if all(error.waiting_on == (3,) for error in late):
            break
    assert late, f"{verb} ended without rank 3"
    for error in late:
        assert error.waiting_on == (3,)
        assert isinstance(error, TimeoutError)
        assert verb in str(error)


def ended_late(verb: str, timeout: float) -> list[uni.DeadlineExceeded]:
    """The errors of ranks 0 to 2, which make a call that rank 3 does not make."""
    gone = threading.Event()

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 3:
            gone.wait(60)
            return None
        comm.sub([0, 1, 2]).barrier()  # all threads have started
        args = next(args for name, args, _ in cases(comm.rank, 4) if name == verb)
        try:
            return getattr(comm, verb)(*args, timeout=timeout)
        except uni.DeadlineExceeded as error:
            return error

    world = uni.local(4, QUICK)
    absent = threading.Thread(target=program, args=(world[3],))
    absent.start()
    try:
        ended = run_each(program, world[:3])
    finally:
        gone.set()
        absent.join()
        close_all(world)
    return [error for error in ended if isinstance(error, uni.DeadlineExceeded)]


# Not on_every_link: only ranks of one process can all be observed.
def test_ranks_that_all_wait_for_each_other_get_a_deadlock_error() -> None:
    def program(comm: uni.Communicator) -> Any:
        comm.barrier()  # without it, a rank whose thread has not begun would not count as waiting
        return comm.recv(np.zeros(1), (comm.rank + 1) % comm.size)

    ended = run_ranks(program, 3, config=uni.Config(deadlock_after_s=0.5))
    for error in ended:
        assert isinstance(error, uni.Deadlock | uni.PeerAborted)
    deadlocks = [error for error in ended if isinstance(error, uni.Deadlock)]
    assert deadlocks
    assert "rank 0 waits for rank 1" in str(deadlocks[0])
    assert "rank 2 waits for rank 0" in str(deadlocks[0])


# -- ranks that call different things ---------------------------------------------------------------------

f32 = np.float32
MISMATCHES: dict[str, tuple[Callable[[uni.Communicator], Any], Callable[[uni.Communicator], Any]]] = {
    "collective": (lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_gather(np.ones(5))),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(np.ones(5))),
    "dtype": (lambda c: c.all_reduce(np.ones(4, f32)), lambda c: c.all_reduce(np.ones(4))),
    "same bytes": (lambda c: c.all_reduce(np.ones(4, f32)), lambda c: c.all_reduce(np.ones(2))),
    "signed": (lambda c: c.all_reduce(np.ones(4, np.int32)), lambda c: c.all_reduce(np.ones(4, np.uint32))),
    "count": (lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_reduce(np.ones(6))),
    "longer than a segment": (lambda c: c.all_reduce(np.ones(500)), lambda c: c.all_reduce(np.ones(7))),
    "empty here": (lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_reduce(np.ones(0))),
    "empty elsewhere": (lambda c: c.broadcast(np.ones(0)), lambda c: c.broadcast(np.ones(3))),
    "op": (lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_reduce(np.ones(5), "max")),
    "mean of halves": (
        lambda c: c.all_reduce(np.ones(5, np.float16), "mean"),
        lambda c: c.all_reduce(np.ones(5, f32), "mean"),
    ),
    "own op": (
        lambda c: c.all_reduce(np.ones(5), uni.op(np.add, name="mine")),
        lambda c: c.all_reduce(np.ones(5), uni.op(np.add, name="yours")),
    ),
    "root": (lambda c: c.broadcast(np.ones(5), 0), lambda c: c.broadcast(np.ones(5), 1)),
    "root of reduce": (lambda c: c.reduce(np.ones(5), 0), lambda c: c.reduce(np.ones(5), 2)),
    "root of gather_v": (lambda c: c.gather_v(np.ones(5), 0), lambda c: c.gather_v(np.ones(5), 1)),
    "root of an object": (lambda c: c.broadcast_object(1, 0), lambda c: c.broadcast_object(1, 1)),
    "algorithm": (
        lambda c: c.all_reduce(np.ones(5), algorithm="ring"),
        lambda c: c.all_reduce(np.ones(5), algorithm="tree"),
    ),
    "shape": (lambda c: c.all_gather(np.ones((2, 3))), lambda c: c.all_gather(np.ones((3, 2)))),
    "shape of all_to_all": (
        lambda c: c.all_to_all(np.ones((3, 2, 3))),
        lambda c: c.all_to_all(np.ones((3, 3, 2))),
    ),
    "counts": (
        lambda c: c.reduce_scatter_v(np.ones(6), [1, 2, 3]),
        lambda c: c.reduce_scatter_v(np.ones(6), [3, 2, 1]),
    ),
    "uneven": (lambda c: c.all_gather_v(np.ones(3)), lambda c: c.gather_v(np.ones(3))),
    "many or one": (lambda c: c.all_reduce_many([np.ones(3)]), lambda c: c.all_reduce(np.ones(3))),
    "many: none": (lambda c: c.all_reduce_many([np.ones(3)]), lambda c: c.all_reduce_many([])),
    "many: one more": (
        lambda c: c.all_reduce_many([np.ones(3, f32)]),
        lambda c: c.all_reduce_many([np.ones(3, f32), np.ones(3)]),
    ),
    "many: cut otherwise": (
        lambda c: c.all_reduce_many([np.ones(3), np.ones(4)]),
        lambda c: c.all_reduce_many([np.ones(4), np.ones(3)]),
    ),
    "many: other order of types": (
        lambda c: c.all_reduce_many([np.ones(3, f32), np.ones(2)]),
        lambda c: c.all_reduce_many([np.ones(2), np.ones(3, f32)]),
    ),
    "many: op of very many": (
        lambda c: c.all_reduce_many([np.ones(3)] * 300),
        lambda c: c.all_reduce_many([np.ones(3)] * 300, "max"),
    ),
    "object": (lambda c: c.all_gather_object(1), lambda c: c.broadcast_object(1)),
    "split": (lambda c: c.split(0), lambda c: c.barrier()),
    "scan": (lambda c: c.scan(np.ones(5)), lambda c: c.exscan(np.ones(5))),
}


@pytest.mark.on_every_link
@pytest.mark.parametrize("odd", [pytest.param(0, marks=pytest.mark.more), 2])
@pytest.mark.parametrize("what", MISMATCHES)
def test_all_ranks_are_shown_both_calls_of_a_mismatch(what: str, odd: int) -> None:
    usual, other = MISMATCHES[what]

    def program(comm: uni.Communicator) -> None:
        (other if comm.rank == odd else usual)(comm)
        comm.barrier()  # an empty call needs no other rank and ends; the next one must not

    def outcomes() -> list[Any]:
        ended = run_ranks(program, 3, config=QUICK)
        assert [type(error) for error in ended] == [uni.CollectiveMismatch] * 3, list(ended)
        return ended

    def check(error: uni.CollectiveMismatch) -> None:
        assert "called different things" in str(error)
        assert f"rank {odd}: " in error.report
        assert error.culprits == (odd,)
        assert len(error.report.splitlines()) == 2
        assert "test_acceptance_endings.py:" in error.report, "the report has the line"

    reported_in_time(outcomes, check)


@pytest.mark.on_every_link
def test_calls_in_another_order_are_a_mismatch_too() -> None:
    def program(comm: uni.Communicator) -> Any:
        comm.barrier()
        first, second = np.ones(5), np.ones(5, f32)
        for x in (second, first) if comm.rank == 1 else (first, second):
            comm.all_reduce(x)

    ended = run_ranks(program, 4, config=QUICK)
    assert [type(error) for error in ended] == [uni.CollectiveMismatch] * 4
    assert {error.sequence for error in ended} == {1}


@pytest.mark.on_every_link
def test_started_calls_in_another_order_are_a_mismatch_too() -> None:
    def program(comm: uni.Communicator) -> Any:
        xs = [np.ones(5), np.ones(7)]
        works = []
        # The second start may raise the mismatch of the first work, so the first work is kept until it ends.
        for x in reversed(xs) if comm.rank == 1 else xs:
            works.append(comm.start.all_reduce(x))  # noqa: PERF401
        return uni.wait_all(works)

    ended = run_ranks(program, 3, config=QUICK)
    assert [type(error) for error in ended] == [uni.CollectiveMismatch] * 3


@pytest.mark.on_every_link
def test_a_mismatch_on_a_group_leaves_the_world_usable() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        error = ended_by(lambda: group.all_reduce(np.ones(3 + comm.rank)))
        return type(error), comm.all_reduce(comm.rank)

    assert run_ranks(program, 3, config=QUICK).values() == [(uni.CollectiveMismatch, 3)] * 3
