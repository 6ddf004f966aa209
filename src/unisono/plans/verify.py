"""Proof by execution: all ranks run symbolically, and every element must end as the collective promises.

One run proves a set of plans for all counts. It has one cell per part or block (cells.py), and compares
lengths as formal sums: two parts of a vector may be equally long by chance, and are not the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, NoReturn, TypeAlias

from unisono.plans.amounts import Amount
from unisono.plans.cells import Cell, CellError, Cells, Run, Runs
from unisono.plans.layout import buffer_counts, is_local, touched
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Shape, Slice, Step
from unisono.plans.symbols import Expressions

__all__ = ["PlanError", "verify"]


class PlanError(AssertionError):
    """A set of plans is wrong; the text says which rank, round and step shows it."""


def verify(plans: Sequence[Plan], *, ordered: bool = False, canonical: bool = False) -> None:
    """Run the plans of all ranks and raise PlanError unless they do what their collective promises.

    - Every required element has exactly the right contributions, each once, at the right position, and the
      same expression on every rank.
    - Messages match in number, order and length.
    - `in` is never written, and nothing is read before it is set.
    - Messages of one round do not touch each other's elements.
    - There is no deadlock, even if every send waits for its receive and every round for the one before.

    All that for all counts. `ordered` also requires the rank order, `canonical` the canonical bracketing.
    """
    _check_shapes(plans)
    world = _World(plans)
    for state in world.ranks:
        _check_points(state)
    world.run()
    _check_results(world, ordered or canonical, canonical)


def _check_shapes(plans: Sequence[Plan]) -> None:
    """Refuse a set that is not one plan per rank of one shape, with the right buffers."""
    if not plans or [plan.rank for plan in plans] != list(range(plans[0].shape.size)):
        raise PlanError(f"not one plan per rank: ranks {[plan.rank for plan in plans]}")
    first = plans[0]
    for plan in plans:
        if _common(plan) != _common(first):
            raise PlanError(
                f"ranks 0 and {plan.rank} solve different problems: {_common(first)}, {_common(plan)}"
            )
        if (plan.in_count, plan.out_count) != buffer_counts(plan.shape, plan.rank):
            raise PlanError(
                f"rank {plan.rank}: in and out hold {plan.in_count} and {plan.out_count} elements"
            )


def _common(plan: Plan) -> tuple[object, ...]:
    """Return what all ranks must agree on."""
    shape = plan.shape
    return plan.algorithm, shape.collective, shape.size, len(shape.counts), shape.root, shape.hosts


class _Posted(NamedTuple):
    """A step of a message that waits for its other end."""

    rank: int
    step: Send[Amount] | Recv[Amount] | RecvReduce[Amount]


class _Rank:
    """The state of one rank."""

    def __init__(self, plan: Plan, runs: Runs) -> None:
        self.plan, self.runs = plan, runs
        self.round = 0
        self.waiting: list[Step] = []
        self.local_after: list[Step] = []
        lengths = dict.fromkeys(Buf, 0)
        self.known: dict[Buf, set[Run]] = {buf: set() for buf in Buf}
        for step in plan.steps:
            for slice_, _ in touched(step):
                run = self.run_of(step, slice_)
                self.known[slice_.buf].add(run)
                lengths[slice_.buf] = max(lengths[slice_.buf], run.last)
        self.layout = {Buf.IN: _layout(plan, Buf.IN, runs), Buf.OUT: _layout(plan, Buf.OUT, runs)}
        self.buffers = {
            Buf.IN: Cells(runs, len(self.layout[Buf.IN])),
            Buf.OUT: Cells(runs, len(self.layout[Buf.OUT])),
            Buf.TMP: Cells(runs, lengths[Buf.TMP]),
        }
        self.buffers[Buf.IN].fill(self.layout[Buf.IN], plan.rank)
        if plan.shape.collective in ("all_reduce", "broadcast", "reduce"):
            self.buffers[Buf.OUT].fill(self.layout[Buf.OUT], plan.rank)
        if plan.shape.collective == "barrier":
            self.buffers[Buf.TMP].fill([1] * lengths[Buf.TMP], 1 << plan.rank)

    @property
    def ended(self) -> bool:
        return self.round == len(self.plan.rounds)

    def run_of(self, step: Step, slice_: Slice[Amount]) -> Run:
        try:
            return self.runs.of(slice_)
        except CellError as error:
            self.wrong(step, str(error))

    def wrong(self, step: Step | None, what: str) -> NoReturn:
        """Raise PlanError with the rank, round and step."""
        at = f", step {step}" if step is not None else ""
        plan = self.plan
        raise PlanError(
            f"{plan.shape.collective} by {plan.algorithm}: rank {plan.rank}, round {self.round}{at}: {what}"
        )


def _layout(plan: Plan, buf: Buf, runs: Runs) -> list[int]:
    """The atoms of `in` or `out`, in the order in which they lie in memory."""
    shape, rank = plan.shape, plan.rank
    counts, size = shape.counts, shape.size
    length = plan.in_count if buf is Buf.IN else plan.out_count
    if not length.terms:
        return []
    match shape.collective:
        case "all_to_all" if buf is Buf.IN:
            return runs.sequence(counts[rank * size : (rank + 1) * size])
        case "all_to_all":
            return runs.sequence(counts[rank::size])
        case "all_gather" | "gather" | "scatter" | "reduce_scatter":
            is_whole = (shape.collective in ("all_gather", "gather")) == (buf is Buf.OUT)
            return runs.sequence(counts if is_whole else [counts[rank]])
        case _:
            return runs.sequence([counts[0]])


def _check_points(state: _Rank) -> None:
    """Refuse slices that are apart when every atom has one element, and overlap for other counts.

    An executor orders what overlaps, and finds it by looking at single cells.
    """
    for buf, known in state.known.items():
        ends: defaultdict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for run in known:
            ends[run.first][0].add(run.start)
            ends[run.last][1].add(run.stop)
        rows = [ends[place] for place in sorted(ends)]
        pairs = [(stop, start) for starts, stops in rows for stop in stops for start in starts]
        pairs += [
            (one, other)
            for (starts, stops), (later_starts, later_stops) in pairwise(rows)
            for one in starts | stops
            for other in later_starts | later_stops
        ]
        for one, other in pairs:
            if one != other and not state.runs.is_at_most(one, other):
                texts = state.runs.text(one), state.runs.text(other)
                state.wrong(None, f"{buf.value}: {texts[0]} may lie beyond {texts[1]}")


class _World:
    """All ranks, and the messages that wait for their other end.

    In a barrier, an element of `tmp` holds the ranks that must have arrived before it was last touched, one
    bit per rank; a write adds to it, since it waited for the touches before. Dependencies count here, not
    rounds: an executor may run ahead of rounds.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        slices = (slice_ for plan in plans for step in plan.steps for slice_, _ in touched(step))
        lengths = (amount for plan in plans for amount in (plan.in_count, plan.out_count))
        try:
            runs = Runs(slices, lengths)
        except ValueError as error:
            raise PlanError(str(error)) from error
        self.is_barrier = plans[0].shape.collective == "barrier"
        self.ranks = [_Rank(plan, runs) for plan in plans]
        self.expressions = Expressions(len(plans))
        self.posted: defaultdict[tuple[int, int, bool], deque[_Posted]] = defaultdict(deque)
        self.ready = deque(self.ranks)

    def run(self) -> None:
        """Run all ranks, one round at a time, until all have ended."""
        while self.ready:
            state = self.ready.popleft()
            if not state.ended:
                self._begin_round(state)
        stuck = [state for state in self.ranks if not state.ended]
        if stuck:
            waits = "; ".join(
                f"rank {state.plan.rank}, round {state.round}: {', '.join(map(str, state.waiting[:3]))}"
                for state in stuck[:8]
            )
            stuck[0].wrong(None, f"deadlock: {len(stuck)} ranks wait forever: {waits}")

    def _begin_round(self, state: _Rank) -> None:
        """Run the local steps before the messages and post these; the other local steps run after them."""
        steps = state.plan.rounds[state.round]
        for step in steps:
            _check_step(state, step)
        state.waiting = [step for step in steps if not is_local(step)]
        if not state.waiting:
            state.local_after = list(steps)
            self._end_round(state)
            return
        first, stop = steps.index(state.waiting[0]), len(steps) - steps[::-1].index(state.waiting[-1])
        if stop - first != len(state.waiting):
            state.wrong(None, "a local step is between messages")
        _check_conflicts(state)
        for step in steps[:first]:
            self._run_local(state, step)
        state.local_after = list(steps[stop:])
        for step in list(state.waiting):
            self._post(state, step)

    def _end_round(self, state: _Rank) -> None:
        for step in state.local_after:
            self._run_local(state, step)
        state.round += 1
        self.ready.append(state)

    def _post(self, state: _Rank, step: Step) -> None:
        """Match a message with its other end if that is posted already."""
        assert isinstance(step, Send | Recv | RecvReduce)
        is_send = isinstance(step, Send)
        rank, peer = state.plan.rank, step.peer
        others = self.posted[(rank, peer, False) if is_send else (peer, rank, True)]
        if not others:
            self.posted[(rank, peer, True) if is_send else (peer, rank, False)].append(_Posted(rank, step))
            return
        other = others.popleft()
        sent, received = (_Posted(rank, step), other) if is_send else (other, _Posted(rank, step))
        self._deliver(self.ranks[sent.rank], sent.step, self.ranks[received.rank], received.step)

    def _deliver(self, sender: _Rank, send: Step, receiver: _Rank, receive: Step) -> None:
        assert isinstance(send, Send)
        assert isinstance(receive, Recv | RecvReduce)
        cells = self._read(sender, send, send.src)
        if receiver.runs.flat(receive.dst.count) != sum(cell.atom for cell in cells):
            receiver.wrong(receive, f"rank {sender.plan.rank} sends {send.src.count} elements: {send}")
        if isinstance(receive, RecvReduce):
            self._reduce(receiver, receive, receive.dst, cells, receive.left)
        else:
            self._write(receiver, receive, receive.dst, cells)
        for state, step in ((sender, send), (receiver, receive)):
            state.waiting.remove(step)
            if not state.waiting:
                self._end_round(state)

    def _run_local(self, state: _Rank, step: Step) -> None:
        assert isinstance(step, Copy | Reduce)
        cells = self._read(state, step, step.src)
        if isinstance(step, Copy):
            self._write(state, step, step.dst, cells)
        else:
            self._reduce(state, step, step.dst, cells, step.left)

    def _reduce(
        self, state: _Rank, step: Step, dst: Slice[Amount], cells: Sequence[Cell], left: bool
    ) -> None:
        result = []
        for held, other in zip(self._read(state, step, dst), cells, strict=True):
            if (held.atom, held.position) != (other.atom, other.position):
                state.wrong(step, "elements of different positions would be combined")
            operands = (other, held) if left else (held, other)
            try:
                expression = self.expressions.pair(*(operand.expression for operand in operands))
            except ValueError as error:
                state.wrong(step, str(error))
            result.append(held._replace(expression=expression))
        self._write(state, step, dst, result)

    def _read(self, state: _Rank, step: Step, src: Slice[Amount]) -> list[Cell]:
        try:
            return state.buffers[src.buf].read(state.run_of(step, src))
        except CellError as error:
            state.wrong(step, f"reads {src}: {error}")

    def _write(self, state: _Rank, step: Step, dst: Slice[Amount], cells: Sequence[Cell]) -> None:
        run, buffer = state.run_of(step, dst), state.buffers[dst.buf]
        if self.is_barrier:
            held = self._read(state, step, dst)
            cells = [
                one._replace(expression=one.expression | other.expression)
                for one, other in zip(held, cells, strict=True)
            ]
        try:
            buffer.write(run, cells)
        except CellError as error:
            state.wrong(step, str(error))


