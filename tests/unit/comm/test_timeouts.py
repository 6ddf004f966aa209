"""Deadlines, withdrawn operations, and several threads on one communicator."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import numpy as np
import pytest
from tests.support.failing_ranks import (
    SMALL,
    close_all,
    ended_by,
    ends_in_time,
    metronome,  # noqa: F401
    one_collective,
    ramp,
)
from tests.support.ranks import PATIENCE_S, run_each, run_ranks

import unisono as uni
from unisono.config import Config
from unisono.errors import (
    CollectiveMismatch,
    DeadlineExceeded,
    PeerAborted,
    UnisonoError,
)

# -- time runs out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5, 8])
@pytest.mark.parametrize("algorithm", ["ring", "doubling", "tree", "halving_doubling", "flat", "ordered"])
def test_a_deadline_names_the_rank_that_did_not_come(algorithm: str, size: int) -> None:
    """The error does not name a neighbour that itself waits: the ranks query each other.

    The query passes from rank to rank, and each must run before the deadline. On a machine that is too busy
    for that, the test is repeated with a later deadline.
    """
    absent = size - 2
    config = Config(stall_query_s=0.05)

    def program(comm: uni.Communicator, timeout: float) -> Any:
        comm.barrier()
        if comm.rank == absent:
            for peer in range(size):
                if peer != absent:
                    comm.recv_bytes(peer, 1)
            return None
        error = ended_by(
            DeadlineExceeded, lambda: comm.all_reduce(np.ones(50), timeout=timeout, algorithm=algorithm)
        )
        comm.send(b"done", absent, 1)
        return error.waiting_on

    for timeout in (0.4, 1.6, 6.4):
        worlds = uni.local(size, config)
        ended = run_each(functools.partial(program, timeout=timeout), worlds).values()
        close_all(worlds)
        named = [on for rank, on in enumerate(ended) if rank != absent]
        if named == [(absent,)] * (size - 1):
            break
    assert named == [(absent,)] * (size - 1)


def test_a_rank_that_was_late_is_not_blamed_for_one_that_never_came() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            for peer in (0, 1, 3):
                comm.recv_bytes(peer, 1)
            return None
        if comm.rank == 1:
            time.sleep(0.25)  # late enough to be queried, and found absent
        error = ended_by(DeadlineExceeded, lambda: comm.all_reduce(np.ones(9), timeout=1.0, algorithm="ring"))
        comm.send(b"done", 2, 1)
        return error.waiting_on

    worlds = uni.local(4, Config(stall_query_s=0.05))
    assert run_each(program, worlds).values() == [(2,), (2,), None, (2,)]
    close_all(worlds)


def test_a_wait_that_gives_up_leaves_the_work_going() -> None:
    worlds = uni.local(2)
    work = worlds[0].start.all_reduce(np.arange(5.0))
    for _ in range(3):
        error = ended_by(DeadlineExceeded, lambda: work.wait(0.02))
        assert error.waiting_on == (1,)
        assert not work.done()
    other = worlds[1].start.all_reduce(np.ones(5))
    np.testing.assert_array_equal(work.wait(PATIENCE_S), np.arange(5.0) + 1)
    other.wait(PATIENCE_S)
    close_all(worlds)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_a_receive_that_ended_early_leaves_its_message_to_the_next(how: str) -> None:
    worlds = uni.local(2)
    first, second = np.zeros(2), np.zeros(2)
    if how == "expired":
        assert ended_by(DeadlineExceeded, lambda: worlds[0].recv(first, 1, timeout=0.02)).waiting_on == (1,)
    else:
        work = worlds[0].start.recv(first, 1)
        assert work.cancel()
        ended_by(PeerAborted, lambda: work.wait(PATIENCE_S))
    worlds[1].send(np.array([4.0, 5.0]), 0)
    assert worlds[0].recv(second, 1, timeout=PATIENCE_S).nbytes == 16
    assert (first.tolist(), second.tolist()) == ([0, 0], [4, 5])
    assert worlds[0].start.all_reduce(1).cancel()  # a receive poisons nothing, so this begins
    close_all(worlds)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_a_collective_that_ended_early_ends_the_communicator_and_messages_pass(how: str) -> None:
    kind: type[UnisonoError] = DeadlineExceeded if how == "expired" else PeerAborted
    worlds = uni.local(3)
    works = [world.start.all_reduce(np.ones(9)) for world in worlds[:2]]
    if how == "cancelled":
        assert works[1].cancel()
    else:
        works.append(worlds[1].start.barrier(timeout=0.05))
    with ends_in_time():
        for work in works:
            ended_by(kind, lambda work=work: work.wait(PATIENCE_S))
    texts = set()
    for world in worlds:  # also the rank that never made the call
        error = ended_by(kind, lambda world=world: world.all_reduce(1, timeout=PATIENCE_S))
        assert error.operation == ("barrier" if how == "expired" else "all_reduce")
        texts.add(error.what)
    assert len(texts) == 1, texts
    got = worlds[2].start.recv_bytes(0)
    worlds[0].send(b"still talking", 2)
    assert got.wait(PATIENCE_S) == b"still talking"
    child = worlds[0].sub([0])
    assert child.all_reduce(3) == 3
    close_all(worlds)


# -- several threads --------------------------------------------------------------------------------------


def test_two_threads_on_one_communicator_are_ordered_and_never_mixed() -> None:
    """Which calls of the ranks match is random, but every sum has exactly one contribution per rank."""
    size, turns = 3, 60
    worlds = uni.local(size, SMALL)

    def program(place: tuple[uni.Communicator, int]) -> list[int]:
        comm, base = place
        return [int(comm.all_reduce(np.full(70, base))[0]) for _ in range(turns)]

    ended = run_each(program, [(world, base) for world in worlds for base in (1, 1000)]).values()
    sums = [tuple(sorted(ended[2 * rank] + ended[2 * rank + 1])) for rank in range(size)]
    assert sums[0] == sums[1] == sums[2], "every rank saw the same sums"
    assert sum(sums[0]) == turns * size * 1001, "every contribution is in exactly one of them"
    assert all(total % 1000 + total // 1000 == size for total in sums[0])
    close_all(worlds)


def test_two_threads_with_different_calls_get_the_right_answer_or_a_mismatch() -> None:
    for _ in range(10):
        worlds = uni.local(2, Config(stall_query_s=0.02))

        def program(place: tuple[uni.Communicator, str]) -> Any:
            comm, verb = place
            for turn in range(20):
                if verb == "sum":
                    assert comm.all_reduce(turn + comm.rank) == 2 * turn + 1
                else:
                    gathered = comm.all_gather(np.array([comm.rank, turn], np.int32))
                    assert gathered.tolist() == [[0, turn], [1, turn]]

        ended = run_each(program, [(world, verb) for world in worlds for verb in ("sum", "gather")])
        for result in ended:
            assert result is None or isinstance(result, CollectiveMismatch), repr(result)
        close_all(worlds)


def test_many_communicators_and_threads_at_once_do_not_meet() -> None:
    """Four ranks, six communicators with different members, one thread per communicator and rank."""
    size, turns = 4, 25
    groups: list[list[uni.Communicator]] = []

    def make(world: uni.Communicator) -> list[uni.Communicator]:
        made = [world.split(world.rank % 2), world.split(0, -world.rank), world.split(world.rank // 2)]
        others = [world.sub(range(size)), world.sub([world.rank, (world.rank + 2) % size]), world]
        return [comm for comm in (*made, *others) if comm is not None]

    worlds = uni.local(size, SMALL)
    groups = run_each(make, worlds).values()

    def program(place: tuple[int, uni.Communicator]) -> None:
        number, comm = place
        rng = random.Random(f"{number} {comm.size} {comm.name}")
        for turn in range(turns):
            one_collective(comm, rng, turn + number)
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            got = np.empty(40)
            comm.sendrecv(ramp(40, comm.rank + number, turn), right, got, left, tag=turn)
            np.testing.assert_array_equal(got, ramp(40, left + number, turn))

    run_each(program, [(i, comm) for made in groups for i, comm in enumerate(made)]).values()
    close_all(worlds)


def test_a_verb_inside_a_reduce_function_is_carried_on() -> None:
    """Only the thread that waits there could continue the work: it must not wait for itself."""

    def program(comm: uni.Communicator) -> Any:
        inner = comm.split(0)
        assert inner is not None

        def add(left: Any, right: Any) -> Any:
            return left + right + inner.all_reduce(0.0, timeout=PATIENCE_S)

        return comm.all_reduce(np.ones(3), uni.op(add, name="nested"), algorithm="doubling").tolist()

    assert list(run_ranks(program, 2)) == [[2, 2, 2], [2, 2, 2]]
