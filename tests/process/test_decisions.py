"""Decisions belong to the shape of a group: groups of one shape share them, with the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, found, outcome, world
from tests.support.oracle import Notes
from tests.support.ranks import run_each

from unisono.comm.adoption import Adoption
from unisono.comm.communicator import Communicator
from unisono.errors import CollectiveMismatch
from unisono.messaging.backend import numbered_hosts

__all__ = ["world"]


def decided(comm: Communicator) -> int:
    """The classes of calls that Python has decided on this group."""
    native = comm._group.native
    assert native is not None
    return native.decided


def operand(member: int, step: int, *shape: int) -> np.ndarray[Any, Any]:
    """The contribution of a world rank: whole numbers that differ by index."""
    count = int(np.prod(shape))
    return (np.arange(count) * 7 + member * 131 + step * 17).astype(np.float64).reshape(shape)


def call_all(comm: Communicator, members: list[int], step: int, algorithm: str = "auto") -> Notes:
    """Compare each even verb with NumPy; `members` are the world ranks in the order of the group."""
    notes, rank, size, count = Notes(), comm.rank, len(members), 13
    xs = [operand(member, step, count) for member in members]
    rows = [operand(member, step + 1, size, 3) for member in members]
    root = size - 1
    named = {"algorithm": algorithm}
    notes.expect(comm.all_reduce(xs[rank].copy(), **named), sum(xs), "all_reduce")
    notes.expect(comm.broadcast(xs[rank].copy(), root, **named), xs[root], "broadcast")
    notes.expect(comm.all_gather(xs[rank], **named), np.array(xs), "all_gather")
    notes.expect(comm.reduce_scatter(rows[rank], **named), sum(rows)[rank], "reduce_scatter")
    if algorithm == "auto":
        want = None if rank != root else np.array(xs)
        notes.expect(comm.gather(xs[rank], root), want, "gather")
        notes.expect(comm.all_to_all(rows[rank]), np.array([row[rank] for row in rows]), "all_to_all")
        notes.expect(comm.scan(xs[rank], "max"), np.max(xs[: rank + 1], axis=0), "scan")
        comm.barrier()
    return notes


def group_of(comm: Communicator, members: list[int]) -> Communicator:
    """A group of the world ranks in `order`: all ranks in another order, or some of them."""
    group = comm.split(min(members), members.index(comm.rank))
    assert group is not None
    assert group._group.world_ranks == tuple(members)
    return group


def test_groups_of_one_shape_share_decisions_and_reversed_ones_do_not(world: MakeWorld) -> None:
    comms, size = world(4), 4
    straight, reverse = list(range(size)), list(reversed(range(size)))

    def program(comm: Communicator) -> Notes:
        notes = call_all(comm, straight, 0)
        for step, (members, is_known) in enumerate(
            [(straight, True), (reverse, False), (reverse, True), (straight, True)], 1
        ):
            with group_of(comm, members) as group:
                notes += call_all(group, members, step)
                notes.check((decided(group) == 0) == is_known, f"{members}: decided {decided(group)}")
                # Groups of groups have shapes, too.
                with group_of_group(group) as inner:
                    notes += call_all(inner, members, step)
                    notes.check(decided(inner) == 0, f"{members} within: decided {decided(inner)}")
        return notes

    assert found(comms, program) == []


def group_of_group(group: Communicator) -> Communicator:
    inner = group.sub(range(group.size))
    assert inner._group.world_ranks == group._group.world_ranks
    return inner


def test_a_group_of_another_size_or_rank_decides_for_itself(world: MakeWorld) -> None:
    comms = world(4)

    def program(comm: Communicator) -> Notes:
        notes, seen = call_all(comm, [0, 1, 2, 3], 0), set[tuple[int, int]]()
        for step, parts in enumerate(
            ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1, 2]], [[0], [1, 2, 3]], [[3, 1, 2], [0]]), 1
        ):
            members = next(part for part in parts if comm.rank in part)
            with group_of(comm, members) as group:
                shape = (len(members), group.rank)
                notes += call_all(group, members, step)
                notes.check((decided(group) == 0) == (shape in seen), f"{members}: decided {decided(group)}")
                seen.add(shape)
        return notes

    assert found(comms, program) == []


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_hosts_are_part_of_the_shape_but_not_their_names(world: MakeWorld, algorithm: str) -> None:
    """Ranks 0 and 2 are on one host, 1 and 3 on another, and a group may have them in any order."""
    comms = world(4, "hosts")

    def program(comm: Communicator) -> Notes:
        notes, seen = Notes(), set[tuple[int, tuple[int, ...]]]()
        for step, order in enumerate(permutations(range(4))):
            members = list(order)
            with group_of(comm, members) as group:
                shape = (group.rank, numbered_hosts([member % 2 for member in members]))
                notes.expect(np.array(group.backend.hosts()), np.array(shape[1]), f"{members}: hosts")
                notes += call_all(group, members, step, algorithm)
                notes.check((decided(group) == 0) == (shape in seen), f"{members}: decided {decided(group)}")
                seen.add(shape)
        notes.check(len(seen) == 12, f"{len(seen)} shapes")
        return notes

    assert found(comms, program) == []


def test_ranks_of_one_host_are_not_taken_for_ranks_of_two(world: MakeWorld) -> None:
    comms = world(4, "hosts")

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for step, (parts, is_known) in enumerate(
            [([[0, 1], [2, 3]], False), ([[0, 2], [1, 3]], False), ([[0, 3], [2, 1]], True)]
        ):
            members = next(part for part in parts if comm.rank in part)
            with group_of(comm, members) as group:
                notes += call_all(group, members, step)
                notes.check((decided(group) == 0) == is_known, f"{members}: decided {decided(group)}")
        return notes

    assert found(comms, program) == []


def test_a_groups_first_call_of_a_known_class_waits_for_its_receivers(world: MakeWorld) -> None:
    """Otherwise a root would run ahead of ranks that call something else from the start."""
    comms = world(2)

    def cast(comm: Communicator) -> Any:
        return comm.broadcast(np.array([3, 4], np.int64), 0)

    def program(comm: Communicator) -> Any:
        for _ in range(4):
            cast(comm)
            comm.barrier()
        group = comm.split(0, comm.rank)
        assert group is not None
        error = outcome(lambda: cast(group) if comm.rank == 0 else group.all_reduce(np.ones(3)))
        return error, decided(group)

    for error, classes in run_each(program, list(comms)).values():
        assert isinstance(error, CollectiveMismatch), error
        assert error.report.startswith("rank 0: broadcast int64[2] root=0")
        assert classes in (0, 1)


PAIRS: dict[str, tuple[Callable[[Communicator], object], Callable[[Communicator], object]]] = {
    "verb": (lambda comm: comm.barrier(), lambda comm: comm.all_reduce(np.ones(3))),
    "count": (lambda comm: comm.all_reduce(np.ones(3)), lambda comm: comm.all_reduce(np.ones(4))),
    "shape": (lambda comm: comm.all_gather(np.ones((2, 3))), lambda comm: comm.all_gather(np.ones((3, 2)))),
    "parts": (
        lambda comm: comm.reduce_scatter(np.ones((2, 5))),
        lambda comm: comm.reduce_scatter(np.ones((2, 2, 3))),
    ),
    "root": (
        lambda comm: comm.broadcast(np.ones(5, np.int8), 0),
        lambda comm: comm.broadcast(np.ones(5, np.int8), 1),
    ),
    "split": (lambda comm: comm.split(0), lambda comm: comm.barrier()),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_mismatch_reads_the_same_with_own_and_shared_decisions(world: MakeWorld, pair: str) -> None:
    """On a group without decisions of its own, with and without earlier calls of these classes on it."""
    calls = PAIRS[pair]

    def program(comm: Communicator, *, is_known: bool, is_called: bool) -> str:
        group = comm.split(0, comm.rank)
        assert group is not None
        for known in (comm, group)[: is_known + is_called]:
            for call in calls:
                call(known)
        before = decided(group)
        error = outcome(lambda: (calls[group.rank](group), group.barrier()))  # roots of known calls run ahead
        assert isinstance(error, CollectiveMismatch), error
        assert not is_known or before == 0
        return f"{str(error).partition(' during ')[0]}\n{error.report}"

    texts = {
        text
        for how in ({}, {"is_known": True}, {"is_known": True, "is_called": True})
        for text in run_each(
            lambda comm, how=how: program(comm, **{"is_known": False, "is_called": False, **how}),
            list(world(2)),
        ).values()
    }
    assert len(texts) == 1, texts
    assert "segment=" in texts.pop()


def test_threads_that_decide_the_same_at_once_share_one_decision(world: MakeWorld) -> None:
    """Deciding runs Python, so another thread may decide the same class for another group meanwhile."""
    comms, counts = world(2), [1, 2, 3, 7, 40, 600, 5000]

    def programs(comm: Communicator) -> Iterator[Callable[[], list[str]]]:
        for _ in range(3):
            group = comm.split(0, comm.rank)
            assert group is not None

            def program(group: Communicator = group) -> list[str]:
                notes = Notes()
                for k, count in enumerate(counts * 2):
                    xs = [operand(member, k, count) for member in (0, 1)]
                    notes.expect(group.all_reduce(xs[group.rank].copy()), xs[0] + xs[1], f"{count} #{k}")
                notes.check(decided(group) <= len(counts), f"decided {decided(group)}")
                return notes

            yield program

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        ready = run_each(lambda comm: list(programs(comm)), list(comms)).values()
        ended = run_each(lambda program: program(), [program for rank in ready for program in rank]).values()
    finally:
        sys.setswitchinterval(interval)
    assert ended == [[]] * 6


def test_a_decision_that_lacks_a_value_is_refused(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Adoption.decide
    monkeypatch.setattr(Adoption, "decide", lambda *args: (decide(*args) or ())[:-1])
    with pytest.raises(RuntimeError, match="bad_cast"):
        world(1)[0].all_reduce(np.ones(3))
