"""In-process ranks for the tests of programs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import unisono as uni
from unisono.config import Config
from unisono.testing import run_local


def test_run_local_gives_results_by_rank() -> None:
    def program(comm: uni.Communicator, factor: int) -> int:
        return factor * comm.all_reduce(comm.rank) + comm.rank

    assert run_local(program, 4, 10) == [60, 61, 62, 63]


def test_run_local_raises_the_first_failure_not_its_consequences() -> None:
    def program(comm: uni.Communicator) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("rank two divides")
        comm.barrier()

    for _ in range(10):
        with pytest.raises(ZeroDivisionError, match="rank two divides"):
            run_local(program, 4)


def test_run_local_says_which_rank_hangs_and_where() -> None:
    release = threading.Event()

    def linger() -> None:
        release.wait(30)

    def program(comm: uni.Communicator) -> None:
        if comm.rank == 1:
            linger()

    try:
        with pytest.raises(TimeoutError, match=r"not ended after 0.2 s: rank 1 is at .*in linger"):
            run_local(program, 3, timeout=0.2)
    finally:
        release.set()


def test_run_local_ends_ranks_that_wait_for_one_that_hangs() -> None:
    release = threading.Event()

    def program(comm: uni.Communicator) -> None:
        if comm.rank == 1:
            release.wait(30)
        else:
            comm.recv_bytes(1)

    try:
        with pytest.raises(TimeoutError, match=r"rank 0 is at .*; rank 1 is at "):
            run_local(program, 2, timeout=0.2)
    finally:
        release.set()


def test_run_local_passes_the_settings_on() -> None:
    def program(comm: uni.Communicator) -> int:
        return comm.backend.config.segment_bytes

    assert run_local(program, 2, config=Config(segment_bytes=4096)) == [4096, 4096]


def test_run_local_takes_numpy_results() -> None:
    results = run_local(lambda comm: comm.all_gather(np.array([comm.rank])), 3)
    assert all((result == [[0], [1], [2]]).all() for result in results)
