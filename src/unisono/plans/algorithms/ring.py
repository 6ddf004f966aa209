"""Ring: every rank sends to its right neighbour and receives from the left; all links are always busy.

The fewest bytes possible, and n - 1 rounds per pass: for large messages. Each chunk's sum starts at another
rank, so the order of operands depends on the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plans.amounts import blocks, even, longest, slots
from unisono.plans.layout import Region, Rounds, chunks, finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Send, Shape, Slice, Step

__all__ = ["all_gather", "all_reduce", "circulate", "reduce_scatter"]


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Reduce-scatter around the ring, then forward the finished chunks around it, in place."""
    size = shape.size
    part = chunks(Buf.OUT, even(shape.counts[0], size))
    before, after = (rank - 1) % size, (rank + 1) % size
    reduce_rounds = [
        (
            Send(after, part[(rank - turn) % size]),
            RecvReduce(before, part[(rank - turn - 1) % size], left=True),
        )
        for turn in range(size - 1)
    ]
    return finish(shape, rank, "ring", [*reduce_rounds, *circulate(part, rank, owned=(rank + 1) % size)])


def all_gather(shape: Shape, rank: int) -> Plan:
    """Forward every block around the ring once."""
    block = chunks(Buf.OUT, blocks(shape.counts))
    own = whole(Buf.IN, shape.counts[rank])
    rounds = circulate(block, rank, owned=rank, first=own)
    return finish(shape, rank, "ring", with_first([Copy(block[rank], own)], rounds))


def reduce_scatter(shape: Shape, rank: int) -> Plan:
    """Forward partial sums around the ring; that of chunk r reaches rank r last."""
    size, counts = shape.size, shape.counts
    mine = chunks(Buf.IN, blocks(counts))
    before, after = (rank - 1) % size, (rank + 1) % size
    starts = slots(1, longest(counts))
    rounds: list[tuple[Step, ...]] = []
    held = mine[before]
    for turn in range(size - 1):
        chunk = (rank - 2 - turn) % size
        # Two slots in turn: one is forwarded while the other is filled.
        start = starts[turn % 2]
        slot = Slice(Buf.TMP, start, start + counts[chunk])
        target = whole(Buf.OUT, counts[rank]) if chunk == rank else slot
        rounds.append((Copy(target, mine[chunk]), Send(after, held), RecvReduce(before, target, left=True)))
        held = target
    if size == 1:
        rounds = [(Copy(whole(Buf.OUT, counts[rank]), mine[rank]),)]
    return finish(shape, rank, "ring", rounds)


def circulate(block: Sequence[Region], rank: int, owned: int, first: Region | None = None) -> Rounds:
    """Forward blocks until every rank has all; `owned` is the block that this rank starts with.

    The previous rank starts with the previous block. `first` is the own block if it is not in its final
    position.
    """
    size = len(block)
    before, after = (rank - 1) % size, (rank + 1) % size
    held = [first or block[owned], *(block[(owned - turn) % size] for turn in range(1, size))]
    return [(Send(after, held[turn]), Recv(before, held[turn + 1])) for turn in range(size - 1)]