def _check_step(state: _Rank, step: Step) -> None:
    """Refuse a step that is wrong by itself."""
    runs = []
    for slice_, is_written in touched(step):
        run = state.run_of(step, slice_)
        runs.append((slice_.buf, run))
        if slice_.buf is not Buf.TMP:
            length = sum(state.layout[slice_.buf])
            if not state.runs.is_at_most(run.stop, length):
                state.wrong(step, f"{slice_} is outside a buffer of {state.runs.text(length)} elements")
        if is_written and slice_.buf is Buf.IN:
            state.wrong(step, "writes `in`")
        if run.first == run.last:
            state.wrong(step, f"{slice_} is always empty")
    if isinstance(step, Copy | Reduce):
        (buf, dst), (other, src) = runs
        if dst.stop - dst.start != src.stop - src.start:
            state.wrong(step, f"{step.src.count} elements into {step.dst.count}")
        if buf is other and dst.first < src.last and src.first < dst.last:
            state.wrong(step, "source and destination overlap")
    elif not 0 <= step.peer < state.plan.shape.size:
        state.wrong(step, "no such rank")
    elif step.peer == state.plan.rank:
        state.wrong(step, "a message to itself")


def _check_conflicts(state: _Rank) -> None:
    """Refuse a round where one message writes what another reads or writes."""
    if len(state.waiting) == 1:
        return
    touches = []
    for step in state.waiting:
        for slice_, is_written in touched(step):
            run = state.run_of(step, slice_)
            touches.append((slice_.buf.value, run.first, run.last, is_written, step))
    touches.sort(key=lambda touch: touch[:3])
    in_buf, read_until, written_until = "", 0, 0
    for buf, first, last, is_written, step in touches:
        if buf != in_buf:
            in_buf, read_until, written_until = buf, 0, 0
        if first < written_until or (is_written and first < read_until):
            state.wrong(step, "conflict: another message of this round touches these elements")
        if is_written:
            written_until = max(written_until, last)
        else:
            read_until = max(read_until, last)


