"""Pairwise: in round i every rank sends to rank + i and receives from rank - i.

Every byte crosses one link, straight from its source to its destination, and no two ranks send to the same
rank in one round.
"""

from __future__ import annotations

from unisono.plans.amounts import blocks, even
from unisono.plans.layout import chunks, finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Shape, Step

__all__ = ["all_reduce", "all_to_all", "reduce", "reduce_scatter"]


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Reduce the own chunk from every peer's part of it, then collect the other chunks, all in place."""
    size = shape.size
    part = chunks(Buf.OUT, even(shape.counts[0], size))
    peers = [((rank + turn) % size, (rank - turn) % size) for turn in range(1, size)]
    reduce_rounds = [(Send(to, part[to]), RecvReduce(source, part[rank])) for to, source in peers]
    gather_rounds = [(Send(to, part[rank]), Recv(source, part[source])) for to, source in peers]
    return finish(shape, rank, "pairwise", [*reduce_rounds, *gather_rounds])


def reduce(shape: Shape, rank: int) -> Plan:
    """Every rank reduces one chunk from all parts of it; the root collects the chunks.

    The root works in place. Any other rank leaves its operand alone and reduces in `tmp`, segment by segment
    as parts arrive.
    """
    size, root = shape.size, shape.root
    points = even(shape.counts[0], size)
    mine = chunks(Buf.OUT if rank == root else Buf.IN, points)
    peers = [((rank + turn) % size, (rank - turn) % size) for turn in range(1, size)]
    if rank == root:
        rounds = [(Send(to, mine[to]), RecvReduce(source, mine[rank])) for to, source in peers]
        return finish(shape, rank, "pairwise", [*rounds, [Recv(source, mine[source]) for _, source in peers]])
    total = whole(Buf.TMP, points[rank + 1] - points[rank])
    reduce_rounds: list[list[Step]] = []
    for turn, (to, source) in enumerate(peers):
        arrives = (
            [Recv(source, total), Reduce(total, mine[rank])] if turn == 0 else [RecvReduce(source, total)]
        )
        reduce_rounds.append([Send(to, mine[to]), *arrives])
    return finish(shape, rank, "pairwise", [*reduce_rounds, [Send(root, total)]])


def all_to_all(shape: Shape, rank: int) -> Plan:
    """Exchange one block with each peer in turn."""
    size, counts = shape.size, shape.counts
    row = chunks(Buf.IN, blocks(counts[rank * size : (rank + 1) * size]))
    column = chunks(Buf.OUT, blocks(counts[rank::size]))
    rounds = [
        (
            Send((rank + turn) % size, row[(rank + turn) % size]),
            Recv((rank - turn) % size, column[(rank - turn) % size]),
        )
        for turn in range(1, size)
    ]
    return finish(shape, rank, "pairwise", with_first([Copy(column[rank], row[rank])], rounds))


def reduce_scatter(shape: Shape, rank: int) -> Plan:
    """Send each peer its chunk in turn and add what arrives to the own chunk."""
    size, counts = shape.size, shape.counts
    mine = chunks(Buf.IN, blocks(counts))
    result = whole(Buf.OUT, counts[rank])
    rounds = [
        (Send((rank + turn) % size, mine[(rank + turn) % size]), RecvReduce((rank - turn) % size, result))
        for turn in range(1, size)
    ]
    return finish(shape, rank, "pairwise", with_first([Copy(result, mine[rank])], rounds))
