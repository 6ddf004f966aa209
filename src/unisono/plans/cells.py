"""Buffers for proofs: cells, each with one part of a vector or one block, whatever its length.

An atom that is not cut any further is moved as a whole, and all its elements have the same fate. So a
buffer is a row of cells, one per such atom, and a slice is a run of cells. A cell also says from which
point to which it reaches, as formal sums: cells that are neighbours when every atom has one element must be
so for all counts.

Knows nothing of ranks and messages; verify.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.plans.amounts import Amount, Atoms
from unisono.plans.steps import Slice

__all__ = ["Cell", "CellError", "Cells", "Run", "Runs"]


class CellError(ValueError):
    """Cells do not fit a slice; the text says why."""


class Cell(NamedTuple):
    """One atom in a buffer: where it starts, what it is, and what it holds."""

    at: int
    atom: int
    expression: int
    position: int


@dataclass(frozen=True, slots=True)
class Run:
    """A slice in the atoms that all ranks share: its ends as formal sums, and the cells between them."""

    start: int
    stop: int
    first: int
    last: int


class Runs:
    """Slices of many plans, in common atoms.

    Raises:
        ValueError: plans cut an atom in different ways.
    """

    def __init__(self, slices: Iterable[Slice[Amount]], others: Iterable[Amount]) -> None:
        self.atoms = Atoms()
        self._adopted: dict[tuple[int, Atoms | None], Amount] = {}
        self._runs: dict[tuple[Any, ...], Run] = {}
        # First all of them: an atom may be cut further by a later one.
        for slice_ in slices:
            self._adopt(slice_.start)
            self._adopt(slice_.stop)
        for amount in others:
            self._adopt(amount)

    def of(self, slice_: Slice[Amount]) -> Run:
        """The cells of a slice.

        Raises:
            CellError: it ends before it starts, for some counts.
        """
        start, stop = self._adopt(slice_.start), self._adopt(slice_.stop)
        key = (start.terms, stop.terms)
        if key not in self._runs:
            if not start <= stop:
                raise CellError(f"{slice_} may end before it starts")
            self._runs[key] = Run(start.flat, stop.flat, start.units, stop.units)
        return self._runs[key]

    def flat(self, amount: Amount) -> int:
        """An amount in common atoms that are not cut any further."""
        return self._adopt(amount).flat

    def is_at_most(self, one: int, other: int) -> bool:
        """Whether a sum is at most another for all counts."""
        return Amount(one, self.atoms) <= Amount(other, self.atoms)

    def text(self, terms: int) -> str:
        """A sum in words."""
        return str(Amount(terms, self.atoms))

    def sequence(self, amounts: Iterable[Amount]) -> list[int]:
        """The atoms of a row of amounts, in the order in which they lie in memory."""
        return [atom for amount in amounts for atom in self.atoms.sequence(self._adopt(amount))]

    def _adopt(self, amount: Amount) -> Amount:
        key = (amount.terms, amount.atoms)
        if key not in self._adopted:
            self._adopted[key] = self.atoms.adopt(amount)
        return self._adopted[key]


class Cells:
    """A buffer."""

    def __init__(self, runs: Runs, length: int) -> None:
        self._runs = runs
        self.row: list[Cell | None] = [None] * length

    def fill(self, atoms: Sequence[int], expression: int) -> None:
        """Set all of it to one rank's contribution: these atoms, from position 0 on."""
        at = 0
        for position, atom in enumerate(atoms):
            self.row[position] = Cell(at, atom, expression, position)
            at += atom

    def read(self, run: Run) -> list[Cell]:
        """The cells of a slice.

        Raises:
            CellError: they were not written as the atoms that the slice holds, or not at all.
        """
        cells = self.row[run.first : run.last]
        found, at = [], run.start
        for place, cell in enumerate(cells, run.first):
            if cell is None:
                raise CellError(f"cell {place} was never set")
            if cell.at != at:
                raise CellError(f"cell {place} was set from {self._runs.text(cell.at)} on")
            at += cell.atom
            found.append(cell)
        if at != run.stop:
            raise CellError(f"{self._runs.text(at - run.start)} is there")
        return found

    def write(self, run: Run, cells: Sequence[Cell]) -> None:
        """Put cells into a slice, one after the other.

        Raises:
            CellError: for some counts they would not fill it, or would overwrite a neighbour.
        """
        at = run.start
        for place, cell in enumerate(cells, run.first):
            self.row[place] = cell._replace(at=at)
            at += cell.atom
        if at != run.stop or len(cells) != run.last - run.first:
            raise CellError(f"{self._runs.text(at - run.start)} into {self._runs.text(run.stop - run.start)}")
        before = next((cell for cell in reversed(self.row[: run.first]) if cell is not None), None)
        after = next((cell for cell in self.row[run.last :] if cell is not None), None)
        if before is not None and not self._runs.is_at_most(before.at + before.atom, run.start):
            raise CellError("it may overwrite the end of what is before it")
        if after is not None and not self._runs.is_at_most(run.stop, after.at):
            raise CellError("it may overwrite the begin of what is after it")
