"""Deadlocks among ranks of one process are reported with the ranks that wait; other waits are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.support.failing_ranks import (
    close_all,
    ended_by,
    metronome,  # noqa: F401
)
from tests.support.ranks import PATIENCE_S, run_each, run_ranks

import unisono as uni
from unisono.config import Config
from unisono.errors import (
    DeadlineExceeded,
    Deadlock,
)

# -- deadlocks --------------------------------------------------------------------------------------------


WATCHFUL = Config(deadlock_after_s=0.15, stall_query_s=0.05)


def test_a_deadlock_in_a_circle_names_which_rank_waits_for_which() -> None:
    ended = run_ranks(lambda comm: comm.recv_bytes((comm.rank + 1) % 3, 4), 3, config=WATCHFUL)
    for error in ended:
        assert isinstance(error, Deadlock)
        for rank in range(3):
            assert f"rank {rank} waits for rank {(rank + 1) % 3} in recv_bytes" in str(error)


def test_a_collective_and_a_message_that_wait_for_each_other_are_a_deadlock() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv_bytes(1)
        comm.barrier()

    ended = run_ranks(program, 3, config=WATCHFUL)
    assert all(isinstance(error, Deadlock) for error in ended), ended
    assert "rank 0 waits for rank 1 in recv_bytes" in str(ended[0])
    assert "barrier #0" in str(ended[2])


def test_large_sends_to_each_other_without_receives_are_a_deadlock() -> None:
    ended = run_ranks(lambda comm: comm.send(np.ones(100_000), 1 - comm.rank), 2, config=WATCHFUL)
    assert all(isinstance(error, Deadlock) for error in ended), ended
    assert "rank 0 waits for rank 1 in send" in str(ended[1])


PATIENT_S = 0.6  # four times deadlock_after_s


@pytest.mark.parametrize("busy", ["computes", "sleeps", "waits for a lock", "waits with a limit"])
def test_no_deadlock_while_one_rank_is_busy_elsewhere(busy: str) -> None:
    lock = threading.Lock()

    def be_busy(comm: uni.Communicator) -> None:
        until = time.monotonic() + PATIENT_S
        if busy == "computes":
            while time.monotonic() < until:
                np.ones(1000).sum()
        elif busy == "sleeps":
            time.sleep(PATIENT_S)
        elif busy == "waits for a lock":
            lock.acquire(timeout=PATIENT_S)
        else:
            ended_by(DeadlineExceeded, lambda: comm.recv_bytes(0, 7, timeout=PATIENT_S))

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            be_busy(comm)
            comm.send(b"go", 1)
        if comm.rank == 1:
            comm.recv_bytes(2)
            comm.send(b"go", 0)
        if comm.rank == 0:
            comm.recv_bytes(1)
        return comm.all_reduce(comm.rank)

    with lock:
        assert list(run_ranks(program, 3, config=WATCHFUL)) == [3, 3, 3]


def test_no_deadlock_while_a_third_thread_will_send_later() -> None:
    """Every rank has a thread that waits without limit, but a thread that never waited sends the message."""
    worlds = uni.local(2, WATCHFUL)

    def help_later() -> None:
        time.sleep(PATIENT_S)
        worlds[0].send(b"help", 1)

    def program(comm: uni.Communicator) -> Any:
        got = comm.recv_bytes(1 - comm.rank)
        if comm.rank == 1:
            comm.send(b"back", 0)
        return got

    helper = threading.Thread(target=help_later)
    helper.start()
    assert run_each(program, worlds).values() == [b"back", b"help"]
    helper.join(PATIENCE_S)
    close_all(worlds)


def on_threads(*lives: Callable[[], object]) -> None:
    """Run each function on a new thread, one after the other."""
    for program in lives:
        thread = threading.Thread(target=program)
        thread.start()
        thread.join(PATIENCE_S)


DESERTED = {
    "a message": lambda comm: comm.recv_bytes(2, 9),
    "a message of anybody": lambda comm: comm.recv_bytes(tag=9),
    "a collective": lambda comm: comm.barrier(),
    "a send": lambda comm: comm.send(np.ones(100_000), 2),
}


@pytest.mark.parametrize("waits_for", DESERTED)
def test_a_rank_whose_threads_have_ended_is_named_in_a_deadlock(waits_for: str) -> None:
    """An unrelated thread runs meanwhile: threads that have used no rank are not considered."""
    worlds, stop = uni.local(3, WATCHFUL), threading.Event()
    elsewhere = threading.Thread(target=stop.wait, args=(PATIENCE_S,))
    elsewhere.start()
    on_threads(lambda: worlds[2].send(b"", 0, 1), lambda: worlds[2].send(b"", 1, 1))
    if waits_for == "a message of anybody":
        worlds[1].close()
    waiting = [comm for comm in worlds[:2] if comm.rank == 0 or waits_for != "a message of anybody"]
    ended = run_each(lambda comm: str(ended_by(Deadlock, lambda: DESERTED[waits_for](comm))), waiting)
    for text in ended.values():
        assert text.startswith("rank 2 will not come")
        assert "every thread that used rank 2 has ended without closing it; rank" in text
        assert "waits for any rank" in text or "waits for rank 2 in" in text
    assert any("Next: use `with comm:` in the thread of each rank" in text for text in ended)
    stop.set()
    elsewhere.join(PATIENCE_S)
    close_all(worlds)


def returns_early(comm: uni.Communicator) -> Any:
    """Rank 1 makes no call, and no rank closes its communicator."""
    return comm.recv_bytes(1) if comm.rank == 0 else None


def in_a_pool(worlds: list[uni.Communicator]) -> BaseException | None:
    with ThreadPoolExecutor(len(worlds)) as pool:
        first, _ = [pool.submit(returns_early, comm) for comm in worlds]
        return first.exception()


def in_threads(worlds: list[uni.Communicator]) -> BaseException | None:
    ended: list[Future[Any]] = [Future() for _ in worlds]

    def program(comm: uni.Communicator) -> None:
        try:
            ended[comm.rank].set_result(returns_early(comm))
        except uni.UnisonoError as error:
            ended[comm.rank].set_exception(error)

    threads = [threading.Thread(target=program, args=(comm,)) for comm in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended[0].exception(timeout=0)


@pytest.mark.parametrize("on", [in_a_pool, in_threads])
def test_a_rank_that_was_never_used_is_named_in_a_deadlock(on: Callable[..., BaseException | None]) -> None:
    worlds = uni.local(2, WATCHFUL)
    error = on(worlds)
    assert isinstance(error, Deadlock)
    assert "rank 0 waits for rank 1 in recv_bytes" in str(error)
    assert "no thread uses rank 1" in str(error)
    close_all(worlds)


def test_no_deadlock_while_the_main_thread_is_about_to_start_a_rank() -> None:
    worlds, go = uni.local(2, WATCHFUL), threading.Event()

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            go.wait(PATIENCE_S)
            return comm.send(b"late", 0)
        return comm.recv_bytes(1)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(program, worlds[0])
        time.sleep(PATIENT_S)
        second = pool.submit(program, worlds[1])
        time.sleep(PATIENT_S)
        go.set()
        assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (b"late", None)
    close_all(worlds)


def test_a_rank_whose_threads_have_ended_is_named_when_all_wait_for_each_other() -> None:
    worlds = uni.local(3, WATCHFUL)
    on_threads(lambda: worlds[2].send(b"", 0, 1))
    waits = [lambda: worlds[0].recv_bytes(tag=9), lambda: worlds[1].recv_bytes(0)]
    for text in run_each(lambda wait: str(ended_by(Deadlock, wait)), waits).values():
        assert "rank 0 waits for any rank in recv_bytes" in text
        assert "rank 1 waits for rank 0 in recv_bytes" in text
        assert "every thread that used rank 2 has ended without closing it" in text
    close_all(worlds)


def test_no_deadlock_if_a_new_thread_uses_a_rank_whose_threads_have_ended() -> None:
    worlds = uni.local(2, Config(deadlock_after_s=1.0))
    on_threads(lambda: worlds[1].send(b"first", 0))

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            return comm.recv_bytes(1, 0), comm.recv_bytes(1, 0)
        comm.send(b"", 0, 5)  # the thread has used the rank, and computes
        time.sleep(2.5)
        return comm.send(b"second", 0)

    assert run_each(program, worlds).values() == [(b"first", b"second"), None]
    close_all(worlds)


def test_no_deadlock_while_a_started_work_outlives_its_thread() -> None:
    worlds, works = uni.local(3, WATCHFUL), []
    on_threads(lambda: works.append(worlds[1].start.all_reduce(1)))

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            time.sleep(PATIENT_S)
        return comm.all_reduce(comm.rank)

    assert run_each(program, [worlds[0], worlds[2]]).values() == [3, 3]
    assert works[0].wait(timeout=PATIENCE_S) == 3
    close_all(worlds)


def test_no_deadlock_while_a_rank_has_not_been_used_yet() -> None:
    worlds = uni.local(2, WATCHFUL)

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            time.sleep(PATIENT_S)
        return comm.all_reduce(comm.rank + 1)

    assert run_each(program, worlds).values() == [3, 3]
    close_all(worlds)
