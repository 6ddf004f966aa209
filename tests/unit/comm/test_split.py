"""Splits: their memory, how their groups end, and that messages of different groups never match."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from tests.support.processes import forked, run_processes
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.comm import splitter as splitter_module
from unisono.comm.split import ROW_BYTES, Row, identity_of, members_of
from unisono.core import clock

NATIVE = pytest.mark.on_every_link

# -- rows -------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_packed() -> None:
    rows = [Row(1, -(2**63), 2**63 - 1, True), Row(0, 0, -1, False), Row(1, 7, 0, False)]
    assert [Row.unpack(row.pack()) for row in rows] == rows
    assert len(rows[0].pack()) == ROW_BYTES


def test_members_are_ordered_by_key_then_rank_and_none_is_no_color() -> None:
    rows = [Row(1, 0, 5, False), Row(0, 0, 0, False), Row(1, 0, -5, False), Row(1, 3, 0, False)]
    rows.append(Row(1, 0, 5, False))
    packed = b"".join(row.pack() for row in rows)
    assert members_of(packed, 0) == (2, 0, 4)
    assert members_of(packed, 3) == (3,)
    assert members_of(packed, None) == (), "the ranks without a color"
    assert members_of(packed + Row(1, 7, 0, True).pack(), 0) is None, "an id that is in use anywhere"


def test_every_call_color_attempt_and_parent_gives_another_identity() -> None:
    parents = (bytes(16), bytes(15) + b"\1")
    made = [
        identity_of(parent, epoch, sequence, attempt, color)
        for parent in parents
        for epoch in range(2)
        for sequence in range(12)
        for attempt in range(4)
        for color in (-1, 0, 1, 11)
    ]
    assert len({context for context, _ in made}) == len({descriptor for _, descriptor in made}) == len(made)
    assert all(context & 2 for context, _ in made), "neither control nor the world"


# -- goodbyes ---------------------------------------------------------------------------------------------


# -- many splits ------------------------------------------------------------------------------------------


def test_many_splits_in_a_row_leave_nothing_behind() -> None:
    def program(comm: uni.Communicator) -> Any:
        def churn(times: int) -> None:
            for turn in range(times):
                group = comm.split(comm.rank % 2 if turn % 3 else 0, -comm.rank)
                assert group is not None
                if turn % 5 == 0:
                    assert group.all_reduce(1) == group.size
                group.close()

        churn(60)
        comm.barrier()
        gc.collect()
        objects, before_kib = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        control = comm._group.control
        groups = len(control.groups())
        churn(300)
        comm.barrier()
        gc.collect()
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        assert len(control.groups()) == groups
        assert not comm._children
        return len(gc.get_objects()) - objects, grown_kib

    for objects, grown_kib in run_processes(program, 3):
        assert objects < 150, "less than one object for two groups"
        assert grown_kib < 16 * 1024


def test_a_closed_group_is_freed_without_the_garbage_collector() -> None:
    def program(comm: uni.Communicator) -> bool:
        gc.disable()
        try:
            group = comm.split(0)
            assert group is not None
            group.all_reduce(np.arange(3.0))
            group.close()
            known = weakref.ref(group)
            del group
            return known() is None
        finally:
            gc.enable()

    assert run_processes(program, 2) == [True, True]


# -- how groups end ---------------------------------------------------------------------------------------


@NATIVE
def test_groups_may_be_closed_in_another_order_on_every_rank() -> None:
    def program(comm: uni.Communicator) -> Any:
        groups = [comm.split(0, key) for key in (0, -comm.rank, comm.rank)]
        sums = [g.all_reduce((comm.rank + 1) * 10**i) for i, g in enumerate(groups) if g]
        turned = groups[comm.rank % 3 :] + groups[: comm.rank % 3]
        for group in turned:
            assert group is not None
            group.close()
        return sums, comm.all_reduce(comm.rank)

    assert run_ranks(program, 4).values() == [([10, 100, 1000], 6)] * 4


@NATIVE
def test_waiting_for_a_rank_that_closed_the_group_fails_because_it_left() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 0:
            group.close()
            got = None
        else:
            with pytest.raises(uni.PeerLost, match="left") as caught:
                group.recv(np.zeros(1), 0, timeout=30)
            got = caught.value.ranks
        comm.barrier()
        return got

    assert run_ranks(program, 2).values() == [None, (0,)]


@NATIVE
def test_messages_in_flight_arrive_although_their_sender_has_closed_the_group() -> None:
    sizes = (1, 1021, 300_007)

    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 0:
            works = [group.start.send(np.arange(n) * 3, 1, tag) for tag, n in enumerate(sizes)]
            group.close()
            uni.wait_all(works)
            comm.barrier()
            return True
        got = []
        for tag, n in reversed(list(enumerate(sizes))):
            buf = np.zeros(n, np.int64)
            group.recv(buf, 0, tag)
            got.append(bool((buf == np.arange(n) * 3).all()))
        comm.barrier()
        return all(got)

    assert run_ranks(program, 2).values() == [True, True]


@NATIVE
def test_a_rank_that_gives_up_during_a_split_ends_it_everywhere() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            for other in range(2):  # the others are inside `with comm`, which refuses an aborted one
                comm.recv_object(other)
            comm.abort("no more")
            return "gave up"
        comm.send_object("ready", 2)
        with pytest.raises(uni.PeerAborted, match="no more"):
            comm.split(comm.rank % 2, timeout=30)
        return "told"

    assert run_ranks(program, 3).values() == ["told", "told", "gave up"]


def test_a_rank_that_dies_during_a_split_is_named_everywhere() -> None:
    def live(backend: Any, pipe: Any) -> Any:
        comm = uni.Communicator.world(backend)
        group = comm.split(0, -comm.rank)
        assert group is not None
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(uni.PeerLost) as caught:
            group.split(comm.rank % 2, timeout=30)
        return caught.value.ranks

    with forked(live, 3) as ranks:
        assert [ranks.result(rank) for rank in (0, 2)] == [(1,), (1,)]
        assert ranks.code(1) == -signal.SIGKILL


@NATIVE
def test_a_rank_that_leaves_before_a_split_is_named() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 1:
            group.close()
            got = None
        else:
            with pytest.raises(uni.PeerLost) as caught:
                group.split(0, timeout=30)
            got = caught.value.ranks
        comm.barrier()
        return got

    assert run_ranks(program, 3).values() == [(1,), None, (1,)]


# -- groups are apart -------------------------------------------------------------------------------------


@NATIVE
def test_a_collective_of_one_group_never_matches_that_of_another() -> None:
    def program(comm: uni.Communicator) -> Any:
        left, right = comm.split(0), comm.split(0)
        assert left is not None
        assert right is not None
        mine, other = (left, right) if comm.rank == 0 else (right, left)
        x, y = np.full(5, 1.0 + comm.rank), np.full(5, 10.0 + 20 * comm.rank)
        first, second = mine.start.all_reduce(x), other.start.all_reduce(y)
        uni.wait_all([first, second])
        return x.tolist(), y.tolist()

    # In `left` meet x of rank 0 and y of rank 1; in `right` the other two calls.
    left, right = [31.0] * 5, [12.0] * 5
    assert run_ranks(program, 2).values() == [(left, right), (right, left)]


@NATIVE
def test_started_and_blocking_splits_of_one_call_meet() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0, -comm.rank) if comm.rank else comm.start.split(0, 0).wait(timeout=60)
        assert group is not None
        return group.name, group.all_gather(comm.rank).tolist()

    assert run_ranks(program, 3).values() == [("world.split#0(0)", [2, 1, 0])] * 3


@NATIVE
@pytest.mark.parametrize("is_started", [False, True])
def test_ranks_try_the_next_context_together_if_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    real = splitter_module.identity_of

    def colliding(parent: bytes, epoch: int, sequence: int, attempt: int, color: int) -> tuple[int, bytes]:
        context, descriptor = real(parent, epoch, sequence, attempt, color)
        return (2 if attempt < 2 and sequence else context), descriptor

    def program(comm: uni.Communicator) -> Any:
        splitter_module.identity_of = colliding  # also for ranks in processes
        first = comm.split(0)
        assert first is not None
        control = comm._group.control
        if comm.rank == 1:  # the id is in use on one rank only
            control.reserve(2)
        if is_started:
            work = comm.start.split(comm.rank % 2, timeout=60)
            is_called = threading.Event()
            work.add_done_callback(lambda work: is_called.set())
            second = work.wait()
            assert work.wait() is second
            assert is_called.wait(60)
        else:
            second = comm.split(comm.rank % 2, timeout=60)
        control._reserved.discard(2)
        assert second is not None
        return second.all_gather(comm.rank).tolist(), comm.all_reduce(1)

    monkeypatch.setattr(splitter_module, "identity_of", real)
    assert run_ranks(program, 3).values() == [([0, 2], 3), ([1], 3), ([0, 2], 3)]


# -- started splits ---------------------------------------------------------------------------------------


@NATIVE
def test_started_splits_overlap_nest_and_leave_out_ranks_without_a_color() -> None:
    def program(comm: uni.Communicator) -> Any:
        works = [comm.start.split(comm.rank % 2 if k else None, -comm.rank) for k in range(6)]
        nothing, *groups = [work.wait(timeout=60) for work in reversed(works)][::-1]
        assert nothing is None
        assert all(group.name == f"world.split#{k}({comm.rank % 2})" for k, group in enumerate(groups, 1))
        inner = groups[2].start.split(0).wait()
        got = [group.all_gather(comm.rank).tolist() for group in (*groups, inner)]
        for group in groups:
            group.close()
        with pytest.raises(uni.ClosedError):
            inner.barrier()
        return got

    evens, odds = [[2, 0]] * 6, [[3, 1]] * 6
    assert run_ranks(program, 4).values() == [evens, odds, evens, odds]


def test_a_started_split_makes_its_group_when_it_ends_although_no_thread_waits() -> None:
    """Otherwise a member could wait for ever for a member that has closed the parent."""

    def program(comm: uni.Communicator) -> Any:
        parent = comm.split(0)
        assert parent is not None
        if comm.rank == 0:
            work = parent.start.split(0)
            comm.recv(np.empty(1), 1, timeout=60)
            while not parent._open_children():
                time.sleep(0.001)
            parent.close()
            comm.barrier()
            return work.wait().rank
        group = parent.split(0)
        assert group is not None
        comm.send(np.ones(1), 0)
        with pytest.raises(uni.PeerLost, match="left") as caught:
            group.barrier(timeout=60)
        comm.barrier()
        return caught.value.ranks

    assert run_processes(program, 2) == [0, (0,)]


def test_a_started_split_that_is_dropped_leaves_its_group() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.start.split(0)
            comm.barrier()
            return None
        group = comm.split(0)
        assert group is not None
        with pytest.raises(uni.PeerLost, match="left") as caught:
            group.barrier(timeout=60)
        comm.barrier()
        return caught.value.ranks

    assert run_processes(program, 2) == [None, (0,)]


def test_a_started_split_that_stalls_or_expires_is_pythons() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, timeout=60)  # until rank 0's wait has expired
        work = comm.start.split(0, -comm.rank)
        if comm.rank == 0:
            with pytest.raises(uni.DeadlineExceeded):
                work.wait(timeout=0.3)
            comm.send(np.ones(1), 1)
        group = work.wait(timeout=60)
        assert group is not None
        members = group.all_gather(comm.rank).tolist()
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(uni.DeadlineExceeded, match="split"):
                group.start.split(0, timeout=0.05).wait()
        comm.barrier()
        return members, comm._group.native.adopted > 0

    assert run_processes(program, 2, config=uni.Config(stall_query_s=0.05))[0] == ([1, 0], True)


# -- a world is closed before its dropped groups have left --------------------------------------------------


def test_a_world_says_the_goodbyes_of_its_dropped_groups_before_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others know by the goodbye of a group which calls its sender had made before it left."""
    world = uni.local(2)
    pairs = [comm.sub([0, 1]) for comm in world]
    state = pairs[1]._group.state
    works = [pair.start.all_reduce(np.arange(3) * (rank + 1)) for rank, pair in enumerate(pairs)]
    assert [list(work.wait()) for work in works] == [[0, 3, 6]] * 2
    # The thread for finalizers runs too late.
    monkeypatch.setattr(clock._Collected, "_call", lambda self, fn: None)
    del works
    pairs[0] = None  # type: ignore[call-overload]
    gc.collect()
    world[0].close()
    until = time.monotonic() + 60
    while not state.last_calls:  # the goodbye is sent
        assert time.monotonic() < until
        time.sleep(0.001)
    assert set(state.last_calls) == {0}
    assert set(state.last_calls[0]) == {0}
    monkeypatch.undo()
    pairs[1].close()
    world[1].close()
