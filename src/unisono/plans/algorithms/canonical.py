"""The one tree over ranks that every reproducible reduction follows.

T(lo, hi) is rank lo alone if hi = lo + 1, otherwise op(T(lo, mid), T(mid, hi)), where mid - lo is the largest
power of two smaller than hi - lo: what a binomial tree on ranks lo..hi-1 computes. The tree depends on
neither count, chunk nor algorithm, so all algorithms that follow it give the same bits; and it keeps the rank
order, so operations that do not commute are right. Seen from below: at level k, aligned blocks of 2^k ranks
are combined in pairs; the last block may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.plans.amounts import Amount
from unisono.plans.layout import Region
from unisono.plans.steps import Reduce

__all__ = ["Merge", "blocks", "fold", "levels", "merge_of"]


class Merge(NamedTuple):
    """A node of the tree: ranks [lo, mid) are the left operand, ranks [mid, hi) the right one."""

    lo: int
    mid: int
    hi: int


def levels(size: int) -> int:
    """Return the depth of the tree: ceil(log2(size))."""
    return (size - 1).bit_length()


def merge_of(rank: int, size: int, level: int) -> Merge | None:
    """Return the node that `rank` takes part in at a level; None if its block has no neighbour there."""
    width = 1 << level
    lo = rank // (2 * width) * (2 * width)
    mid, hi = lo + width, min(lo + 2 * width, size)
    return Merge(lo, mid, hi) if mid < size else None


def blocks(size: int) -> list[tuple[int, int]]:
    """Cut the ranks into (start, width) with widths the powers of two in `size`, descending.

    Each is a full subtree, and T combines them from the end: T = op(first, op(second, op(third, ...))).
    """
    found, start = [], 0
    while start < size:
        width = 1 << ((size - start).bit_length() - 1)
        found.append((start, width))
        start += width
    return found


def fold(slots: Sequence[Region], keep: int) -> list[Reduce[Amount]]:
    """Reduce one contribution per rank, in `slots`, locally; the result is in `slots[keep]`.

    The other slots are overwritten.
    """

    def slot_of(lo: int, hi: int) -> Region:
        return slots[keep if lo <= keep < hi else lo]

    steps = []
    for level in range(levels(len(slots))):
        for rank in range(0, len(slots), 2 << level):
            if (merge := merge_of(rank, len(slots), level)) is not None:
                left, right = slot_of(merge.lo, merge.mid), slot_of(merge.mid, merge.hi)
                kept_right = merge.mid <= keep < merge.hi
                steps.append(Reduce(right, left, left=True) if kept_right else Reduce(left, right))
    return steps
