"""Pairwise: in round i every rank sends to rank + i and receives from rank - i.

Every byte crosses one link, straight from its source to its destination, and no two ranks send to the same
rank in one round.
"""

from __future__ import annotations

from unisono.plans.layout import chunks, even_bounds, finish, offsets, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Send

__all__ = ["all_reduce", "all_to_all", "reduce_scatter"]


def all_reduce(problem: Problem, rank: int) -> Plan:
    """Reduce the own chunk from every peer's part of it, then collect the other chunks, all in place."""
    size = problem.size
    part = chunks(Buf.OUT, even_bounds(problem.counts[0], size))
    peers = [((rank + turn) % size, (rank - turn) % size) for turn in range(1, size)]
    reduce_rounds = [(Send(to, part[to]), RecvReduce(source, part[rank])) for to, source in peers]
    gather_rounds = [(Send(to, part[rank]), Recv(source, part[source])) for to, source in peers]
    return finish(problem, rank, "pairwise", [*reduce_rounds, *gather_rounds])


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
    """Send each peer its chunk in turn and add what arrives to the own chunk."""
    size, counts = problem.size, problem.counts
    mine = chunks(Buf.IN, offsets(counts))
    result = whole(Buf.OUT, counts[rank])
    rounds = [
        (Send((rank + turn) % size, mine[(rank + turn) % size]), RecvReduce((rank - turn) % size, result))
        for turn in range(1, size)
    ]
    return finish(problem, rank, "pairwise", with_first([Copy(result, mine[rank])], rounds))
