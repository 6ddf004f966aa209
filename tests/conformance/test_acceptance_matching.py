"""Messages that reached the wrong receive in other libraries, one test for each fault."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.support.oracle import (
    Notes,
    operand,
    result,
)
from tests.support.ranks import reference_local, run_each, run_ranks, sleep

import unisono as uni

SHORT = uni.Config(segment_bytes=64)


@pytest.mark.on_every_link
def test_a_stream_is_in_step_after_hundreds_of_receives_that_gave_up() -> None:
    """F1, F2, F3, N17: a timeout or a wrong size left half a message in the stream."""
    total = 150

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            for k in range(total):
                comm.send(np.full(1 + 37 * k % 5000, k, np.int32), 1, 5)
            return None
        got, tries = [], 0
        buf = np.zeros(5001, np.int32)
        while len(got) < total:
            tries += 1
            short = np.zeros(1 + tries % 3, np.int32)
            try:
                if tries % 2:
                    status = comm.recv(short, 0, 5, timeout=0)
                    got.append(int(short[0]))
                else:
                    status = comm.recv(buf, 0, 5, timeout=0.001 * (tries % 3))
                    got.append(int(buf[0]) if (buf[: status.nbytes // 4] == buf[0]).all() else -1)
            except (uni.DeadlineExceeded, uni.UsageError):
                continue
        return got

    config = uni.Config(eager_bytes=1024, eager_credit_bytes=4096)
    assert run_ranks(program, 2, config=config).values()[1] == list(range(total))


def test_a_late_contribution_is_never_added_to_the_next_round() -> None:
    """F3: a retried all_reduce added the previous round's tensor. Here the communicator stays unusable."""

    def program(comm: uni.Communicator) -> Any:
        group = comm.sub(range(3))
        fresh = comm.sub(range(3))
        if comm.rank == 2:
            sleep(comm, 1.0)
        first = None
        try:
            group.all_reduce(np.full(4, 1000.0), timeout=0.5 if comm.rank != 2 else None)
        except uni.DeadlineExceeded as error:
            first = error.waiting_on
        with pytest.raises(uni.DeadlineExceeded):
            group.all_reduce(np.full(4, 1.0))
        return first, fresh.all_reduce(np.full(4, comm.rank + 1.0)).tolist()

    got = uni.simulate(program, 3).results
    assert got == [((2,), [6.0] * 4)] * 3


@pytest.mark.on_every_link
def test_unreceived_messages_disturb_no_collective_and_no_barrier() -> None:
    """F13: barrier bytes shared a channel with data."""

    def program(comm: uni.Communicator) -> Any:
        after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for tag in range(4):
            comm.send(bytes([comm.rank, tag]), after, tag)  # one byte, two bytes: as long as a token
        comm.send(b"", after, 9)
        comm.barrier()
        total = comm.all_reduce(np.arange(9) + comm.rank).tolist()
        comm.barrier()
        left = [comm.recv_bytes(before, tag) for tag in (3, 1, 2, 0, 9)]
        return total, left == [bytes([before, tag]) for tag in (3, 1, 2, 0)] + [b""]

    assert run_ranks(program, 3).values() == [([3 * k + 3 for k in range(9)], True)] * 3


