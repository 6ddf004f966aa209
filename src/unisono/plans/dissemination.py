"""Dissemination (Bruck): distances 1, 2, 4, ... round a circle; ceil(log2(n)) rounds for any number of ranks.

Knows circles. What a rank has after k rounds came from the 2^k ranks that follow it (before it, for
all_to_all). For small messages and for barriers.
"""

from __future__ import annotations

from unisono.plans.canonical import levels
from unisono.plans.layout import TOKEN, chunks, finish, offsets, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, Send, Slice, Step

__all__ = ["all_gather", "all_to_all", "barrier"]


def all_gather(problem: Problem, rank: int) -> Plan:
    """Send all blocks that one has to the rank 2^k before; they lie where they belong from the start.

    A run of blocks that goes past the last rank and on from rank 0 travels as two messages.
    """
    size = problem.size
    starts = offsets(problem.counts)

    def run(first: int, length: int) -> list[Slice]:
        stop = min(first + length, size)
        wrapped = Slice(Buf.OUT, 0, starts[first + length - stop])
        return [Slice(Buf.OUT, starts[first], starts[stop]), wrapped]

    own = whole(Buf.IN, problem.counts[rank])
    rounds: list[list[Step]] = []
    for level in range(levels(size)):
        distance = 1 << level
        length = min(distance, size - distance)
        before, after = (rank - distance) % size, (rank + distance) % size
        have = run(rank, length) if level else [own]
        lack = run(after, length) if level else [Slice(Buf.OUT, starts[after], starts[after + 1])]
        rounds.append([*(Send(before, piece) for piece in have), *(Recv(after, piece) for piece in lack)])
    copy = Copy(Slice(Buf.OUT, starts[rank], starts[rank + 1]), own)
    return finish(problem, rank, "dissemination", with_first([copy], rounds))


def all_to_all(problem: Problem, rank: int) -> Plan:
    """Let blocks hop by the bits of their distance: log2(n) rounds of n/2 blocks each, all of one length.

    tmp: the blocks by distance to go, then room to pack what leaves and what arrives.
    """
    size, count = problem.size, problem.counts[0]
    row, column = (chunks(buf, offsets([count] * size)) for buf in (Buf.IN, Buf.OUT))

    def block(place: int) -> Slice:
        return Slice(Buf.TMP, place * count, (place + 1) * count)

    rounds: list[list[Step]] = []
    for level in range(levels(size)):
        distance = 1 << level
        moving = [place for place in range(size) if place & distance]
        leaves, arrives = size, size + size // 2
        rounds.append(
            [
                *(Copy(block(leaves + i), block(place)) for i, place in enumerate(moving)),
                Send(
                    (rank + distance) % size, Slice(Buf.TMP, leaves * count, (leaves + len(moving)) * count)
                ),
                Recv(
                    (rank - distance) % size, Slice(Buf.TMP, arrives * count, (arrives + len(moving)) * count)
                ),
                *(Copy(block(place), block(arrives + i)) for i, place in enumerate(moving)),
            ]
        )
    turned = [Copy(block(place), row[(rank + place) % size]) for place in range(size)]
    unturned = [Copy(column[(rank - place) % size], block(place)) for place in range(size)]
    return finish(problem, rank, "dissemination", [turned, *rounds, unturned])


def barrier(problem: Problem, rank: int) -> Plan:
    """Hear, directly or not, from the 2^k ranks before after k rounds."""
    size = problem.size
    arrived = Slice(Buf.TMP, 1, 2)
    rounds = [
        (
            Send((rank + (1 << level)) % size, TOKEN),
            Recv((rank - (1 << level)) % size, arrived),
            # What is sent next must wait for all that arrived before.
            Copy(TOKEN, arrived),
        )
        for level in range(levels(size))
    ]
    return finish(problem, rank, "dissemination", rounds)
