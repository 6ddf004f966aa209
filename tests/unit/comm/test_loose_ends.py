"""A closing communicator logs unfinished works and unreceived messages, with the lines that made them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.processes import PATIENCE_S, run_processes
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.comm.communicator import Communicator


@contextmanager
def logs_of_closes() -> Iterator[list[str]]:
    """The log records of closing communicators during the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("unisono")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def never_waited(comm: Communicator) -> None:
    works = [comm.start.all_reduce(np.ones(3)) for _ in range(2)]
    comm.start.barrier().wait()
    assert len(works) == 2


def never_received(comm: Communicator) -> None:
    if comm.rank != 1:
        comm.send(np.ones(3), 1, tag=5)
        comm.send(np.ones(4), 1, tag=6)
    comm.barrier()


def never_joined(comm: Communicator) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: comm.all_reduce(np.ones(3 + (comm.rank == 1))))


def never_looked_at(comm: Communicator) -> None:
    work = comm.start.all_reduce(np.ones(3 + (comm.rank == 1)))
    while not work.done():
        pass


def all_seen(comm: Communicator) -> None:
    """Every way to use a work's result, and a mismatch that its caller handled."""
    works = [comm.start.all_reduce(np.ones(3)) for _ in range(4)]
    uni.wait_all(works[:2])
    while not works[2].done():
        pass
    works[3].wait()
    impatient = comm.start.recv(np.empty(1), (comm.rank - 1) % 3, tag=8)
    with pytest.raises(uni.DeadlineExceeded):
        impatient.wait(timeout=0)
    comm.barrier()
    comm.send(np.ones(1), (comm.rank + 1) % 3, tag=8)
    comm.barrier()
    comm.start.recv(np.empty(3), 0, tag=9).cancel()
    comm.sendrecv(np.ones(3), (comm.rank + 1) % 3, np.empty(3), (comm.rank - 1) % 3)
    with comm.split(0) as group, pytest.raises(uni.CollectiveMismatch):
        group.all_reduce(np.ones(3 + comm.rank))
    with comm.split(0) as late:
        if comm.rank == 2:  # its next call raises the mismatch of the others
            comm.recv(np.empty(1), 0, tag=2)
        with pytest.raises(uni.CollectiveMismatch):
            late.all_reduce(np.ones(3 + comm.rank))
        if comm.rank == 0:
            comm.send(np.empty(1), 2, tag=2)


def aborted(comm: Communicator) -> None:
    """After an exception, unfinished works are not logged."""
    work = comm.start.all_reduce(np.ones(3))
    raise ValueError(f"the root of it, with {work}")


WORKS_LINE = never_waited.__code__.co_firstlineno + 1
LOOSE: dict[str, tuple[Callable[[Communicator], None], Callable[[int], str | None]]] = {
    "work": (
        never_waited,
        lambda rank: f"works never waited for: all_reduce at test_loose_ends.py:{WORKS_LINE} (2 times)",
    ),
    "message": (
        never_received,
        lambda rank: (
            "messages never received: 24 bytes from rank 0, tag 5; 24 bytes from rank 2, tag 5"
            if rank == 1
            else None
        ),
    ),
    "mismatch": (never_joined, lambda rank: "a mismatch that was raised during all_reduce #0"),
    "mismatch of a work": (never_looked_at, lambda rank: "a mismatch that no call has raised: "),
    "nothing": (all_seen, lambda rank: None),
    "aborted": (aborted, lambda rank: None),
}


@pytest.mark.parametrize("what", LOOSE)
def test_what_is_left_undone_is_named_at_close(what: str) -> None:
    program, wanted = LOOSE[what]
    with logs_of_closes() as said:
        run_ranks(program, 3)
    for rank in range(3):
        lines = [line for line in said if line.startswith(f"rank {rank} closes")]
        words = wanted(rank)
        assert len(lines) == (words is not None), said
        assert words is None or words in lines[0], said
        assert words is None or "'world'" in lines[0]


def test_works_that_many_threads_start_and_wait_for_are_counted_right() -> None:
    def program(comm: Communicator) -> None:
        def turn(tag: int) -> None:
            for _ in range(200):
                comm.start.send(np.ones(1), comm.rank, tag).wait()
                comm.recv(np.empty(1), comm.rank, tag)

        threads = [threading.Thread(target=turn, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with logs_of_closes() as said:
            run_ranks(program, 1).values()
    finally:
        sys.setswitchinterval(before)
    assert said == []


@pytest.mark.parametrize("kind", ["shm", "iroh"])
@pytest.mark.parametrize("what", ["work", "message", "mismatch", "nothing"])
def test_processes_name_what_is_left_undone(what: str, kind: str) -> None:
    program, wanted = LOOSE[what]

    def spoken(comm: Communicator) -> list[str]:
        with logs_of_closes() as said:
            program(comm)
            comm.close()
        return said

    for rank, said in enumerate(run_processes(spoken, 3, kind=kind)):
        words = wanted(rank)
        lines = [line for line in said if " closes " in line]
        assert len(lines) == (words is not None), said
        assert words is None or (words in lines[0] and "test_loose_ends.py" in lines[0]), said


def test_a_world_that_is_never_closed_names_it_when_the_main_thread_ends() -> None:
    text = "import unisono as uni\nworld = uni.init()\nwork = world.start.all_reduce(1.0)\n"
    command: list[Any] = [sys.executable, "-c", text]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
    assert "rank 0 closes 'world' with works never waited for: all_reduce at <string>:3" in ended.stderr
