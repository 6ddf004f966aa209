"""Unused communicators: their groups are made when needed, and their goodbyes travel together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.processes import forked, run_processes
from tests.support.ranks import run_ranks, wait_until
from tests.unit.comm.test_loose_ends import logs_of_closes

import unisono as uni
from unisono.comm.control_messages import (
    CALLED_MAX,
    CALLS_MAX,
    GOODBYES_MAX,
    CallReport,
    Goodbye,
    Goodbyes,
    decode,
    encode,
)
from unisono.comm.goodbyes import UnsentGoodbyes
from unisono.core.envelope import Lane
from unisono.messaging.credit import CONTROL_BYTES_MAX

NATIVE = pytest.mark.on_every_link


# -- which goodbyes are sent ------------------------------------------------------------------------------


def test_goodbyes_are_sorted_by_rank_and_taken_once() -> None:
    unsent: UnsentGoodbyes[int] = UnsentGoodbyes()
    unsent.add(10, (0, 1), None)
    unsent.add(11, (1, 2), None)
    unsent.add(12, (0, 2), lambda: 7)
    assert len(unsent) == 3
    by_rank, calls = unsent.take()
    assert by_rank == {0: [10, 12], 1: [10, 11], 2: [11, 12]}
    assert {context: make() for context, make in calls.items()} == {12: 7}
    assert unsent.take() == ({}, {})


def test_a_member_that_has_said_goodbye_is_sent_none() -> None:
    unsent: UnsentGoodbyes[int] = UnsentGoodbyes()
    unsent.add(10, (0, 1, 2), None)
    unsent.add(11, (0, 1), lambda: 3)
    unsent.remove(10, 1)
    unsent.remove(11, 0)
    unsent.remove(12, 0)  # closed long ago
    assert unsent.take()[0] == {0: [10], 2: [10], 1: [11]}


def test_the_longest_message_of_goodbyes_is_a_control_message() -> None:
    longest = CallReport.of(bytes(16), "w" * 4096, "l" * 4096)
    calls = {
        2**64 - 1 - n: dict.fromkeys(range(2**63, 2**63 + CALLS_MAX), longest) for n in range(CALLED_MAX)
    }
    message = Goodbyes(tuple(range(2**64 - GOODBYES_MAX, 2**64)), Lane.CONTROL, calls)
    assert len(encode(message)) <= CONTROL_BYTES_MAX
    assert decode(encode(message)) == message


def test_groups_closed_together_send_few_messages() -> None:
    def program(comm: uni.Communicator) -> int:
        control, sent = comm._group.control, []
        send = control.send

        def spy(ranks: Any, message: Any, lane: Lane = Lane.CONTROL) -> None:
            sent.append(message)
            send(ranks, message, lane)

        groups = [comm.split(0) for _ in range(40)]
        comm.barrier()
        control.send = spy  # type: ignore[method-assign]
        for group in groups:
            assert group is not None
            group.close()
        control.send_goodbyes()
        comm.barrier()
        assert sum(len(message.contexts) for message in sent if isinstance(message, Goodbyes)) <= 2 * 40
        return sum(isinstance(message, Goodbye | Goodbyes) for message in sent)

    assert all(messages < 40 for messages in run_processes(program, 2)), "a few batches in each of two lanes"


def goodbyes_of(comm: uni.Communicator, use: Callable[[uni.Communicator], Any], groups_made: int) -> Any:
    """The goodbyes that a rank sends for groups that all ranks make, use and close; none is sent early."""
    control, sent = comm._group.control, []
    send, send_goodbyes = control.send, control.send_goodbyes

    def spy(ranks: Any, message: Any, lane: Lane = Lane.CONTROL) -> None:
        sent.append(message)
        send(ranks, message, lane)

    control.send_goodbyes = lambda: None  # type: ignore[method-assign]
    for _ in range(groups_made):
        group = comm.split(0)
        assert group is not None
        use(group)
        group.close()
    control.send, control.send_goodbyes = spy, send_goodbyes  # type: ignore[method-assign]
    control.send_goodbyes()
    comm.barrier()
    return [message for message in sent if isinstance(message, Goodbye | Goodbyes)]


@pytest.mark.parametrize(
    "use",
    [
        lambda group: group.barrier(),
        lambda group: group.all_reduce(np.arange(3.0) * group.rank),
        lambda group: group.start.all_gather(np.arange(5) + group.rank).wait(),
        lambda group: [
            group.all_gather_object({"rank": group.rank}),
            group.all_to_all(np.ones((group.size, 2))),
        ],
    ],
)
def test_a_goodbye_has_no_calls_that_all_ranks_have_made(use: Callable[[Any], Any]) -> None:
    def program(comm: uni.Communicator) -> Any:
        use(comm)  # decided from now on
        sent = goodbyes_of(comm, use, 40)
        assert all(isinstance(message, Goodbyes) for message in sent)
        # On a busy machine a call may stall; Python then finishes it, and its goodbye carries the call.
        return sum(len(message.calls) for message in sent) < 40, len(sent) <= 2 * 2 * 2

    assert run_processes(program, 3) == [(True, True)] * 3


def test_goodbyes_with_calls_travel_together_too() -> None:
    def program(comm: uni.Communicator) -> Any:
        sent = goodbyes_of(comm, lambda group: group.all_reduce(np.ones(0)), 2 * CALLED_MAX + 3)
        assert all(isinstance(message, Goodbyes) for message in sent)
        assert all(set(message.calls) == set(message.contexts) for message in sent)
        assert all(set(calls) == {0} for message in sent for calls in message.calls.values())
        return len(sent) <= 2 * 3

    assert run_processes(program, 2) == [True, True]


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda group: group.all_reduce(np.ones(0)), {0}),  # this call ends without a message
        (lambda group: [group.barrier(), group.all_gather(np.ones(0)), group.barrier()], {0, 1, 2}),
        (lambda group: group.reduce_scatter_v(np.ones(2), [2, *[0] * (group.size - 1)]), {0}),
    ],
)
def test_a_goodbye_carries_calls_that_other_ranks_cannot_know(
    use: Callable[[Any], Any], told: set[int]
) -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        use(group)
        assert not group._group.call_log.is_agreed
        return set(group._group.state.last_calls_here())

    assert run_processes(program, 3) == [told] * 3


def test_a_call_that_differs_from_one_that_ended_without_a_message_is_a_mismatch() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        group.barrier()
        if comm.rank == 0:
            group.all_reduce(np.ones(0))
            group.close()
            return None
        with pytest.raises(uni.CollectiveMismatch, match=r"differ|disagree") as caught:
            group.barrier()
        return "all_reduce" in caught.value.report and "barrier" in caught.value.report

    assert run_processes(program, 2) == [None, True]


# -- groups that were not used ----------------------------------------------------------------------------


def test_a_group_is_made_when_it_is_used() -> None:
    def program(comm: uni.Communicator) -> Any:
        unused, used = comm.split(0, -comm.rank), comm.split(0, -comm.rank)
        assert unused is not None
        assert used is not None
        assert unused._made is used._made is None
        sums = used.all_gather(comm.rank * 3).tolist()
        assert used._made is not None
        unused.close()
        assert unused._made is None
        used.close()
        return sums

    assert run_processes(program, 3) == [[6, 3, 0]] * 3


@NATIVE
def test_a_communicator_that_was_closed_unused_refuses_every_call() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        group.close()
        group.close()
        for verb in (
            group.barrier,
            lambda: group.split(0),
            lambda: group.sub([0, 1]),
            lambda: group.mesh((2,)),
        ):
            with pytest.raises(uni.ClosedError, match=r"world\.split#0\(0\)"):
                verb()
        with pytest.raises(uni.ClosedError):
            group.start.all_reduce(np.ones(3))
        assert "closed" in repr(group)
        return group.rank, group.size, comm.all_reduce(1)

    assert run_ranks(program, 2).values() == [(0, 2, 2), (1, 2, 2)]


@NATIVE
def test_unreceived_messages_are_named_although_the_group_was_not_used() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 0:
            group.send(np.arange(5, dtype=np.uint8), 1, tag=3)
        comm.barrier()
        comm.sendrecv(np.ones(1), 1 - comm.rank, np.empty(1), 1 - comm.rank)  # sent after the message
        with logs_of_closes() as said:
            if comm.rank == 1:
                group.close()
        comm.barrier()
        return any("5 bytes from rank 0, tag 3" in line for line in said)

    assert run_ranks(program, 2).values() == [False, True]


@NATIVE
def test_an_abort_that_came_before_the_first_use_ends_the_first_use() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 1:
            group.abort("no more")
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(uni.PeerAborted, match="no more"):
                group.recv(np.empty(1), 1, timeout=30)
        comm.barrier()
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 2).values() == [1, 1]


def test_a_death_before_the_first_use_ends_the_first_use() -> None:
    def live(backend: Any, pipe: Any) -> Any:
        comm = uni.Communicator.world(backend)
        group = comm.split(0, -comm.rank)
        assert group is not None
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(uni.PeerLost):
            comm.recv(np.empty(1), 1, timeout=30)
        with pytest.raises(uni.PeerLost) as caught:
            group.all_reduce(1, timeout=30)
        return caught.value.ranks

    with forked(live, 3) as ranks:
        assert [ranks.result(rank) for rank in (0, 2)] == [(1,), (1,)]


def test_unused_groups_that_are_dropped_leave_nothing_behind() -> None:
    def program(comm: uni.Communicator) -> Any:
        control = comm._group.control
        for turn in range(600):
            group = comm.split(0) if turn % 2 else comm.sub(range(comm.size))
            assert group is not None
            del group
        comm.barrier()
        wait_until(lambda: not comm._children)
        control.send_goodbyes()
        return len(control._reserved), len(control._goodbyes), comm.all_reduce(1)

    assert run_processes(program, 2) == [(0, 0, 2)] * 2


# -- meshes -----------------------------------------------------------------------------------------------


@NATIVE
def test_a_mesh_is_one_exchange_whatever_its_axes() -> None:
    def program(comm: uni.Communicator) -> Any:
        before = comm._group.next_sequence
        mesh = comm.mesh((2, 1, 3), ("a", "b", "c"))
        calls = comm._group.next_sequence - before
        again = comm.mesh((2, 1, 3), ("a", "b", "c"))
        x = np.array([comm.rank, 10 * comm.rank])
        mine = [mesh[axis].all_gather(x)[:, 1].tolist() for axis in range(3)]
        crossed = [again[axis].all_reduce(1) for axis in range(3)]
        return calls, mine, crossed

    want = [
        (
            1,
            [[10 * (r % 3), 10 * (r % 3 + 3)], [10 * r], [10 * (r // 3 * 3 + i) for i in range(3)]],
            [2, 1, 3],
        )
        for r in range(6)
    ]
    assert run_ranks(program, 6).values() == want


@NATIVE
def test_different_shapes_of_a_mesh_are_a_mismatch() -> None:
    def program(comm: uni.Communicator) -> Any:
        with pytest.raises(uni.CollectiveMismatch, match="mesh with another shape") as caught:
            comm.mesh((2, 2) if comm.rank == 2 else (4, 1))
        return caught.value.culprits, comm.all_reduce(comm.rank)

    alike, other = ((2,), 6), ((), 6)
    assert run_ranks(program, 4).values() == [alike, alike, other, alike]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_dropped_group_runs_no_python_where_it_is_dropped(is_used: bool) -> None:
    """Python discards what a signal handler raises in a finalizer: a Ctrl-C at that moment would be lost."""
    (comm,) = uni.local(1)
    group = comm.sub([0])
    if is_used:
        group.barrier()
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del group
    finally:
        sys.setprofile(None)
    comm.close()
    assert called == []
