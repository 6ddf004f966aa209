"""Symbols for proofs: which contributions an element was combined from, and how.

An *expression* is a number that represents a contribution (expression r is rank r's) or op(left, right) of
two others; equal trees have equal numbers. A *value* is an expression and a position in its vector, packed
into a 64-bit integer: a buffer is an array of integers, and a step is a few array operations.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNSET", "Expressions", "Values", "expression_of", "leaf", "position_of", "unset"]

Values: TypeAlias = NDArray[np.int64]

UNSET: Final = -1
_POSITION_BITS: Final = 40
_POSITION_MASK: Final = (1 << _POSITION_BITS) - 1


def unset(count: int) -> Values:
    """Return an unwritten buffer."""
    return np.full(count, UNSET, np.int64)


def leaf(rank: int, count: int) -> Values:
    """Return a rank's contribution, position by position."""
    return (rank << _POSITION_BITS) + np.arange(count, dtype=np.int64)


def expression_of(values: Values) -> Values:
    """Return the expressions of set values."""
    return values >> _POSITION_BITS


def position_of(values: Values) -> Values:
    """Return the positions of set values."""
    return values & _POSITION_MASK


class Expressions:
    """All expressions that were made so far."""

    def __init__(self, size: int) -> None:
        self._pairs: dict[tuple[int, int], int] = {}
        self._parts: list[tuple[int, int]] = [(-1, -1)] * size
        # Which ranks an expression contains, one bit each; and whether they are in ascending order.
        self.contributors = [1 << rank for rank in range(size)]
        self.is_ascending = [True] * size

    def pair(self, left: int, right: int) -> int:
        """Return op(left, right).

        Raises:
            ValueError: a contribution is on both sides.
        """
        known = self._pairs.get((left, right))
        if known is not None:
            return known
        ours, theirs = self.contributors[left], self.contributors[right]
        if ours & theirs:
            raise ValueError(f"{self.text(left)} and {self.text(right)} have a contribution in common")
        self._parts.append((left, right))
        self.contributors.append(ours | theirs)
        in_order = ours.bit_length() <= (theirs & -theirs).bit_length() - 1
        self.is_ascending.append(self.is_ascending[left] and self.is_ascending[right] and in_order)
        self._pairs[left, right] = len(self._parts) - 1
        return len(self._parts) - 1

    def combine(self, left: Values, right: Values) -> Values:
        """Return op(left, right) element by element.

        Raises:
            ValueError: positions differ, or a contribution is on both sides.
        """
        positions = position_of(left)
        if (positions != position_of(right)).any():
            raise ValueError("elements of different positions would be combined")
        lefts, rights = expression_of(left), expression_of(right)
        if (lefts == lefts[0]).all() and (rights == rights[0]).all():
            return (self.pair(int(lefts[0]), int(rights[0])) << _POSITION_BITS) + positions
        pairs, which = np.unique(np.stack([lefts, rights]), axis=1, return_inverse=True)
        made = np.array([self.pair(int(a), int(b)) for a, b in pairs.T], np.int64)
        return (made[which.reshape(-1)] << _POSITION_BITS) + positions

    def text(self, expression: int) -> str:
        """Write an expression with brackets: "((0 1) 2)"."""
        left, right = self._parts[expression]
        return str(expression) if left < 0 else f"({self.text(left)} {self.text(right)})"
