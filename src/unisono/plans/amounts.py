"""Amounts: numbers of elements that are not known yet, as formal sums.

A plan is built once for all counts. Where it would hold a number of elements it holds an *amount*: a sum of
*atoms* with whole coefficients. An atom is one element, one of the problem's counts, the longest of them,
or an even part of another atom. Two amounts are equal only if they are equal for all counts: part 1 and
part 2 of a vector may have the same number of elements today, and are different amounts.

The points at which buffers are cut are amounts, too. Three *cuts* suffice for all algorithms:

    even(whole, parts)   parts whose lengths differ by at most one
    blocks(counts)       blocks one after the other, in the given order
    slots(number, width) cells of one width

`Atoms.values` gives every atom its number when the counts are known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, overload

import numpy as np

__all__ = [
    "ONE",
    "ZERO",
    "Amount",
    "Atoms",
    "Counts",
    "Cut",
    "Kind",
    "Weights",
    "atom_terms",
    "blocks",
    "contains",
    "digits",
    "even",
    "even_bounds",
    "longest",
    "slots",
]

# A formal sum is one integer with a digit of 32 bits per atom: adding and comparing take no loop in Python.
# Coefficients stay below 2^31; they are at most a few times the number of ranks.
_BITS: Final = 32
_DIGIT: Final = (1 << _BITS) - 1


class Kind(IntEnum):
    """What an atom is (native/collective/program.hpp: Cut::Kind)."""

    ONE = 0
    COUNT = 1
    LONGEST = 2
    EVEN = 3


class Cut(NamedTuple):
    """Atoms that are made together: one, or the parts of another atom, numbered from `first` on.

    `of` is the index of a count, or the atom that is cut into `parts`.
    """

    kind: Kind
    of: int
    parts: int
    first: int


class Amount:
    """A formal sum of atoms, with whole coefficients of 0 or more."""

    __slots__ = ("atoms", "terms")

    def __init__(self, terms: int, atoms: Atoms | None) -> None:
        self.terms = terms
        self.atoms = atoms

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.terms + other.terms, self.atoms or other.atoms)

    def __sub__(self, other: Amount) -> Amount:
        """The difference of two points of one cut: the sum between them."""
        atoms = self.atoms or other.atoms
        left, right = self.terms, other.terms
        if not contains(left, right) and atoms is not None:
            left, right = atoms.flat(left), atoms.flat(right)
        if not contains(left, right):
            raise ValueError(f"{self} - {other} is negative for some counts")
        return Amount(left - right, atoms)

    def __mul__(self, times: int) -> Amount:
        return Amount(self.terms * times, self.atoms)

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Amount) and self.flat == other.flat

    def __hash__(self) -> int:
        return hash(self.flat)

    def __le__(self, other: Amount) -> bool:
        """Whether this is at most the other for all counts, as far as sums can show it."""
        atoms = self.atoms or other.atoms
        return contains(other.flat, self.flat) or (atoms is not None and atoms.covers(other.flat, self.flat))

    @property
    def flat(self) -> int:
        """The same sum in atoms that are not cut any further."""
        return self.atoms.flat(self.terms) if self.atoms is not None else self.terms

    @property
    def units(self) -> int:
        """The number of elements if every atom that is not cut any further has one."""
        return self.flat % _DIGIT  # the sum of the digits

    def __str__(self) -> str:
        words = [
            (f"{times} " if times > 1 else "") + (self.atoms.name(atom) if self.atoms else "1")
            for atom, times in digits(self.terms)
        ]
        return " + ".join(words) or "0"

    __repr__ = __str__


ZERO: Final = Amount(0, None)
# The first atom of all: it needs no table.
ONE: Final = Amount(1, None)


class Atoms:
    """The atoms of one plan. They are made as they are needed: of n x n counts a rank needs 2 n."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self._cut_of: list[Cut] = []  # by atom
        self._parts_of: dict[int, Cut] = {}
        self._counts: dict[int, Amount] = {}
        self._replacements: list[tuple[int, int]] = []
        self._longest = -1
        self._adopted: dict[tuple[Atoms | None, int], Amount] = {}  # of other plans
        self._add(Kind.ONE, 0, 1)

    def count(self, index: int) -> Amount:
        """One of the problem's counts."""
        if index not in self._counts:
            self._counts[index] = self._atom(self._add(Kind.COUNT, index, 1))
        return self._counts[index]

    def longest(self) -> Amount:
        """The longest of all counts."""
        if self._longest < 0:
            self._longest = self._add(Kind.LONGEST, 0, 1)
        return self._atom(self._longest)

    def even(self, whole: Amount, parts: int) -> list[Amount]:
        """Cut an atom; an atom is cut in one way only, so that its parts mean the same everywhere."""
        ((atom, times),) = digits(whole.terms)
        cut = self._parts_of.get(atom)
        if cut is None:
            first = self._add(Kind.EVEN, atom, parts)
            cut = self._parts_of[atom] = self.cuts[-1]
            ones = sum(1 << _BITS * i for i in range(first, first + parts))
            self._replacements.append((_BITS * atom, ones - (1 << _BITS * atom)))
        if cut.parts != parts or times != 1:
            raise ValueError(f"{whole} is cut into {cut.parts} parts and into {parts}")
        return [self._atom(cut.first + part) for part in range(parts)]

    def adopt(self, amount: Amount) -> Amount:
        """The same amount in these atoms.

        Raises:
            ValueError: an atom is cut in another way there.
        """
        found = ZERO
        for atom, times in digits(amount.terms):
            key = (amount.atoms, atom)
            if key not in self._adopted:
                self._adopted[key] = self._same(amount.atoms, atom)
            found += self._adopted[key] * times
        return found

    def _same(self, atoms: Atoms | None, atom: int) -> Amount:
        if atoms is None:
            return ONE
        cut = atoms._cut_of[atom]
        match cut.kind:
            case Kind.ONE:
                return ONE
            case Kind.COUNT:
                return self.count(cut.of)
            case Kind.LONGEST:
                return self.longest()
            case Kind.EVEN:
                return self.even(self._same(atoms, cut.of), cut.parts)[atom - cut.first]

    def sequence(self, amount: Amount) -> list[int]:
        """The atoms of one atom, in order, that are not cut any further; each as a sum."""
        ((atom, _),) = digits(amount.terms)
        if atom not in self._parts_of:
            return [amount.terms]
        cut = self._parts_of[atom]
        return [each for i in range(cut.parts) for each in self.sequence(self._atom(cut.first + i))]

    def flat(self, terms: int) -> int:
        """Replace every atom that is cut by the sum of its parts."""
        for shift, instead in self._replacements:  # the parts of an atom come after it
            times = terms >> shift & _DIGIT
            if times:
                terms += times * instead
        return terms

    def covers(self, terms: int, other: int) -> bool:
        """Whether every count that `other` has more often is matched by a longest one in `terms`."""
        if self._longest < 0:
            return False
        lacking, spare = 0, 0
        mine, theirs = dict(digits(terms)), dict(digits(other))
        for atom in mine.keys() | theirs.keys():
            excess = mine.get(atom, 0) - theirs.get(atom, 0)
            if atom == self._longest:
                spare = excess
            elif excess < 0:
                if self._cut_of[atom].kind is not Kind.COUNT:
                    return False
                lacking -= excess
        return lacking <= spare

    def values(self, counts: Sequence[int]) -> list[int]:
        """The number of elements of every atom."""
        found: list[int] = []
        for cut in self.cuts:
            match cut.kind:
                case Kind.ONE:
                    found.append(1)
                case Kind.COUNT:
                    found.append(counts[cut.of])
                case Kind.LONGEST:
                    found.append(max(counts))
                case Kind.EVEN:
                    bounds = even_bounds(found[cut.of], cut.parts)
                    found += [stop - start for start, stop in pairwise(bounds)]
        return found

    def name(self, atom: int) -> str:
        """An atom in words: "count[3]", "longest", "count[0](1/4)"."""
        cut = self._cut_of[atom]
        match cut.kind:
            case Kind.ONE:
                return "1"
            case Kind.COUNT:
                return f"count[{cut.of}]"
            case Kind.LONGEST:
                return "longest"
            case Kind.EVEN:
                return f"{self.name(cut.of)}({atom - cut.first}/{cut.parts})"

    def _add(self, kind: Kind, of: int, parts: int) -> int:
        first = len(self._cut_of)
        self.cuts.append(Cut(kind, of, parts, first))
        self._cut_of += self.cuts[-1:] * parts
        return first

    def _atom(self, atom: int) -> Amount:
        return Amount(atom_terms(atom), self)


