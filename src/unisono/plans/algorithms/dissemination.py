"""Dissemination (Bruck): distances 1, 2, 4, ... on a circle of ranks; ceil(log2(n)) rounds for any size.

After k rounds a rank has the data of the 2^k ranks that follow it (that precede it, for all_to_all). For
small messages and for barriers.
"""

from __future__ import annotations

from itertools import accumulate

from unisono.plans.algorithms.canonical import levels
from unisono.plans.amounts import ONE, ZERO, blocks, slots
from unisono.plans.layout import TOKEN, Region, finish, whole, with_first, with_last
from unisono.plans.steps import Buf, Copy, Plan, Recv, Send, Shape, Slice, Step

__all__ = ["all_gather", "all_to_all", "barrier"]


def all_gather(shape: Shape, rank: int) -> Plan:
    """Send all blocks at hand to the rank 2^k before; blocks are in their final position from the start.

    A run of blocks that wraps around from the last rank to rank 0 is two messages.
    """
    size = shape.size
    starts = blocks(shape.counts)

    def run(first: int, length: int) -> list[Region]:
        stop = min(first + length, size)
        wrapped = Slice(Buf.OUT, ZERO, starts[first + length - stop])
        return [Slice(Buf.OUT, starts[first], starts[stop]), *([wrapped] if first + length > size else [])]

    own = whole(Buf.IN, shape.counts[rank])
    rounds: list[list[Step]] = []
    for level in range(levels(size)):
        distance = 1 << level
        length = min(distance, size - distance)
        before, after = (rank - distance) % size, (rank + distance) % size
        have = run(rank, length) if level else [own]
        lack = run(after, length) if level else [Slice(Buf.OUT, starts[after], starts[after + 1])]
        rounds.append([*(Send(before, piece) for piece in have), *(Recv(after, piece) for piece in lack)])
    copy = Copy(Slice(Buf.OUT, starts[rank], starts[rank + 1]), own)
    return finish(shape, rank, "dissemination", with_first([copy], rounds))


def all_to_all(shape: Shape, rank: int) -> Plan:
    """Move blocks by the bits of their distance: log2(n) rounds of n/2 blocks each; all have the same length.

    tmp: the blocks by remaining distance, then space to pack outgoing and incoming blocks.
    """
    size, count = shape.size, shape.counts[0]

    cell = slots(2 * size, count)

    def run(buf: Buf, first: int, stop: int) -> Region:
        return Slice(buf, cell[first], cell[stop])

    leaves, arrives = size, size + size // 2
    rounds: list[list[Step]] = []
    for level in range(levels(size)):
        distance = 1 << level
        # Blocks whose distance has this bit are in runs of 2^level.
        runs = [(first, min(first + distance, size)) for first in range(distance, size, 2 * distance)]
        packed = [0, *accumulate(stop - first for first, stop in runs)]
        pack: list[Step] = []
        unpack: list[Step] = []
        for (first, stop), begin, end in zip(runs, packed, packed[1:], strict=False):
            pack.append(Copy(run(Buf.TMP, leaves + begin, leaves + end), run(Buf.TMP, first, stop)))
            unpack.append(Copy(run(Buf.TMP, first, stop), run(Buf.TMP, arrives + begin, arrives + end)))
        send = Send((rank + distance) % size, run(Buf.TMP, leaves, leaves + packed[-1]))
        recv = Recv((rank - distance) % size, run(Buf.TMP, arrives, arrives + packed[-1]))
        rounds.append([*pack, send, recv, *unpack])
    turn = [Copy(run(Buf.TMP, 0, size - rank), run(Buf.IN, rank, size))]
    if rank > 0:
        turn.append(Copy(run(Buf.TMP, size - rank, size), run(Buf.IN, 0, rank)))
    sources = ((rank - distance) % size for distance in range(size))
    turn_back = [
        Copy(run(Buf.OUT, source, source + 1), run(Buf.TMP, distance, distance + 1))
        for distance, source in enumerate(sources)
    ]
    return finish(shape, rank, "dissemination", with_last(with_first(turn, rounds), turn_back))


def barrier(shape: Shape, rank: int) -> Plan:
    """After k rounds, 2^k ranks before this one are known to have arrived."""
    size = shape.size
    arrived = Slice(Buf.TMP, ONE, ONE + ONE)
    rounds = [
        (
            Send((rank + (1 << level)) % size, TOKEN),
            Recv((rank - (1 << level)) % size, arrived),
            # The next send must wait for everything that arrived before.
            Copy(TOKEN, arrived),
        )
        for level in range(levels(size))
    ]
    return finish(shape, rank, "dissemination", rounds)