class _Piece(NamedTuple):
    """What a part of `out` must hold: contributions of these ranks, from this position on; in cells."""

    start: int
    length: int
    contributors: int
    position: int


Promise: TypeAlias = Callable[[Shape, int, int], list[_Piece]]


def _everyone(shape: Shape) -> int:
    return (1 << shape.size) - 1


def _blocks_of_all(shape: Shape, rank: int, length: int) -> list[_Piece]:
    return [_Piece(source, 1, 1 << source, 0) for source in range(shape.size)]


def _column(shape: Shape, rank: int, length: int) -> list[_Piece]:
    return [_Piece(source, 1, 1 << source, rank) for source in range(shape.size)]


def _vector(length: int, contributors: int) -> list[_Piece]:
    return [_Piece(0, length, contributors, 0)]


# By shape, rank and the number of cells of `out`. A block is one cell.
_PROMISES: Final[dict[str, Promise]] = {
    "all_reduce": lambda shape, rank, length: _vector(length, _everyone(shape)),
    "reduce": lambda shape, rank, length: _vector(length, _everyone(shape)),
    "broadcast": lambda shape, rank, length: _vector(length, 1 << shape.root),
    "all_gather": _blocks_of_all,
    "gather": lambda shape, rank, length: _blocks_of_all(shape, rank, length) if length else [],
    "scatter": lambda shape, rank, length: [_Piece(0, 1, 1 << shape.root, rank)],
    "reduce_scatter": lambda shape, rank, length: [_Piece(0, 1, _everyone(shape), rank)],
    "all_to_all": _column,
    "scan": lambda shape, rank, length: _vector(length, (2 << rank) - 1),
    "exscan": lambda shape, rank, length: _vector(length, (1 << rank) - 1) if rank else [],
    "barrier": lambda shape, rank, length: [],
}


