"""Symbols for proofs: which contributions an element was combined from, and how.

An *expression* is a number that represents a contribution (expression r is rank r's) or op(left, right) of
two others; equal trees have equal numbers.
"""

from __future__ import annotations

__all__ = ["Expressions"]


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

    def text(self, expression: int) -> str:
        """Write an expression with brackets: "((0 1) 2)"."""
        left, right = self._parts[expression]
        return str(expression) if left < 0 else f"({self.text(left)} {self.text(right)})"