@pytest.mark.on_every_link
def test_one_full_tag_holds_up_no_other() -> None:
    """N17, N20: a full channel blocked all tags of a link. Here unmatched payload is bounded."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            flood = [comm.start.send(np.full(100, k), 1, 1) for k in range(400)]
            waiting = sum(not work.done() for work in flood)
            comm.send(np.array([42]), 1, 2)
            total = comm.all_reduce(np.array([1]))
            uni.wait_all(flood)
            return waiting > 0, int(total[0])  # bounded: not all messages were accepted
        quick = np.zeros(1, np.int64)
        comm.recv(quick, 0, 2)
        total = comm.all_reduce(np.array([2]))
        buf, order = np.zeros(100, np.int64), []
        for _ in range(400):
            comm.recv(buf, 0, 1)
            order.append(int(buf[99]))
        return int(quick[0]), int(total[0]), order == list(range(400))

    config = uni.Config(eager_bytes=1024, eager_credit_bytes=8192)
    assert run_ranks(program, 2, config=config).values() == [(True, 3), (42, 3, True)]


@pytest.mark.on_every_link
def test_a_thread_that_waits_for_a_peer_does_not_keep_another_from_sending_to_it() -> None:
    """F6: one mutex per peer for both directions, held during a blocking receive."""

    def program(comm: uni.Communicator) -> Any:
        other = 1 - comm.rank
        if comm.rank == 0:
            answers: list[int] = []

            def ask(tag: int) -> None:
                buf = np.zeros(1, np.int64)
                comm.recv(
                    buf, other, 100 + tag
                )  # waits first, and gets its message only after the other thread sends
                answers.append(int(buf[0]))

            threads = [threading.Thread(target=ask, args=(tag,)) for tag in range(4)]
            for thread in threads:
                thread.start()
            for tag in range(4):
                comm.send(np.array([tag * 10]), other, tag)
            for thread in threads:
                thread.join()
            return sorted(answers)
        for tag in range(4):
            buf = np.zeros(1, np.int64)
            comm.recv(buf, other, tag)
            comm.send(buf + 1, other, 100 + tag)
        return None

    assert run_ranks(program, 2).values()[0] == [1, 11, 21, 31]


@pytest.mark.on_every_link
@pytest.mark.parametrize("first", [65_530, 2**31 - 4, 2**32 - 4])
def test_no_operation_number_is_special(first: int) -> None:
    """N18: every 65,536th large all_reduce used the untagged lane, and operation 2t met operation t."""

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        comm._group.call_log.next = first  # as if `first` collectives had been called before
        works = [
            comm.start.all_reduce(operand("int32", "sum", 99, comm.rank, 3, k).copy()) for k in range(10)
        ]
        for k, work in reversed(list(enumerate(works))):
            notes.expect(work.wait(), result("int32", "sum", 99, 3, k), first + k)
        return notes

    assert run_ranks(program, 3, config=SHORT).values() == [[]] * 3


def test_nothing_is_left_of_operations_that_ended() -> None:
    """N19, N23: every step of every collective leaked a channel."""

    def program(comm: uni.Communicator) -> None:
        for k in range(50):
            comm.all_reduce(np.arange(100) + k)
            comm.sendrecv(np.ones(3), 1 - comm.rank, np.zeros(3), 1 - comm.rank, k)
            child = comm.split(0)
            assert child is not None
            child.all_gather(np.ones(k))
            child.close()
        for _ in range(500):
            comm.barrier()

    world = reference_local(2, SHORT)
    run_each(program, world).values()
    for comm in world:
        matcher: Any = comm.backend.endpoint.protocol.inbox.matcher  # type: ignore[attr-defined]
        assert list(matcher.all_unexpected()) == []
        assert len(list(matcher.all_posted())) == 1, "only the listener for control messages is left"
        assert comm._group.state.pending == {}
        assert len(comm._group.call_log) == 512, "of 600 calls"
    for comm in world:
        comm.close()


def test_a_control_message_about_an_operation_is_no_data() -> None:
    """N8: a barrier failed on any unexpected control message. Here every operation sends a stall query."""

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for k in range(30):
            if comm.rank == k % 3:
                sleep(comm, 0.4)  # late enough that the others send stall queries
            comm.barrier()
            got = comm.all_reduce(operand("int64", "sum", 40, comm.rank, 3, k).copy())
            notes.expect(got, result("int64", "sum", 40, 3, k), k)
        return notes

    assert uni.simulate(program, 3, config=SHORT).results == [[]] * 3


def test_a_child_that_failed_leaves_nothing_behind_for_its_parent() -> None:
    """N10: a failed barrier of a child left a message that broke its parent's next one."""

    def program(comm: uni.Communicator) -> Any:
        for _ in range(5):
            child = comm.sub(range(3))
            if comm.rank != 1:
                with pytest.raises(uni.DeadlineExceeded):
                    child.barrier(timeout=0.1)
            comm.barrier()
        return comm.all_gather(comm.rank).tolist()

    assert uni.simulate(program, 3).results == [[0, 1, 2]] * 3
