"""Pairwise: in round i everyone sends to the rank i places after and receives from the rank i places before.

Knows distances. Every byte crosses one link, straight from where it lies to where it belongs, and no two
ranks ever send to the same one at a time.
"""

from __future__ import annotations

from unisono.plans.layout import chunks, finish, offsets, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Send

__all__ = ["all_to_all", "reduce_scatter"]


def all_to_all(problem: Problem, rank: int) -> Plan:
    """Exchange one block with each peer in turn."""
    size, counts = problem.size, problem.counts
    row = chunks(Buf.IN, offsets(counts[rank * size : (rank + 1) * size]))
    column = chunks(Buf.OUT, offsets(counts[rank::size]))
    rounds = [
        (
            Send((rank + turn) % size, row[(rank + turn) % size]),
            Recv((rank - turn) % size, column[(rank - turn) % size]),
        )
        for turn in range(1, size)
    ]
    return finish(problem, rank, "pairwise", with_first([Copy(column[rank], row[rank])], rounds))


def reduce_scatter(problem: Problem, rank: int) -> Plan:
    """Send each peer its chunk in turn and add what arrives to the own one."""
    size, counts = problem.size, problem.counts
    mine = chunks(Buf.IN, offsets(counts))
    result = whole(Buf.OUT, counts[rank])
    rounds = [
        (Send((rank + turn) % size, mine[(rank + turn) % size]), RecvReduce((rank - turn) % size, result))
        for turn in range(1, size)
    ]
    return finish(problem, rank, "pairwise", with_first([Copy(result, mine[rank])], rounds))
