"""Recursive doubling and halving: partners at distances 1, 2, 4, ...; any number of ranks.

Doubling exchanges whole vectors in ceil(log2(n)) rounds, for small messages; halving-doubling exchanges
halves, then quarters, and so on, and back: as few bytes as a ring in 2 log2(n) rounds.

All of them follow the canonical tree. A size that is not a power of two is a sum of powers of two: these
blocks of ranks each work alone, and a smaller block hands its result to the next larger one ("binary
blocks"), exactly as the canonical tree combines them.
"""

from __future__ import annotations

from unisono.plans.algorithms.canonical import blocks, levels, merge_of
from unisono.plans.amounts import Amount, even
from unisono.plans.amounts import blocks as blocks_of
from unisono.plans.layout import Region, chunks, finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Shape, Slice, Step

__all__ = ["doubling_all_reduce", "halving_doubling_all_reduce", "halving_reduce_scatter"]


def doubling_all_reduce(shape: Shape, rank: int) -> Plan:
    """Exchange whole vectors with the neighbouring block until one block has all ranks.

    Both sides compute op(lower, higher), so all have the same bits. A shorter last block has fewer ranks than
    its neighbour: each of them then sends to several.
    """
    count = shape.counts[0]
    data, arrived = whole(Buf.OUT, count), whole(Buf.TMP, count)
    rounds: list[list[Step]] = []
    for level in range(levels(shape.size)):
        merge = merge_of(rank, shape.size, level)
        if merge is None:
            rounds.append([])
            continue
        lo, mid, hi = merge
        width = hi - mid
        on_right = rank >= mid
        if on_right:
            source, targets = lo + rank - mid, list(range(lo + rank - mid, mid, width))
        else:
            source = mid + (rank - lo) % width
            targets = [source] if rank - lo < width else []
        steps: list[Step] = [Send(target, data) for target in targets]
        rounds.append([*steps, Recv(source, arrived), Reduce(data, arrived, left=on_right)])
    return finish(shape, rank, "doubling", rounds)


def halving_doubling_all_reduce(shape: Shape, rank: int) -> Plan:
    """In every round halve the range that a rank reduces, over twice as many ranks; then collect."""
    size = shape.size
    width = blocks(size)[0][1]
    grid = _Grid(Buf.OUT, even(shape.counts[0], width), size, rank)
    rounds = [*grid.halving(), *grid.hand_back(), *grid.doubling()]
    return finish(shape, rank, "halving_doubling", rounds)


def halving_reduce_scatter(shape: Shape, rank: int) -> Plan:
    """Halve as above, on a copy whose chunks are reordered so that each rank ends with its own chunk.

    Ranks beyond the largest power of two get theirs from a partner in a last message.
    """
    size, counts = shape.size, shape.counts
    width = blocks(size)[0][1]
    mine = chunks(Buf.IN, blocks_of(counts))
    # Each piece of the copy ends at one rank q: chunk q, followed by that of rank q + width, if any.
    order = [chunk for piece in range(width) for chunk in range(_reversed(piece, width), size, width)]
    starts = blocks_of(counts[chunk] for chunk in order)
    piece_of = {chunk: Slice(Buf.TMP, starts[i], starts[i + 1]) for i, chunk in enumerate(order)}
    points = (*(piece_of[_reversed(piece, width)].start for piece in range(width)), starts[-1])
    result = whole(Buf.OUT, counts[rank])
    last: list[Step]
    if rank >= width:
        last = [Recv(rank - width, result)]
    else:
        last = [Send(rank + width, piece_of[rank + width])] if rank + width < size else []
        last.append(Copy(result, piece_of[rank]))
    grid = _Grid(Buf.TMP, points, size, rank)
    copies = [Copy(piece_of[chunk], mine[chunk]) for chunk in range(size)]
    return finish(shape, rank, "halving", with_first(copies, [*grid.halving(), last]))


class _Grid:
    """Ranks in blocks of descending powers of two, over a buffer of as many pieces as the first has ranks.

    After d halvings a block's member is responsible for one of 2^d ranges, given by its last d bits reversed.
    So member i of a block has what members i, i + width, i + 2 width, ... of a larger block have between
    them.
    """

    def __init__(self, buf: Buf, points: tuple[Amount, ...], size: int, rank: int) -> None:
        self.buf, self.points, self.rank = buf, points, rank
        self.blocks = blocks(size)
        self.block = next(i for i, (start, width) in enumerate(self.blocks) if rank < start + width)
        self.start, self.width = self.blocks[self.block]
        self.member = rank - self.start
        self.depth = levels(self.width)
        self.depth_max = levels(self.blocks[0][1])

    def halving(self) -> list[list[Step]]:
        """Reduce inside the block, then into the next larger one, until the first has the whole result."""
        rounds: list[list[Step]] = [[] for _ in range(self.depth_max + (len(self.blocks) > 1))]
        for level in range(self.depth):
            partner = self.member ^ (1 << level)
            keep, give = (self._range(member, level + 1) for member in (self.member, partner))
            peer = self.start + partner
            rounds[level] = [Send(peer, give), RecvReduce(peer, keep, left=partner < self.member)]
        if self.block + 1 < len(self.blocks):
            start, width = self.blocks[self.block + 1]
            range_ = self._range(self.member, self.depth)
            rounds[self.depth].append(RecvReduce(start + self.member % width, range_))
        if self.block > 0:
            start, width = self.blocks[self.block - 1]
            depth = levels(width)
            rounds[depth] += [
                Send(start + other, self._range(other, depth))
                for other in range(self.member, width, self.width)
            ]
        return rounds

    def hand_back(self) -> list[list[Step]]:
        """Send the first block's result to every other block, if there is any."""
        if len(self.blocks) == 1:
            return []
        if self.block == 0:
            own = self._range(self.member, self.depth)
            return [[Send(start + self.member % width, own) for start, width in self.blocks[1:]]]
        owners = range(self.member, self.blocks[0][1], self.width)
        return [[Recv(owner, self._range(owner, self.depth_max)) for owner in owners]]

    def doubling(self) -> list[list[Step]]:
        """Collect the ranges inside the block: the halving in reverse."""
        rounds: list[list[Step]] = []
        for level in reversed(range(self.depth)):
            partner = self.member ^ (1 << level)
            have, lack = (self._range(member, level + 1) for member in (self.member, partner))
            rounds.append([Send(self.start + partner, have), Recv(self.start + partner, lack)])
        return [*rounds, *([] for _ in range(self.depth_max - self.depth))]

    def _range(self, member: int, depth: int) -> Region:
        parts = 1 << depth
        part, pieces = _reversed(member % parts, parts), (len(self.points) - 1) >> depth
        return Slice(self.buf, self.points[part * pieces], self.points[(part + 1) * pieces])


def _reversed(number: int, parts: int) -> int:
    """Reverse the bits of a number below `parts`, a power of two."""
    bits = parts.bit_length() - 1
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
