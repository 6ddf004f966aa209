"""Collectives whose end proves that all ranks have made the call, with every algorithm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest

from unisono.plans import CATALOG, Entry, Problem, Recv, RecvReduce, Send, build
from unisono.plans.catalog import synchronizes
from unisono.plans.program import bound_program


def origins_by_rank(problem: Problem, algorithm: str) -> list[set[int]]:
    """By rank: the ranks whose data has arrived, directly or not, when the rank's last receive has ended."""
    programs = [
        bound_program(build(problem, rank, algorithm), problem.counts, 1 << 20)
        for rank in range(problem.size)
    ]
    sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for i, piece in enumerate(program.pieces):
            if isinstance(piece, Send):
                sends[rank, piece.peer].append(i)
    known: dict[tuple[int, int], set[int]] = {}

    def origins(rank: int, i: int) -> set[int]:
        """The ranks whose calls must have begun before this segment can end; waits of sends do not count."""
        if (rank, i) not in known:
            program = programs[rank]
            found = {rank}.union(*(origins(rank, earlier) for earlier in program.before[i]))
            piece = program.pieces[i]
            if isinstance(piece, Recv | RecvReduce):
                receives = [
                    j
                    for j, other in enumerate(program.pieces)
                    if isinstance(other, Recv | RecvReduce) and other.peer == piece.peer
                ]
                found |= origins(piece.peer, sends[piece.peer, rank][receives.index(i)])
            known[rank, i] = found
        return known[rank, i]

    return [
        set().union({rank}, *(origins(rank, i) for i in range(len(program.pieces))))
        for rank, program in enumerate(programs)
    ]


def counts_of(collective: str, size: int) -> tuple[int, ...]:
    if collective == "barrier":
        return ()
    if collective in ("all_reduce", "reduce", "broadcast", "scan", "exscan"):
        return (1,)
    return (1,) * (size * size if collective == "all_to_all" else size)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(("collective", "entries"), CATALOG.items())
def test_only_a_synchronizing_collective_shows_that_every_rank_called(
    collective: str, entries: Mapping[str, Entry], size: int
) -> None:
    everyone = set(range(size))
    has_heard_from_all: dict[str, bool] = {}
    for algorithm, entry in entries.items():
        hosts = tuple(rank * 2 // size for rank in range(size)) if entry.needs_hosts else ()
        problem = Problem(collective, size, counts_of(collective, size), 0, hosts)
        has_heard_from_all[algorithm] = all(one == everyone for one in origins_by_rank(problem, algorithm))
    assert all(has_heard_from_all.values()) == synchronizes(collective), has_heard_from_all
