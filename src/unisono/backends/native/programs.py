"""Plans compiled to programs of the engine (native/collective/program.hpp), which binds and runs them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from unisono import _native
from unisono.plans.amounts import Amount, Kind, atom_terms, contains, digits
from unisono.plans.layout import touched
from unisono.plans.program import program_of
from unisono.plans.steps import Buf, Copy, Plan, RecvReduce, Reduce, Send, Step

__all__ = ["compiled"]

# native/collective/program.hpp: Step, Buffer
_STEPS: Final = {"Send": 0, "Recv": 1, "RecvReduce": 2, "Copy": 3, "Reduce": 4}
_BUFFERS: Final = {Buf.IN: 0, Buf.OUT: 1, Buf.TMP: 2}

_Row = tuple[int, int, int, int, int, int, int, int, int]


# As many as the cache of plans holds. A plan is built once per collective, algorithm, size, rank, root and
# hosts, and compared by identity.
@lru_cache(maxsize=1024)
def compiled(plan: Plan) -> _native.Program:
    """Return the engine's program for a plan."""
    program = program_of(plan)
    points = _Points()
    slices = [slice_ for step in program.steps for slice_, _ in touched(step)]
    ends = [amount for slice_ in slices for amount in (slice_.start, slice_.stop)]
    points.add([*ends, plan.in_count, plan.out_count])
    cuts = plan.atoms.cuts if plan.atoms is not None else ()
    return _native.Program(
        [(cut.kind, cut.of, cut.parts) for cut in cuts] or [(Kind.ONE, 0, 1)],
        points.rows,
        [_row(step, points) for step in program.steps],
        program.edges,
        (points.index(plan.in_count), points.index(plan.out_count)),
        len(plan.shape.counts),
        plan.shape.size,
    )


class _Points:
    """Amounts as points: each is an earlier point plus a multiple of one atom."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self._made = [0]
        self._index = {0: 0}

    def index(self, amount: Amount) -> int:
        """The number of a point."""
        return self._index[amount.terms]

    def add(self, amounts: list[Amount]) -> None:
        """Add amounts; those that are in one cut follow each other."""
        by_terms = {amount.terms: amount for amount in amounts}
        for terms in sorted(by_terms, key=lambda each: by_terms[each].units):
            if terms not in self._index:
                # Neighbours in a buffer differ by one atom most often.
                bases = (base for base in (*self._made[: -_NEIGHBOURS - 1 : -1], 0) if contains(terms, base))
                self._extend(next(bases), terms)

    def _extend(self, base: int, terms: int) -> None:
        for atom, times in digits(terms - base):
            before, base = base, base + atom_terms(atom) * times
            if base not in self._index:
                self._index[base] = len(self._made)
                self._made.append(base)
                self.rows.append((self._index[before], atom, times))


# Enough for the cuts of two buffers, whose points alternate.
_NEIGHBOURS: Final = 6


def _row(step: Step, points: _Points) -> _Row:
    dst = step.src if isinstance(step, Send) else step.dst
    src = step.src if isinstance(step, Copy | Reduce) else dst
    return (
        _STEPS[type(step).__name__],
        0 if isinstance(step, Copy | Reduce) else step.peer,
        _BUFFERS[dst.buf],
        points.index(dst.start),
        points.index(dst.stop),
        _BUFFERS[src.buf],
        points.index(src.start),
        points.index(src.stop),
        step.left if isinstance(step, Reduce | RecvReduce) else False,
    )
