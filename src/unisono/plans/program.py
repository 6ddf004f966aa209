"""Programs: the steps of a plan, and which of them must wait for which, for all counts.

A *program* is made once per plan; the engine takes it as it is (backends/native/programs.py) and binds it
to the counts of each call. The reference executor (execute.py) runs a *bound program*: steps cut into
pieces, each with the earlier pieces that it waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from unisono.plans.amounts import Amount
from unisono.plans.bind import Values
from unisono.plans.catalog import entry_of, reduces
from unisono.plans.layout import mapped, slice_of, touched
from unisono.plans.steps import (
    BoundStep,
    Buf,
    Plan,
    Slice,
    Step,
)

__all__ = ["BoundProgram", "Edge", "Program", "bound_program", "piece_bytes_of", "program_of"]

# With the default segment 64 MiB. Both ends share the copying of a message, more evenly the longer it is.
_DIRECT_SEGMENTS: Final = 256


class Edge(NamedTuple):
    """A step that must wait for an earlier one where two of their slices overlap.

    A slice is named by its place: 0 is what the step writes, or what a send reads; 1 is what a copy or a
    reduction reads.
    """

    earlier: int
    later: int
    earlier_slice: int
    later_slice: int


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of a plan, in their written order, and the edges between them."""

    steps: tuple[Step, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """The pieces of a plan for given counts. Piece i waits for `before[i]`; `after[i]` wait for it."""

    pieces: tuple[BoundStep, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    in_count: int
    out_count: int
    tmp_count: int


def piece_bytes_of(plan: Plan, segment_bytes: int, message_bytes_max: int) -> int:
    """The largest length of a piece, in bytes; the same on every rank.

    Pieces allow overlap: one is reduced or forwarded while the next arrives. Where every byte goes straight
    to its destination there is nothing to overlap, and pieces are longer, because each costs a message.
    """
    shape = plan.shape
    # With two ranks nothing is forwarded.
    is_pair = shape.size <= 2 and not reduces(shape.collective)
    if not is_pair and not entry_of(shape.collective, plan.algorithm).is_direct:
        return segment_bytes
    return max(segment_bytes, min(_DIRECT_SEGMENTS * segment_bytes, message_bytes_max))


@lru_cache(maxsize=1024)
def program_of(plan: Plan) -> Program:
    """Find what every step of a plan must wait for."""
    steps = tuple(plan.steps)
    touches = [
        _Touch(i, place, slice_.buf, writes, slice_.start, slice_.stop)
        for i, step in enumerate(steps)
        for place, (slice_, writes) in enumerate(touched(step))
    ]
    buffers = {buf: _Touches([touch for touch in touches if touch.buf is buf]) for buf in Buf}
    edges = [edge for touch in touches for edge in buffers[touch.buf].add(touch)]
    return Program(steps, tuple(sorted(set(edges))))


class _Touch:
    """A slice that a step reads or writes: its ends, and which cells are between if every atom is one."""

    __slots__ = ("buf", "end", "first", "last", "place", "start", "step", "writes")

    def __init__(self, step: int, place: int, buf: Buf, writes: bool, start: Amount, stop: Amount) -> None:
        self.step, self.place, self.buf, self.writes = step, place, buf, writes
        self.start, self.end = start, stop
        self.first, self.last = start.units, stop.units


class _Touches:
    """Which steps touched which cells of a buffer last: the source of every edge.

    A cell lies between neighbouring places. A write hides an earlier touch of a cell, so that no step need
    wait for that touch any more, only if the write covers the cell for all counts: slices that begin together
    may have different ends, where blocks of different lengths use one slot in turn.
    """

    def __init__(self, touches: Sequence[_Touch]) -> None:
        self._cells: defaultdict[int, list[_Touch]] = defaultdict(list)
        points: defaultdict[int, set[Amount]] = defaultdict(set)
        for touch in touches:
            points[touch.first].add(touch.start)
            points[touch.last].add(touch.end)
        # Places where slices that end or begin there do so at different points, for some counts.
        self._blurred = {place for place, found in points.items() if len(found) > 1}

    def add(self, touch: _Touch) -> Iterator[Edge]:
        """Add the next touch; yield what its step must wait for."""
        for cell in range(touch.first, touch.last):
            earlier = self._cells[cell]
            for other in earlier:
                if other.step != touch.step and self._must_wait(touch, other, earlier, cell):
                    yield Edge(other.step, touch.step, other.place, touch.place)
            if touch.writes:
                earlier[:] = [other for other in earlier if not self._covers(touch, other, cell)]
            earlier.append(touch)

    def _must_wait(self, touch: _Touch, other: _Touch, earlier: Sequence[_Touch], cell: int) -> bool:
        if not touch.writes:
            return other.writes
        # A step that waits for every reader of a value need not wait for its writer: the readers did.
        return not other.writes or not any(
            not reader.writes and reader.step > other.step and self._covers(reader, other, cell)
            for reader in earlier
        )

    def _covers(self, touch: _Touch, other: _Touch, cell: int) -> bool:
        """Whether a touch has all elements of a cell that another has, for all counts."""
        is_begin = touch.first < cell or cell not in self._blurred or touch.start == other.start
        is_end = touch.last > cell + 1 or cell + 1 not in self._blurred
        return is_begin and (is_end or (other.last == cell + 1 and other.end <= touch.end))


@lru_cache(maxsize=1024)
def bound_program(plan: Plan, counts: tuple[int, ...], segment: int) -> BoundProgram:
    """Bind a plan's program to counts, cut into pieces of at most `segment` elements.

    A piece waits for those earlier ones that it has elements in common with. An empty step has no piece.
    """
    program, values = program_of(plan), Values(plan, counts)
    steps = [values.step(step) for step in program.steps]
    pieces: list[BoundStep] = []
    base: list[int] = []
    for step in steps:
        base.append(len(pieces))
        pieces += _cut(step, segment)
    slices = [[slice_ for slice_, _ in touched(step)] for step in steps]
    before: list[set[int]] = [set() for _ in pieces]
    for edge in program.edges:
        earlier = slices[edge.earlier][edge.earlier_slice]
        later = slices[edge.later][edge.later_slice]
        for piece, others in _overlaps(later, earlier, segment):
            before[base[edge.later] + piece].update(base[edge.earlier] + other for other in others)
    after: list[list[int]] = [[] for _ in pieces]
    for i, awaited in enumerate(before):
        for other in awaited:
            after[other].append(i)
    tmp = (slice_.stop for step in steps for slice_, _ in touched(step) if slice_.buf is Buf.TMP)
    return BoundProgram(
        tuple(pieces),
        tuple(tuple(sorted(awaited)) for awaited in before),
        tuple(map(tuple, after)),
        values.number(plan.in_count),
        values.number(plan.out_count),
        max(tmp, default=0),
    )


def _overlaps(one: Slice[int], other: Slice[int], segment: int) -> Iterator[tuple[int, range]]:
    """Yield the pieces of a slice that have elements in common with another one, each with those pieces."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    if start >= stop:
        return
    for piece in range((start - one.start) // segment, (stop - 1 - one.start) // segment + 1):
        first = max(start, one.start + piece * segment)
        last = min(stop, one.start + (piece + 1) * segment) - 1
        yield piece, range((first - other.start) // segment, (last - other.start) // segment + 1)


def _cut(step: BoundStep, segment: int) -> Iterator[BoundStep]:
    """Cut a step into pieces of at most `segment` elements."""
    count = slice_of(step).count
    for start in range(0, count, segment):
        length = min(segment, count - start)

        def part(s: Slice[int], start: int = start, length: int = length) -> Slice[int]:
            return Slice(s.buf, s.start + start, s.start + start + length)

        yield mapped(step, part)