class Counts(Sequence[Amount]):
    """A problem's counts, in order; if all are equal, one atom stands for each of them."""

    def __init__(self, length: int, *, are_equal: bool = False) -> None:
        self.atoms = Atoms()
        self._length = length
        self._are_equal = are_equal

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> Amount: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Amount, ...]: ...

    def __getitem__(self, at: int | slice) -> Amount | tuple[Amount, ...]:
        if isinstance(at, slice):
            return tuple(self[index] for index in range(*at.indices(self._length)))
        if not 0 <= at < self._length:
            raise IndexError(at)
        return self.atoms.count(0 if self._are_equal else at)


def even(whole: Amount, parts: int) -> tuple[Amount, ...]:
    """Cut an amount into parts whose lengths differ by at most one; return the points."""
    if parts == 1:
        return ZERO, whole
    assert whole.atoms is not None
    return blocks(whole.atoms.even(whole, parts))


def blocks(counts: Iterable[Amount]) -> tuple[Amount, ...]:
    """Put blocks one after the other; return where each starts, and the end of the last."""
    return (ZERO, *accumulate(counts))


def slots(number: int, width: Amount, start: Amount = ZERO) -> tuple[Amount, ...]:
    """Put cells of one width side by side; return the points."""
    return tuple(start + width * i for i in range(number + 1))


