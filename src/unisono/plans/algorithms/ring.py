"""Ring: everyone sends to the right neighbour and receives from the left, all links busy all the time.

Knows the next and the previous rank. The fewest bytes possible, and n - 1 rounds per pass: for large
messages. Each chunk's sum starts elsewhere on the ring, so the order of operands depends on the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plans.layout import Rounds, chunks, even_bounds, finish, offsets, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Send, Slice, Step

__all__ = ["all_gather", "all_reduce", "circulate", "reduce_scatter"]


def all_reduce(problem: Problem, rank: int) -> Plan:
    """Reduce-scatter round the ring, then pass the finished chunks round once more, in place."""
    size = problem.size
    part = chunks(Buf.OUT, even_bounds(problem.counts[0], size))
    before, after = (rank - 1) % size, (rank + 1) % size
    reduce_rounds = [
        (
            Send(after, part[(rank - turn) % size]),
            RecvReduce(before, part[(rank - turn - 1) % size], left=True),
        )
        for turn in range(size - 1)
    ]
    return finish(problem, rank, "ring", [*reduce_rounds, *circulate(part, rank, owned=(rank + 1) % size)])


def all_gather(problem: Problem, rank: int) -> Plan:
    """Pass every block round the ring once."""
    block = chunks(Buf.OUT, offsets(problem.counts))
    own = whole(Buf.IN, problem.counts[rank])
    rounds = circulate(block, rank, owned=rank, first=own)
    return finish(problem, rank, "ring", with_first([Copy(block[rank], own)], rounds))


def reduce_scatter(problem: Problem, rank: int) -> Plan:
    """Pass partial sums round the ring; the one of chunk r reaches rank r last."""
    size, counts = problem.size, problem.counts
    mine = chunks(Buf.IN, offsets(counts))
    before, after = (rank - 1) % size, (rank + 1) % size
    width = max(counts)
    rounds: list[tuple[Step, ...]] = []
    held = mine[before]
    for turn in range(size - 1):
        chunk = (rank - 2 - turn) % size
        # Two slots in turn: one is sent on while the other fills.
        start = turn % 2 * width
        slot = Slice(Buf.TMP, start, start + counts[chunk])
        target = whole(Buf.OUT, counts[rank]) if chunk == rank else slot
        rounds.append((Copy(target, mine[chunk]), Send(after, held), RecvReduce(before, target, left=True)))
        held = target
    if size == 1:
        rounds = [(Copy(whole(Buf.OUT, counts[rank]), mine[rank]),)]
    return finish(problem, rank, "ring", rounds)


def circulate(block: Sequence[Slice], rank: int, owned: int, first: Slice | None = None) -> Rounds:
    """Pass blocks on until everyone has all; `owned` is the one that this rank begins with.

    The rank before begins with the block before. `first` says where the own block lies if not in its place.
    """
    size = len(block)
    before, after = (rank - 1) % size, (rank + 1) % size
    held = [first or block[owned], *(block[(owned - turn) % size] for turn in range(1, size))]
    return [(Send(after, held[turn]), Recv(before, held[turn + 1])) for turn in range(size - 1)]
