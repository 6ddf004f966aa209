"""Groups for `pytorch` and `rpc`: members in any order, a group per purpose, works that may be dropped."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
from tests.support.ranks import run_ranks

import unisono as uni


def test_members_keep_the_order_they_are_given_in() -> None:
    def program(comm: uni.Communicator) -> tuple[int, list[int]]:
        group = comm._sub((2, 0, 1))
        return group.rank, group.all_gather(comm.rank).tolist()

    assert list(run_ranks(program, 3)) == [(1, [2, 0, 1]), (2, [2, 0, 1]), (0, [2, 0, 1])]


def test_a_group_for_a_purpose_is_made_when_a_member_needs_it_and_counts_for_no_other() -> None:
    def program(comm: uni.Communicator) -> list[Any]:
        everyone = tuple(range(comm.size))
        if comm.rank == 0:
            comm._sub(everyone, "watching")  # no other member needs it yet
        later = comm.sub(everyone)
        found = [later.all_reduce(comm.rank + 1)]
        watching = None if comm.rank == 0 else comm._sub(everyone, "watching")
        found.append(later.all_reduce(10))
        del watching
        return found

    assert list(run_ranks(program, 2)) == [[3, 20]] * 2


def test_works_of_a_lenient_group_are_dropped_without_a_warning() -> None:
    def program(comm: uni.Communicator) -> list[str]:
        comm._let_works_go()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = np.full(70_001, comm.rank + 1.0)
            comm.start.all_reduce(x)
            comm.start.recv(np.empty(3), src=1 - comm.rank)
            gc.collect()
            comm.barrier()
        return [str(w.message) for w in caught if w.category is ResourceWarning]

    assert list(run_ranks(program, 2)) == [[], []]
