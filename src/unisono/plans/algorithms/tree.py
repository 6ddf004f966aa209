"""Binomial tree: log2(n) rounds from a root to all ranks, or from all ranks to a root.

Every message carries everything that a subtree has or needs, so trees are for small messages. Reductions
follow the canonical tree whatever the root: a block of ranks is represented by the root if it contains it,
otherwise by its lowest rank.
"""

from __future__ import annotations

from itertools import pairwise

from unisono.plans.algorithms.canonical import levels, merge_of
from unisono.plans.amounts import blocks
from unisono.plans.layout import TOKEN, Region, Rounds, finish, whole, with_first, with_last
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Send, Shape, Slice, Step

__all__ = ["all_reduce", "barrier", "broadcast", "gather", "reduce", "scatter", "token_down", "token_up"]


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Reduce to rank 0 and broadcast from there."""
    data = whole(Buf.OUT, shape.counts[0])
    rounds = [
        *_reduce_rounds(data, data, shape.size, rank, 0),
        *_broadcast_rounds(data, shape.size, rank, 0),
    ]
    return finish(shape, rank, "tree", rounds)


def broadcast(shape: Shape, rank: int) -> Plan:
    """Double the number of ranks that have the data in every round."""
    rounds = _broadcast_rounds(whole(Buf.OUT, shape.counts[0]), shape.size, rank, shape.root)
    return finish(shape, rank, "tree", rounds)


def reduce(shape: Shape, rank: int) -> Plan:
    """Halve the number of partial results in every round, in the canonical order, ending at the root."""
    count, root = shape.counts[0], shape.root
    if rank == root:
        data = whole(Buf.OUT, count)
        return finish(shape, rank, "tree", _reduce_rounds(data, data, shape.size, rank, root))
    rounds = _reduce_rounds(whole(Buf.IN, count), whole(Buf.TMP, count), shape.size, rank, root)
    return finish(shape, rank, "tree", rounds)


def barrier(shape: Shape, rank: int) -> Plan:
    """Tokens up to rank 0, then down to all ranks."""
    rounds = [*token_up(shape.size, rank), *token_down(shape.size, rank)]
    return finish(shape, rank, "tree", rounds)


def token_up(size: int, rank: int) -> Rounds:
    """Tokens by which rank 0 knows that all ranks have arrived."""
    return [
        [Recv(step.peer, TOKEN) if isinstance(step, RecvReduce) else step for step in steps]
        for steps in _reduce_rounds(TOKEN, TOKEN, size, rank, 0)
    ]


def token_down(size: int, rank: int) -> Rounds:
    """Tokens from rank 0 that release all ranks."""
    return _broadcast_rounds(TOKEN, size, rank, 0)


def _reduce_rounds(own: Region, sum_: Region, size: int, rank: int, root: int) -> list[list[Step]]:
    """Merge level by level; `own` is copied to `sum_` before anything is added."""

    def representative(lo: int, hi: int) -> int:
        return root if lo <= root < hi else lo

    rounds: list[list[Step]] = []
    held = own
    for level in range(levels(size)):
        steps: list[Step] = []
        if (merge := merge_of(rank, size, level)) is not None:
            left, right = representative(merge.lo, merge.mid), representative(merge.mid, merge.hi)
            src, dst = (left, right) if merge.mid <= root < merge.hi else (right, left)
            if rank == src:
                steps = [Send(dst, held)]
            elif rank == dst:
                steps = [Copy(sum_, own)] if held != sum_ else []
                steps.append(RecvReduce(src, sum_, left=src == left))
                held = sum_
        rounds.append(steps)
    return rounds


def _broadcast_rounds(data: Region, size: int, rank: int, root: int) -> list[list[Step]]:
    """Send the data over distances n/2, n/4, ... 1, counted from the root."""
    position = (rank - root) % size
    rounds: list[list[Step]] = []
    for level in reversed(range(levels(size))):
        distance = 1 << level
        if position % (2 * distance) == 0 and position + distance < size:
            rounds.append([Send((rank + distance) % size, data)])
        elif position % (2 * distance) == distance:
            rounds.append([Recv((rank - distance) % size, data)])
        else:
            rounds.append([])
    return rounds


def gather(shape: Shape, rank: int) -> Plan:
    """Collect the blocks of whole subtrees on the way to the root."""
    position = _TreePosition(shape, rank, own=Buf.IN, all_=Buf.OUT)
    rounds: list[list[Step]] = []
    for level in range(levels(shape.size)):
        distance = 1 << level
        if position.index % (2 * distance) == distance:
            peer = (rank - distance) % shape.size
            rounds.append([Send(peer, piece) for piece in position.subtree(position.index)])
        elif position.index % (2 * distance) == 0 and position.index + distance < shape.size:
            peer = (rank + distance) % shape.size
            rounds.append([Recv(peer, piece) for piece in position.subtree(position.index + distance)])
        else:
            rounds.append([])
    own = [] if position.is_leaf else [Copy(position.own_block, whole(Buf.IN, shape.counts[rank]))]
    return finish(shape, rank, "tree", with_first(own, rounds))


def scatter(shape: Shape, rank: int) -> Plan:
    """Send the blocks of whole subtrees down: a gather in reverse."""
    position = _TreePosition(shape, rank, own=Buf.OUT, all_=Buf.IN)
    rounds: list[list[Step]] = []
    for level in reversed(range(levels(shape.size))):
        distance = 1 << level
        if position.index % (2 * distance) == 0 and position.index + distance < shape.size:
            peer = (rank + distance) % shape.size
            rounds.append([Send(peer, piece) for piece in position.subtree(position.index + distance)])
        elif position.index % (2 * distance) == distance:
            peer = (rank - distance) % shape.size
            rounds.append([Recv(peer, piece) for piece in position.subtree(position.index)])
        else:
            rounds.append([])
    own = [] if position.is_leaf else [Copy(whole(Buf.OUT, shape.counts[rank]), position.own_block)]
    return finish(shape, rank, "tree", with_last(rounds, own))


class _TreePosition:
    """A rank's position in the tree of a gather or scatter, and where it keeps the blocks of a subtree.

    Positions count from the root. The root keeps blocks in the user's buffer, in rank order; other ranks keep
    those of their subtree in `tmp`, in the order of positions; a leaf needs only its own block.
    """

    def __init__(self, shape: Shape, rank: int, own: Buf, all_: Buf) -> None:
        self.size, self.root = shape.size, shape.root
        self.index = (rank - shape.root) % self.size
        self.by_rank = blocks(shape.counts)
        self.by_place = blocks(shape.counts[self.rank_at(index)] for index in range(self.size))
        self.is_leaf = self.index != 0 and self._span(self.index) == 1
        self.buf = own if self.is_leaf else all_ if self.index == 0 else Buf.TMP
        self.own_block = self._slice(self.index, self.index + 1)

    def rank_at(self, index: int) -> int:
        return (self.root + index) % self.size

    def subtree(self, index: int) -> list[Region]:
        """Return where this rank keeps the blocks of the subtree at `index`: its own, or a child's.

        Two slices if the root is one end and the subtree wraps around the last rank.
        """
        stop = index + self._span(index)
        wrap = self.size - self.root
        with_root = index & (index - 1) == 0
        cuts = [index, wrap, stop] if with_root and index < wrap < stop else [index, stop]
        return [self._slice(start, end) for start, end in pairwise(cuts)]

    def _span(self, index: int) -> int:
        return min(index & -index, self.size - index) if index else self.size

    def _slice(self, start: int, stop: int) -> Region:
        count = self.by_place[stop] - self.by_place[start]
        at_root = self.index == 0
        first = (
            self.by_rank[self.rank_at(start)] if at_root else self.by_place[start] - self.by_place[self.index]
        )
        return Slice(self.buf, first, first + count)
