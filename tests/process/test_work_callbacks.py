"""Callbacks of works."""

from __future__ import annotations

import logging
import sys
import threading

import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, calls_adopted, every_kind, world
from tests.support.oracle import ramp, summed
from tests.support.ranks import PATIENCE_S, run_each, wait_until

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.core.work import Work
from unisono.errors import DeadlineExceeded, UnisonoError, UsageError

__all__ = ["world"]


@every_kind
def test_callbacks_get_the_work_on_the_ranks_own_thread_and_nothing_is_adopted(world: MakeWorld, kind: str):
    comms = world(3, kind, **NO_STALL)
    called: dict[int, list[tuple[Work, str]]] = {rank: [] for rank in range(3)}

    def program(comm: Communicator) -> None:
        mine = called[comm.rank]
        works = []
        for count in (1, 1021, 100_003):
            work = comm.start.all_reduce(ramp(comm.rank, count))
            work.add_done_callback(lambda work: mine.append((work, threading.current_thread().name)))
            works.append(work)
        for work, count in zip(works, (1, 1021, 100_003), strict=True):
            assert np.array_equal(work.wait(), summed(3, count))
        wait_until(lambda: len(mine) == 3)
        assert {id(work) for work, _ in mine} == set(map(id, works))
        assert {name for _, name in mine} == {f"unisono-callbacks-{comm.rank}"}
        works[0].add_done_callback(lambda work: mine.append((work, threading.current_thread().name)))
        wait_until(lambda: len(mine) == 4)
        assert mine[3] == (works[0], f"unisono-callbacks-{comm.rank}")
        assert calls_adopted(comm) == 0

    run_each(program, comms).values()


def test_callbacks_run_in_the_order_in_which_works_end(world: MakeWorld):
    comms = world(2)
    receiver, sender = comms[1], comms[0]
    order = [5, 2, 7, 0, 6, 1, 4, 3]
    ended: list[int] = []
    buffers = [np.zeros(3) for _ in order]
    for tag, buffer in enumerate(buffers):
        work = receiver.start.recv(buffer, src=0, tag=tag)
        work.add_done_callback(lambda _, tag=tag: ended.append(tag))
    for done, tag in enumerate(order, 1):
        sender.send(np.arange(3.0) + tag, dst=1, tag=tag)
        wait_until(lambda done=done: len(ended) == done)
    assert ended == order
    assert [buffer[0] for buffer in buffers] == list(range(8))


def test_each_collective_is_called_back_once_while_a_callback_keeps_the_thread(world: MakeWorld):
    """The first callback blocks the thread until all collectives have ended."""
    comms = world(2)
    ended: list[int] = []
    gate = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            for number in range(20):
                comm.all_reduce(ramp(1, 1 + number))
            return
        works = [comm.start.all_reduce(ramp(0, 1 + number)) for number in range(20)]
        works[0].add_done_callback(lambda _: gate.wait(PATIENCE_S))
        for number in reversed(range(20)):
            works[number].add_done_callback(lambda _, number=number: ended.append(number))
        uni.wait_all(works)
        gate.set()
        wait_until(lambda: len(ended) == 20)

    run_each(program, comms).values()
    assert sorted(ended) == list(range(20))


@every_kind
def test_a_callback_may_start_and_wait_for_collectives(world: MakeWorld, kind: str):
    comms = world(3, kind)

    def program(comm: Communicator) -> list[float]:
        found: list[float] = []
        over = threading.Event()

        def go_on(work: Work) -> None:
            found.append(float(work.wait()[2]))
            if len(found) == 12:
                over.set()
            elif len(found) % 2:  # blocking, then started again
                comm.barrier()
                comm.start.all_reduce(ramp(comm.rank) + len(found)).add_done_callback(go_on)
            else:
                value = comm.all_gather(np.array([float(comm.rank)]))
                comm.start.all_reduce(ramp(comm.rank) + value.sum()).add_done_callback(go_on)

        comm.start.all_reduce(ramp(comm.rank)).add_done_callback(go_on)
        assert over.wait(PATIENCE_S)
        return found

    expected = [summed(3)[2] + 3 * (0 if n == 0 else n if n % 2 else 3) for n in range(12)]
    assert run_each(program, comms).values() == [expected] * 3


def test_a_callback_that_raises_is_logged_and_the_next_one_runs(world: MakeWorld, caplog):
    comms = world(2)
    called = threading.Event()

    def fail(_: Work) -> None:
        raise ValueError("my mistake")

    with caplog.at_level(logging.ERROR, "unisono"):
        for exit_too in (fail, lambda _: sys.exit(3), lambda _: called.set()):
            comms[0].start.send(np.arange(3), dst=1).add_done_callback(exit_too)
            comms[1].recv(np.zeros(3, int), src=0)
        assert called.wait(PATIENCE_S)
    assert "my mistake" in caplog.text
    assert caplog.text.count("a callback of a work failed") == 2


def test_a_callback_that_is_not_callable_is_refused(world: MakeWorld):
    comms = world(2)
    work = comms[0].start.send(np.arange(3), dst=1)
    with pytest.raises(UsageError, match="cannot be called"):
        work.add_done_callback(3)  # type: ignore[arg-type]
    work.wait()
    comms[1].recv(np.zeros(3, int), src=0)


def test_a_work_that_fails_is_called_back_with_its_error(world: MakeWorld):
    comms = world(2)
    errors: list[BaseException] = []
    over = threading.Event()

    def note(work: Work) -> None:
        try:
            work.wait()
        except UnisonoError as error:
            errors.append(error)
        over.set()

    comms[0].start.recv(np.zeros(3), src=1, timeout=0.05).add_done_callback(note)
    assert over.wait(PATIENCE_S)
    assert isinstance(errors[0], DeadlineExceeded)