def _check_results(world: _World, ordered: bool, canonical: bool) -> None:
    shape = world.ranks[0].plan.shape
    first = world.ranks[0].buffers[Buf.OUT].row
    for state in world.ranks:
        row = state.buffers[Buf.OUT].row
        for piece in _PROMISES[shape.collective](shape, state.plan.rank, len(row)):
            _check_piece(world.expressions, state, piece, ordered, canonical)
        if shape.collective == "barrier":
            _check_barrier(state)
        if shape.collective == "exscan" and state.plan.rank == 0 and any(row):
            state.wrong(None, "rank 0 of an exscan gets nothing, but `out` was written")
        if shape.collective == "all_reduce" and row != first:
            place = next(i for i, (one, other) in enumerate(zip(row, first, strict=True)) if one != other)
            state.wrong(None, f"cell {place} of out is bracketed differently than on rank 0")


def _check_barrier(state: _Rank) -> None:
    arrived = 1 << state.plan.rank
    for cell in state.buffers[Buf.TMP].row:
        arrived |= cell.expression if cell is not None else 0
    missing = ((1 << state.plan.shape.size) - 1) & ~arrived
    if missing:
        state.wrong(None, f"passes the barrier before ranks {_ranks(missing)} have arrived")


def _check_piece(known: Expressions, state: _Rank, piece: _Piece, ordered: bool, canonical: bool) -> None:
    layout, row = state.layout[Buf.OUT], state.buffers[Buf.OUT].row
    at = sum(layout[: piece.start])
    for index in range(piece.length):
        place = piece.start + index
        cell = row[place]
        if cell is None:
            state.wrong(None, f"cell {place} of out is never set")
        if (cell.at, cell.atom) != (at, layout[place]):
            state.wrong(None, f"cell {place} of out is not {state.runs.text(layout[place])}")
        if cell.position != piece.position + index:
            state.wrong(
                None, f"cell {place} of out holds position {cell.position}, not {piece.position + index}"
            )
        at += cell.atom
    for expression in {cell.expression for cell in row[piece.start : piece.start + piece.length] if cell}:
        if known.contributors[expression] != piece.contributors:
            state.wrong(
                None,
                f"out holds {known.text(expression)}, not the contributions of {_ranks(piece.contributors)}",
            )
        if ordered and not known.is_ascending[expression]:
            state.wrong(None, f"out holds {known.text(expression)}, not in rank order")
        if canonical and expression != _canonical(known, state.plan.shape.collective, piece.contributors):
            state.wrong(None, f"out holds {known.text(expression)}, not bracketed canonically")


def _canonical(known: Expressions, collective: str, contributors: int) -> int:
    """Return the expression of a reproducible result: a left fold for prefixes, otherwise the tree."""
    ranks = _ranks(contributors)
    if len(ranks) == 1:
        return ranks[0]
    if collective in ("scan", "exscan"):
        result = 0
        for rank in ranks[1:]:
            result = known.pair(result, rank)
        return result

    def tree(lo: int, hi: int) -> int:
        if hi - lo == 1:
            return lo
        mid = lo + (1 << ((hi - lo - 1).bit_length() - 1))
        return known.pair(tree(lo, mid), tree(mid, hi))

    return tree(0, len(ranks))


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