def longest(counts: Sequence[Amount]) -> Amount:
    """The longest of a problem's counts."""
    if len(counts) == 1:
        return counts[0]
    atoms = counts[0].atoms
    assert atoms is not None
    return atoms.longest()


def even_bounds(count: int, parts: int) -> tuple[int, ...]:
    """Cut `count` elements into parts whose lengths differ by at most one; return their bounds."""
    return tuple(count * part // parts for part in range(parts + 1))


def atom_terms(atom: int) -> int:
    """The sum that is one atom."""
    return 1 << _BITS * atom


def digits(terms: int) -> list[tuple[int, int]]:
    """The atoms of a sum, ascending, each with its coefficient."""
    if not terms:
        return []
    first, words = _words(terms)
    return [(atom, times) for atom, times in enumerate(words, first) if times]


class Weights:
    """The number of elements of every atom, with which sums are evaluated."""

    def __init__(self, atoms: Sequence[int]) -> None:
        self._atoms = atoms
        # Coefficients are below 2^31, so that no sum leaves 64 bits.
        self._fits = sum(atoms) < 1 << 32
        self._array = np.array(atoms, np.int64) if self._fits else np.empty(0, np.int64)

    def sum(self, terms: int) -> int:
        """The number of elements of a sum."""
        if not self._fits or terms.bit_length() < _LONG * _BITS:
            return sum(self._atoms[atom] * times for atom, times in digits(terms))
        first, words = _words(terms)
        times = np.frombuffer(words, np.uint32)[: len(self._atoms) - first]
        return int(np.dot(times.astype(np.int64), self._array[first : first + len(times)]))


# From 32 terms on, NumPy's dot product is faster than a Python loop.
_LONG: Final = 32


def _words(terms: int) -> tuple[int, memoryview]:
    """The digits of a sum that is not 0, from the first one that is not 0 on, and the number of that."""
    # Sums of neighbouring atoms are short once those before them are left out.
    first = ((terms & -terms).bit_length() - 1) // _BITS
    terms >>= first * _BITS
    length = terms.bit_length() // _BITS + 1
    words = memoryview(terms.to_bytes(length * _BITS // 8, sys.byteorder)).cast("I")
    return first, words[::-1] if sys.byteorder == "big" else words


def contains(terms: int, other: int) -> bool:
    """Whether no coefficient of `other` is larger than that of `terms`."""
    length = max(terms.bit_length(), other.bit_length()) // _BITS + 1
    high = _high_bits(length)
    return ((terms | high) - other) & high == high


def _high_bits(length: int) -> int:
    if length >= len(_HIGH_BITS):
        for i in range(len(_HIGH_BITS), length + 1):
            _HIGH_BITS.append(_HIGH_BITS[-1] | 1 << (_BITS * i - 1))
    return _HIGH_BITS[length]


# By number of digits: the highest bit of each.
_HIGH_BITS: Final = [0]
